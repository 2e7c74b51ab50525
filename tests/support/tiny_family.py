"""Tiny models of the families that the support matrix lists, and what transformers generates with them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from paged_backend.api.errors import ConfigError
from paged_backend.engine.assembly import Assembly
from paged_backend.models.recurrent import recurrent_mixers
from tests.support.families import FAMILIES, HYBRID_FAMILIES
from tests.support.in_process import generate_with_transformers, save_tiny, tiny_assembly

MATRIX_FAMILIES = FAMILIES | HYBRID_FAMILIES
# Recurrent layers may have no longest context. The states of tiny models are large compared with their blocks.
HYBRID_OPTIONS = {"max_model_len": 56, "num_gpu_blocks_override": 256}

# Longer than the windows of the families, and with the output as long as the shortest context among them, 56 tokens.
PROMPT_LENGTHS = (1, 9, 17, 25, 40)
MAX_TOKENS = 16
MIN_DISTINCT = 10  # tokens in all outputs; a model that repeats one token would match whatever attention computes

RECORDER = "attention_recorder"


@dataclass(frozen=True, eq=False)
class TinyFamily:
    """A saved tiny model with random float32 weights."""

    name: str
    directory: Path
    model: PreTrainedModel

    @classmethod
    def create(cls, name: str, directory: Path) -> TinyFamily:
        """Save a tiny model of a family in a directory."""
        return cls(name, directory, save_tiny(MATRIX_FAMILIES[name](), directory))

    @cached_property
    def prompts(self) -> list[list[int]]:
        return [self.random_tokens(length) for length in PROMPT_LENGTHS]

    @cached_property
    def outputs(self) -> list[list[int]]:
        """What transformers generates for each prompt alone."""
        outputs = [self.generate(prompt) for prompt in self.prompts]
        assert len({token for output in outputs for token in output}) >= MIN_DISTINCT, f"{self.name}: {outputs}"
        return outputs

    def random_tokens(self, count: int) -> list[int]:
        """Return token ids without special tokens, the same ones for each `count`."""
        rng = random.Random(f"{self.name} {count}")
        return [rng.randrange(3, 320) for _ in range(count)]

    def generate(self, prompt: list[int], max_tokens: int = MAX_TOKENS, **options: Any) -> list[int]:
        """Return the greedy output of transformers. options: of `generate`."""
        return generate_with_transformers(self.model, prompt, max_tokens, **options)

    def assembly(self, *, adapters: Path | None = None, **options: Any) -> Assembly:
        more = HYBRID_OPTIONS if self.name in HYBRID_FAMILIES else {}
        return tiny_assembly(self.directory, adapters=adapters, **{**more, **options})

    def smallest_pool(self, assembly: Assembly, block_size: int) -> int:
        """Return the number of blocks, in pages of the model's layout, of a pool that is just large enough for the
        longest request. assembly: one of this family."""
        layout = replace(assembly.scheduler.blocks.layout, block_size=block_size)
        length = max(PROMPT_LENGTHS) + MAX_TOKENS - 1
        pages = layout.token_pages or layout.pages  # without attention, blocks are states
        return -(-layout.pages_for([length], [length], 0) // pages)


def serve_or_reject(
    family: TinyFamily, support_matrix: Any, feature: str, field: str, **options: Any
) -> Assembly | None:
    """Return an assembly with these options, or None if the family is rejected with an error that names the field,
    which is recorded in the support matrix."""
    try:
        return family.assembly(**options)
    except ConfigError as error:
        message = str(error).removeprefix(f"{family.directory}: ")
        if field not in message:
            raise
        support_matrix.record(family.name, feature, "rejected", message)
        return None


@torch.inference_mode()
def describe_layers(model: PreTrainedModel) -> str:
    """Return the kinds of a model's attention and layers, as found in a forward pass of transformers."""
    arguments: dict[int, dict[str, Any]] = {}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **rest: Any
    ) -> tuple[Tensor, None]:
        arguments[module.layer_idx] = rest
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(RECORDER, attend)
    AttentionMaskInterface.register(RECORDER, lambda *args, **kwargs: None)
    model.set_attn_implementation(RECORDER)
    model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    model.set_attn_implementation("eager")
    config = model.config.get_text_config()
    windows = [layer.get("sliding_window") is not None for layer in arguments.values()]
    kinds = {
        "full attention": not all(windows),
        "sliding window": any(windows),
        "softcap": any(layer.get("softcap") is not None for layer in arguments.values()),
        "sinks": any(layer.get("s_aux") is not None for layer in arguments.values()),
        "latent attention": bool(getattr(config, "kv_lora_rank", None)),
        "recurrent layers": bool(recurrent_mixers(model)),
        "mixture of experts": any(hasattr(module, "experts") for module in model.modules()),
    }
    return ", ".join(kind for kind, present in kinds.items() if present)
