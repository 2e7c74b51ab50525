"""Records the attention calls, the masks and the sizes of keys in forward passes of an unmodified model."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from paged_backend.kv.cache import NO_ATTENTION, LayerShape, StateShape
from paged_backend.loading.shallow_copy import layer_modules
from paged_backend.models import recurrent
from paged_backend.models.attention import AttentionSpec, UnsupportedModel
from paged_backend.models.pipeline import Stage

PROBE, BIAS_PROBE = "paged_llm_probe", "paged_llm_bias_probe"
CENTER_POSITIONS, CENTER_STEP = 64, 64  # a center is the mean over 64 of the first 4,096 positions
_TO_VALUE = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
)


@dataclass
class AttentionProbe:
    """Records the attention calls and masks of one forward pass."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    specs: dict[int, AttentionSpec] = field(default_factory=dict)
    layer_windows: set[int | None] = field(default_factory=set)
    mask_windows: set[int | None] = field(default_factory=set)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        sliding_window: int | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        """Record a layer's parameters, as its attention function."""
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in self.shapes:
            raise UnsupportedModel(f"{type(module).__name__}: layer_idx={layer} does not name one attention layer")
        value_dim = None if value.shape[3] == key.shape[3] else value.shape[3]
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value_dim, window=sliding_window)
        arguments = dict(sliding_window=sliding_window, **rest)
        self.specs[layer] = AttentionSpec.of(module, query.shape[3], attention_mask, **arguments)
        self.layer_windows.add(sliding_window)
        # Any values, since only the shape matters.
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def mask(self, *, mask_function: Callable[..., Tensor], **rest: Any) -> None:
        """Record the window of a mask, as the mask function of the model. A mask that hides all tokens is ignored,
        because no layer can use it: Qwen2-MoE without sliding windows builds one."""
        window = _window_of(mask_function)
        if window != 0:
            self.mask_windows.add(window)


class Probed(NamedTuple):
    """The properties of a model's layers, recorded in a forward pass of the unmodified model."""

    layers: tuple[LayerShape, ...]  # what each layer keeps in the KV cache
    specs: tuple[AttentionSpec, ...]  # the attention parameters of the layers with attention
    mixers: list[nn.Module]  # the recurrent mixers
    states: list[StateShape]  # the state that each mixer keeps


def probe_layers(model: PreTrainedModel) -> Probed:
    """Run a forward pass that records the layers of a model. Raises UnsupportedModel.

    The model may be on the meta device: its sizes do not depend on weights.
    """
    mixers = recurrent.recurrent_mixers(model)
    without_values = _NoValues() if model.device.type == "meta" else nullcontext()
    with recurrent.record_states(mixers) as states, without_values:
        layers, specs = _probe_attention(model, mixers)
    return Probed(layers, specs, mixers, [states[index] for index in range(len(mixers))])


@torch.inference_mode()
def _probe_attention(
    model: PreTrainedModel, mixers: list[nn.Module]
) -> tuple[tuple[LayerShape, ...], tuple[AttentionSpec, ...]]:
    """Return the KV cache shape of each layer, and the attention parameters of the layers with attention.

    mixers: the model's recurrent mixers.
    """
    probe = AttentionProbe()
    AttentionInterface.register(PROBE, probe.attend)
    AttentionMaskInterface.register(PROBE, probe.mask)
    model.set_attn_implementation(PROBE)
    ids = torch.zeros(1, 4, dtype=torch.int64, device=model.device)
    try:
        model(input_ids=ids, position_ids=torch.arange(4, device=model.device)[None], use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"its forward pass fails: {type(error).__name__}: {error}") from error
    layers = range(model.config.get_text_config().num_hidden_layers)
    _check_layers(model, layers, probe.shapes.keys(), mixers)
    if invalid := [window for window in probe.layer_windows if window is not None and window < 1]:
        raise UnsupportedModel(f"sliding_window={min(invalid)} in its configuration: must be at least 1")
    # Windows that no layer here uses belong to layers of other stages.
    unused = frozenset() if Stage.of(model) is None else probe.mask_windows - probe.layer_windows
    if probe.layer_windows - {None} != probe.mask_windows - unused - {None}:
        raise UnsupportedModel(
            f"its masks have windows {_shown(probe.mask_windows)}, but its layers pass {_shown(probe.layer_windows)}"
        )
    shapes = tuple(probe.shapes.get(layer, NO_ATTENTION) for layer in layers)
    return shapes, tuple(probe.specs[layer] for layer in layers if layer in probe.specs)


def _check_layers(model: PreTrainedModel, layers: range, attention: Set[int], mixers: list[nn.Module]) -> None:
    """Raise UnsupportedModel unless every layer calls the attention interface, has a recurrent mixer or keeps nothing.

    attention: the indices of the layers that call the attention interface.
    """
    known = attention | {mixer.layer_idx for mixer in mixers}
    modules = layer_modules(model)
    others = [layer for layer in layers if layer not in known]
    if modules is not None:
        others = [layer for layer in others if not recurrent.is_stateless(modules[layer])]
    if others or not attention <= set(layers):
        names = sorted({name for layer in others for name in _stateful_names(modules[layer])}) if modules else []
        raise UnsupportedModel(
            f"{len(attention)} of {len(layers)} layers call the attention interface; the others keep another state"
            + (f" ({', '.join(names)})" if names else "")
        )


def _stateful_names(layer: nn.Module) -> set[str]:
    """Return the classes of the modules in a layer that know its index, or else the class of the layer."""
    inner = {
        type(module).__name__ for module in layer.modules() if module is not layer and hasattr(module, "layer_idx")
    }
    return inner or {type(layer).__name__}


def _shown(windows: set[int | None]) -> str:
    return ", ".join(str(window) for window in sorted(windows - {None}, key=int)) or "none"  # type: ignore[arg-type]


def find_key_channels(model: PreTrainedModel) -> None:
    """Set the `key_channels` of attention modules: the center and the size of each channel of their keys, for caches in
    one byte (`paged_kernels.layer_cache.scale_keys`).

    They follow from the weights, so that all instances of a model agree. A bias, rotated by a position, is the key of a
    token without any features. Its mean over positions is the center; its variance and that of the projection, or of
    the norm after it, are the channel's. Weights that are not linear layers count as equal in all channels.
    """
    AttentionInterface.register(BIAS_PROBE, _set_channels)
    AttentionMaskInterface.register(BIAS_PROBE, lambda **rest: None)
    model.set_attn_implementation(BIAS_PROBE)
    modules = [module for module in model.modules() if _has_bias(module)]
    hooks = [module.register_forward_pre_hook(_without_features, with_kwargs=True) for module in modules]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or CENTER_POSITIONS * CENTER_STEP
    count = min(CENTER_POSITIONS, limit) if modules else 1
    positions = torch.arange(count, device=model.device)[None] * max(1, min(CENTER_STEP, limit // CENTER_POSITIONS))
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def _has_bias(module: nn.Module) -> bool:
    """Return whether this is a module that knows its layer, and a parameter of it is a bias."""
    return hasattr(module, "layer_idx") and any(name.endswith("bias") for name, _ in module.named_parameters())


def _without_features(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Replace the hidden states of a call by zeros."""
    if args:
        return (torch.zeros_like(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": torch.zeros_like(kwargs["hidden_states"])}


def _set_channels(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **rest: Any
) -> tuple[Tensor, None]:
    """Set the channels of a layer's keys, as its attention function."""
    center = torch.zeros_like(key[0, :, 0], dtype=torch.float64)
    variance = _variance(module, center)
    if _has_bias(module):
        biases = key[0].double()
        variance += biases.var(dim=1, correction=0)
        # Soft-capped scores, and the sinks beside scores, do not bear a shift.
        if not rest.get("softcap") and rest.get("s_aux") is None:
            center = biases.mean(dim=1)
        else:
            variance += biases.mean(dim=1).square()
    top = float(variance.max())
    exponent = (0.5 * (variance / top).clamp(min=2.0**-40).log2()).round() if 0 < top < math.inf else center * 0
    module.key_channels = torch.stack((center, torch.exp2(-exponent), torch.exp2(exponent))).float()
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _variance(module: nn.Module, like: Tensor) -> Tensor:
    """Return the variance of each channel of keys without their biases [num_kv_heads, head_dim], for inputs of variance
    1. 0 for other modules than the usual ones."""
    norm: Any = getattr(module, "k_norm", None)
    projection: Any = getattr(module, "k_proj", None)
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.numel() in (like.shape[1], like.numel()):
        found = norm(torch.ones_like(weight)).double().square()  # some norms multiply by 1 + weight
        return found.expand(len(like), -1).clone() if found.numel() == like.shape[1] else found.view_as(like).clone()
    if type(projection) is nn.Linear and len(projection.weight) == like.numel():
        return projection.weight.double().square().sum(dim=1).view_as(like)
    return torch.zeros_like(like)


class _NoValues(TorchDispatchMode):
    """Inside the context, a condition on a tensor without memory is true: that all tokens are seen, in one sequence."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_VALUE and args[0].device.type == "meta":
            return True
        return func(*args, **(kwargs or {}))


def _window_of(mask_function: Callable[..., Tensor]) -> int | None:
    """Return the sliding window of a mask, or None for a causal mask. Raises UnsupportedModel for any other mask."""
    windows = set()
    for query in (99_991, 131_071):  # coprime, so that a chunked mask gives two different windows
        zero = torch.tensor(0)
        seen = mask_function(zero, zero, torch.tensor(query), torch.arange(query + 1)).nonzero()
        first = int(seen[0]) if len(seen) else query + 1
        if len(seen) != query + 1 - first:
            raise UnsupportedModel("a mask with holes")
        windows.add(query + 1 - first if first else None)
    if len(windows) > 1:
        raise UnsupportedModel("a mask that is neither causal nor a sliding window (chunked attention?)")
    return windows.pop()
