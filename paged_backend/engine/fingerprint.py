"""Identifies what the KV cache and the tokens of a model depend on.

Stores keep blocks under such a digest, and an instance of a model continues requests of another one only if both have
the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import torch
import transformers

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.config import EngineConfig
from paged_backend.api.limits import EngineLimits
from paged_backend.api.token_outputs import TOKEN_OUTPUTS
from paged_backend.engine.request_frames import FRAMES_VERSION
from paged_backend.files.content import content_of
from paged_backend.kv.stores.block_file import FORMAT_VERSION
from paged_backend.loading.model_loader import LoadedModel
from paged_kernels.cpu import native


def fingerprint(config: EngineConfig, loaded: LoadedModel, limits: EngineLimits) -> str:
    """Return a digest of the content of the model's files, data types, quantization, device and vocabulary.

    A draft model is not part of it: it does not change tokens.
    """
    spec = loaded.spec
    source = BlockSource(config, limits.layout, [loaded.path], spec.dtype, spec.kv_dtype, loaded.model.device)
    facts = {
        "source": source.fingerprint,
        "vocabulary": [spec.vocab_size, len(loaded.tokenizer), sorted(spec.eos_ids)],
        "tokenizer": config.tokenizer,
        "frames": FRAMES_VERSION,
        "outputs": sorted(TOKEN_OUTPUTS),
    }
    return blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class BlockSource:
    """What the keys and values of blocks depend on besides the tokens."""

    config: EngineConfig
    layout: BlockLayout
    models: Sequence[Path]  # directories or files
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device

    @cached_property
    def fingerprint(self) -> str:
        """A digest, which is the same on other machines."""
        return self._digest([content_of(model) for model in self.models])

    def _digest(self, models: list[str]) -> str:
        config, layout = self.config, self.layout
        facts = {
            "models": models,
            "transformers": transformers.__version__,
            "options": [config.load_format, config.seed if config.load_format == "dummy" else None],
            "weights": [str(self.dtype), config.quantization, config.quantization_group_size],
            "activations": config.quantized_activations,
            "layout": [str(self.kv_dtype), config.block_size, *map(str, layout.kinds)],
            "skipped": config.kv_cache_dtype_skip_layers,
            "device": self.device.type,
            "code": FORMAT_VERSION,
        }
        if config.batch_invariant:  # equal bits need equal arithmetic
            facts["arithmetic"] = _arithmetic(self.device)
        return blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _arithmetic(device: torch.device) -> str | None:
    """Return what the bits of batch-invariant results depend on: the CPU's instructions, or the kind of GPU."""
    return native.level() if device.type == "cpu" else torch.cuda.get_device_name(device)
