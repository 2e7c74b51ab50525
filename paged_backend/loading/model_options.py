"""Resolve engine options against the model and the device: data types, context length, quantization, embeddings."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import PretrainedConfig

from paged_backend.api.config import DTYPES, KV_CACHE_DTYPES, EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.limits import EmbeddingSpec
from paged_backend.files.model_files import GGUF, check_gguf
from paged_backend.files.start_checks import ALREADY_QUANTIZED, check_length
from paged_backend.loading.quantized_checkpoint import is_dequantized
from paged_backend.models import rope
from paged_backend.models.quantization import QuantizationSpec
from paged_kernels.cpu import native

INT4_GROUP_SIZE = 32


def pick_device(config: EngineConfig) -> torch.device:
    """Return the device of the engine. Raises ConfigError if a GPU is requested but not usable."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError('device="cuda": no usable GPU; use "auto" or "cpu"')
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def pick_dtype(requested: str, model_dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the data type of weights and activations.

    `auto` is the model's own type on a GPU. On a CPU it is bfloat16 if the CPU has instructions for it (AVX512-BF16,
    AMX), otherwise float32, because 16-bit values would have to be widened.
    """
    if DTYPES[requested] != "auto":
        return getattr(torch, DTYPES[requested])
    if device.type == "cpu":
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    return model_dtype or torch.float32


def pick_kv_dtype(requested: str, dtype: torch.dtype) -> torch.dtype:
    """Return the data type of the KV cache. `auto` is the type of the weights and activations."""
    return dtype if KV_CACHE_DTYPES[requested] == "auto" else getattr(torch, KV_CACHE_DTYPES[requested])


def pick_max_model_len(requested: int | None, text_config: PretrainedConfig) -> int:
    """Return the context length. Raises ConfigError if it exceeds the model's positions or static rope angles."""
    limit, reason = rope.max_static_len(text_config)
    if requested is None:
        if limit is None:
            raise ConfigError("max_model_len: the model's configuration has no limit; set the option")
        return limit
    check_length(requested, limit, reason)
    return requested


def pick_embedding(hf_config: PretrainedConfig, size: int | None) -> EmbeddingSpec | None:
    """Return the supported embeddings; None without a hidden size.

    vLLM reads the same fields, `is_matryoshka` and `matryoshka_dimensions`.
    """
    if size is None:
        return None
    dimensions = getattr(hf_config, "matryoshka_dimensions", None)
    if isinstance(dimensions, list) and dimensions:
        return EmbeddingSpec(size, tuple(n for n in dimensions if isinstance(n, int) and 0 < n <= size))
    return EmbeddingSpec(size, range(1, size + 1) if getattr(hf_config, "is_matryoshka", False) else ())


def check_quantization(config: EngineConfig, hf_config: PretrainedConfig, path: Path, device: torch.device) -> None:
    """Raise ConfigError if quantized weights are requested but not possible."""
    if config.quantization is None:
        return
    reason = None
    if device.type != "cpu":
        reason = 'only supported on a CPU; leave it out, or set device="cpu"'
    elif not native.levels():
        reason = "requires the CPU kernels, which have not been compiled; run: python -m paged_kernels.cpu.build"
    elif _has_quantized_weights(config, hf_config, path):
        reason = ALREADY_QUANTIZED
    if reason:
        raise ConfigError(f"quantization={json.dumps(config.quantization)}: {reason}")


def check_batch_invariance(
    config: EngineConfig, hf_config: PretrainedConfig, path: Path, device: torch.device
) -> None:  # fmt: skip
    """Raise ConfigError if batch invariance is requested but not possible on the device."""
    if not config.batch_invariant:
        return
    if device.type == "cuda" and _has_quantized_weights(config, hf_config, path):
        raise ConfigError(
            "batch_invariant=true: not supported on a GPU with quantized weights, which other libraries multiply in an"
            " order that depends on the batch"
        )
    if device.type == "cpu" and not native.levels():
        raise ConfigError(
            "batch_invariant=true: requires the CPU kernels, which have not been compiled; run: python -m"
            " paged_kernels.cpu.build"
        )


def _has_quantized_weights(config: EngineConfig, hf_config: PretrainedConfig, path: Path) -> bool:
    """Return whether weights are quantized that are not dequantized when they are loaded. Raises ConfigError."""
    if path.suffix == GGUF:
        return config.load_format != "dummy" and check_gguf(path).is_quantized
    return bool(getattr(hf_config, "quantization_config", None)) and not is_dequantized(hf_config, path)


def rounds_activations(config: EngineConfig, dtype: torch.dtype) -> bool:
    """Return whether activations of a type are rounded to 8 bits before they are multiplied by quantized weights."""
    return config.quantized_activations == "int8" or (config.quantized_activations == "auto" and dtype != torch.float32)


def quantization_spec(config: EngineConfig, dtype: torch.dtype) -> QuantizationSpec | None:
    """Return how weights are rounded in a model with activations of a type, or None if they are not."""
    if config.quantization is None:
        return None
    is_int4 = config.quantization == "int4"
    group_size = config.quantization_group_size or (INT4_GROUP_SIZE if is_int4 else None)
    return QuantizationSpec(4 if is_int4 else 8, group_size, rounds_activations(config, dtype))
