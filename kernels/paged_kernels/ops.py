"""The operations a step is made of, by the device of their tensors. Triton is imported only where a GPU is used."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from paged_kernels.block_pair import BlockPair
from paged_kernels.cpu import between_attentions, native
from paged_kernels.draws import SamplingMetadata
from paged_kernels.layer_cache import LayerCache
from paged_kernels.paging import Paging


@cache
def _implementation(module: str, function: str, on_cpu: bool) -> Callable[..., Any]:
    """On a CPU that of C++ where it was compiled, and else that of PyTorch."""
    name = f"paged_kernels.cpu.{module}" if on_cpu else f"kernels.{module}"
    if on_cpu and hasattr(native, function) and native.levels():
        name = native.__name__
    elif on_cpu and hasattr(between_attentions, function):
        name = between_attentions.__name__
    found: Callable[..., Any] = getattr(import_module(name), function)
    return found


def _of(tensor: Tensor, function: str, module: str | None = None) -> Callable[..., Any]:
    return _implementation(module or function, function, tensor.device.type == "cpu")


def paged_attention(
    query: Tensor,
    cache: LayerCache,
    paging: Paging,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of packed queries over their pages; see `paged_kernels.paged_attention.paged_attention`."""
    attend = _of(query, "paged_attention")
    out: Tensor = attend(
        query, cache, paging, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
    )  # fmt: skip
    return out


def kv_write(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Writes new keys and values into their slots; see `paged_kernels.kv_write.kv_write`."""
    _of(key, "kv_write")(key, value, cache, slots)


def rope_kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    *,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotates queries and keys, writes keys and values; see `paged_kernels.rope_kv_write.rope_kv_write`."""
    rotate = _of(query, "rope_kv_write")
    rotated: Tensor = rotate(
        query, key, value, cos, sin, cache, slots, query_weight=query_weight, key_weight=key_weight, eps=eps
    )  # fmt: skip
    return rotated


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalised sum, and the sum; see `paged_kernels.add_rms_norm.add_rms_norm`."""
    if torch.compiler.is_compiling():  # which fuses plain operations with what is around them
        return between_attentions.add_rms_norm(x, residual, weight, eps)
    normed, total = _of(x, "add_rms_norm")(x, residual, weight, eps)
    return normed, total


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; see `paged_kernels.swiglu.swiglu`."""
    if torch.compiler.is_compiling():
        return between_attentions.swiglu(gate_up)
    out: Tensor = _of(gate_up, "swiglu")(gate_up)
    return out


def sample(logits: Tensor, draws: SamplingMetadata | None) -> Tensor:
    """Draws a token for every row; see `paged_kernels.sampling.sample`."""
    tokens: Tensor = _of(logits, "sample", "sampling")(logits, draws)
    return tokens


def block_copy(pair: BlockPair, moves: Tensor, *, programs: int | None = None) -> None:
    """Copies whole blocks between two caches; see `paged_kernels.block_copy.block_copy`."""
    _of(pair.table, "block_copy")(pair, moves, programs=programs)
