"""Pipeline parallelism: the stages of a model.

transformers loads the layers of a rank's stage, and puts identities in the place of the others. `keep_stage` removes
these, so that a stage is a model of its own, with fewer layers:

    stage     input                          layers    output
    first     embeddings                     0, 1      hidden states (StageOutput)
    middle    hidden states (StageInput)     2, 3      hidden states (StageOutput)
    last      hidden states (StageInput)     4, 5      final norm, output layer: logits

A stage is verified, fused and quantized like a whole model. For that, a stage that receives nothing computes from an
example, which depends on the token as embeddings do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.models.attention import UnsupportedModel

CHECKED_TOKENS = 4


class StageInput(nn.Module):
    """Takes the place of the embeddings in a stage after the first: returns the hidden states of the stage before."""

    def __init__(self, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.hidden_size, self.dtype = hidden_size, dtype
        self.received: Tensor | None = None  # [num_tokens, hidden_size]; None: return an example

    def forward(self, input_ids: Tensor) -> Tensor:  # [1, num_tokens] -> [1, num_tokens, hidden_size]
        if self.received is not None:
            return self.received[None]
        columns = torch.arange(1, self.hidden_size + 1, device=input_ids.device)
        return torch.sin((input_ids[..., None] + 1).double() * columns).to(self.dtype)


class StageOutput(nn.Module):
    """Takes the place of the final norm in a stage before the last: returns the hidden states after its layers."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # [1, num_tokens, hidden_size]
        return hidden_states


@dataclass(frozen=True, eq=False)
class Stage:
    """The place of a model's layers in the pipeline."""

    input: StageInput | None  # None: the first stage
    is_last: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> Stage | None:
        """Return the stage of a model; None if it is a whole model."""
        decoder: Any = model.base_model
        source = getattr(decoder, "embed_tokens", None)
        is_last = not isinstance(getattr(decoder, "norm", None), StageOutput)
        if is_last and not isinstance(source, StageInput):
            return None
        return cls(source if isinstance(source, StageInput) else None, is_last)

    @contextmanager
    def receiving(self, hidden_states: Tensor | None) -> Iterator[None]:
        """Make the model compute from these hidden states [num_tokens, hidden_size] inside the context; None: from its
        input ids."""
        if self.input is None or hidden_states is None:
            yield
            return
        self.input.received = hidden_states
        try:
            yield
        finally:
            self.input.received = None


@contextmanager
def plans_of_stage() -> Iterator[None]:
    """Make transformers apply tensor parallelism to the modules of a stage only, inside the context. transformers plans
    it for the whole model before it removes the layers of other stages, and then does not find them."""
    from transformers.distributed import mixin
    from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

    apply = mixin.apply_tensor_parallelism

    def apply_to_stage(model: nn.Module, mesh: Any, plan: dict[str, str]) -> nn.Module:
        modules = {name for name, module in model.named_modules() if not isinstance(module, PipelineIdentityLayer)}
        names = modules | {name for name, _ in model.named_parameters()}
        return apply(model, mesh, {name: style for name, style in plan.items() if name in names})

    mixin.apply_tensor_parallelism = apply_to_stage
    try:
        yield
    finally:
        mixin.apply_tensor_parallelism = apply


def keep_stage(model: PreTrainedModel) -> None:
    """Reduce a model that transformers has loaded for one stage to the layers of this stage. Raises
    UnsupportedModel."""
    from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

    loaded: Any = vars(model).pop("_pp_stage")
    vars(model).pop("forward")  # sends and receives itself, one step at a time
    decoder: Any = model.base_model
    config = model.config.get_text_config()
    kept = [index for index, layer in enumerate(decoder.layers) if not isinstance(layer, PipelineIdentityLayer)]
    decoder.layers = nn.ModuleList([decoder.layers[index] for index in kept])
    for index, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    if types := getattr(config, "layer_types", None):
        config.layer_types = [types[index] for index in kept]
    config.num_hidden_layers = len(kept)
    if hasattr(decoder, "has_sliding_layers"):
        decoder.has_sliding_layers = "sliding_attention" in config.layer_types
    if not loaded.pp_is_first_stage:
        decoder.embed_tokens = StageInput(config.hidden_size, model.dtype)
    if not loaded.pp_is_last_stage:
        decoder.norm, model.lm_head = StageOutput(), nn.Identity()


@torch.inference_mode()
def check_stage(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if the model changes hidden states between the embeddings and the first layer, or between
    the last layer and the final norm. The next stage would change them a second time, or not at all. Called while the
    model has its own attention and layers."""
    stage = Stage.of(model)
    assert stage is not None
    decoder: Any = model.base_model
    seen: dict[str, Tensor] = {}

    def keep(name: str, value: Any) -> None:
        seen[name] = value[0] if isinstance(value, tuple) else value

    hooks = [
        decoder.embed_tokens.register_forward_hook(lambda module, inputs, output: keep("embedded", output)),
        decoder.layers[0].register_forward_pre_hook(
            lambda module, args, kwargs: keep("first", args or kwargs["hidden_states"]), with_kwargs=True
        ),
        decoder.layers[-1].register_forward_hook(lambda module, inputs, output: keep("last", output)),
        decoder.register_forward_hook(lambda module, inputs, output: keep("output", output[0])),
    ]
    try:
        decoder(input_ids=torch.arange(CHECKED_TOKENS, device=model.device)[None], use_cache=False)
    except Exception as error:
        raise UnsupportedModel(f"the forward pass of a stage fails: {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if stage.input is not None and not torch.equal(seen["embedded"], seen["first"]):
        raise UnsupportedModel("changes the embeddings before the first layer")
    if not stage.is_last and not torch.equal(seen["last"], seen["output"]):
        raise UnsupportedModel("changes the hidden states after the last layer")
