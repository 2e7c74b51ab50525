"""Quantized weights in safetensors files, which a CPU multiplies without the library of their method.

Each format has a reader. The model is built without `quantization_config`, from the weights that the readers return,
converted to a floating-point type. `stored_weights.py` then replaces them by the quantized ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from paged_backend.api.errors import ConfigError
from paged_backend.files import model_files
from paged_backend.files.quantization_fields import check_known, check_settings, method_of
from paged_backend.loading import model_sizes
from paged_backend.loading.awq import awq_format
from paged_backend.loading.checkpoint_formats import Format, Layout
from paged_backend.loading.compressed_tensors import compressed_tensors_format
from paged_backend.loading.fp8 import fp8_format
from paged_backend.loading.gptq import gptq_format
from paged_backend.loading.mxfp4 import mxfp4_format
from paged_backend.loading.quantized_blocks import Blocks

log = logging.getLogger("paged_llm")

FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {  # by quant_method
    "awq": awq_format,
    "gptq": gptq_format,
    "compressed-tensors": compressed_tensors_format,
    "fp8": fp8_format,
    "fbgemm_fp8": fp8_format,
    "mxfp4": mxfp4_format,
}


def settings_of(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of quantization_config; empty if the model is not quantized."""
    settings = getattr(hf_config, model_files.QUANTIZATION, None)
    return settings if isinstance(settings, dict) else settings.to_dict() if settings is not None else {}


def format_of(hf_config: PretrainedConfig, path: Path, device: torch.device) -> Format | None:
    """Return the format in which weights are read here; None if they are not quantized, or left to transformers.

    Raises ConfigError for a variant of a format that is not supported.
    """
    settings = settings_of(hf_config)
    if device.type != "cpu" or path.suffix == model_files.GGUF or settings.get("quant_method") not in FORMATS:
        return None
    _check_settings(settings, path, device)
    return FORMATS[settings["quant_method"]](settings)


def check_method(hf_config: PretrainedConfig, path: Path, device: torch.device, tensor_parallel_size: int = 1) -> None:
    """Raise ConfigError if transformers cannot load the quantized weights, or not for so many ranks."""
    given = getattr(hf_config, model_files.QUANTIZATION, None)
    if given is None or path.suffix == model_files.GGUF:
        return
    settings = given.to_dict() if hasattr(given, "to_dict") else given
    check_known(settings, path / model_files.CONFIG, AUTO_QUANTIZATION_CONFIG_MAPPING)
    if format_of(hf_config, path, device):
        return
    _check_settings(settings, path, device)
    if tensor_parallel_size > 1 and not is_dequantized(hf_config, path):
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size}: must be 1 for weights of"
            f" {json.dumps(method_of(settings))} on {device.type}"
        )


def _check_settings(settings: Mapping[str, Any], path: Path, device: torch.device) -> None:
    check_settings(settings, path / model_files.CONFIG, on_cpu=device.type == "cpu")


def is_dequantized(hf_config: PretrainedConfig, path: Path) -> bool:
    """Return whether transformers converts quantized weights to `dtype` while loading, which applies to GGUF and fp8.

    transformers multiplies these formats in quantized form only with the PyPI package `kernels`, which is not a
    requirement of the engine.
    """
    return path.suffix == model_files.GGUF or settings_of(hf_config).get("quant_method") == "fp8"


class _Weight(NamedTuple):
    """A quantized weight in the files."""

    base: str  # the beginning of its tensors' names
    layout: Layout
    ends: tuple[str, ...]  # ends of its tensors' names


class QuantizedCheckpoint:
    """The quantized weights of a model directory, by the names of the model's weights."""

    def __init__(self, path: Path, form: Format) -> None:
        """Raises ConfigError for quantized tensors that do not belong to the format."""
        self.format = form.name
        files = model_sizes.open_weights(path)
        self._files = {name: file for file, handle in files.items() for name in handle.keys()}  # noqa: SIM118
        self._handles = files
        self._last: tuple[str, Blocks] | None = None  # the experts of a layer are one weight, and found one by one
        self._weights = dict(self._group(form))
        if not self._weights:
            markers = ", ".join(f"*{layout.marker}" for layout in form.layouts)
            raise ConfigError(f"{path}: no tensor {markers}, although {model_files.QUANTIZATION} names {form.name}")
        self._parts = {weight.base + end for weight in self._weights.values() for end in weight.ends}
        self._unused = {name for name in self._files if name.endswith(tuple(form.unused))} - self._parts
        if self._unused:
            log.info("%d scales of activations are not used: activations stay in the data type", len(self._unused))
        self.sizes: dict[str, tuple[int, int]] = {}  # elements and bytes of the weights that `state_dict` has read

    def find(self, name: str) -> str | None:
        """Return the name of a weight in the files, or None if it is not quantized there."""
        return name if name in self._weights else None

    def read(self, name: str) -> Iterator[Blocks]:
        """Yield a weight. Raises ConfigError if it does not have the layout of its format."""
        if self._last is None or self._last[0] != name:
            self._last = name, self._read(name)
        yield self._last[1]

    def _read(self, name: str) -> Blocks:
        weight = self._weights[name]
        parts = {end: self._tensor(weight.base + end) for end in weight.ends}
        try:
            return weight.layout.read(parts)
        except (ValueError, KeyError, RuntimeError, IndexError) as error:
            reason = f"no tensor {weight.base}{error.args[0]}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{self._files[weight.base + weight.ends[0]]}: {name}: {reason}") from error

    def state_dict(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all weights of the model, with quantized ones converted to `dtype`. Raises ConfigError."""
        made = {}
        for name in self._files.keys() - self._parts - self._unused:
            tensor = made[name] = self._tensor(name)
            if name.endswith("weight") and (not tensor.is_floating_point() or tensor.itemsize == 1):
                raise ConfigError(f"{self._files[name]}: {name}: has dtype {tensor.dtype}, but no scales")
        for name, weight in self._weights.items():
            plain = self._read(name).dequantize().to(dtype)
            made[name] = plain.transpose(-1, -2).contiguous() if weight.layout.is_transposed else plain
            self.sizes[name] = plain.numel(), sum(self._tensor(weight.base + end).nbytes for end in weight.ends)
        return made

    def _group(self, form: Format) -> Iterator[tuple[str, _Weight]]:
        """Yield the weights with their names in the model."""
        for layout in form.layouts:
            for name in self._files:
                base = name.removesuffix(layout.marker)
                if base != name:
                    ends = (layout.marker, *(end for end in layout.parts if base + end in self._files))
                    if (layout.weight in layout.parts) == (base + layout.weight in self._files):
                        yield base + layout.weight, _Weight(base, layout, ends)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[self._files[name]].get_tensor(name)
        return tensor
