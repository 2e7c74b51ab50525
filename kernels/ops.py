"""The operations a model calls, by the device of its tensors. Triton is imported only where a GPU is used."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kernels.cpu import between_attentions
from kernels.layer_cache import LayerCache
from kernels.paging import Paging


@cache
def _paged_attention(device_type: str) -> Callable[..., Tensor]:
    if device_type == "cpu":
        from kernels.cpu.paged_attention import paged_attention as on_cpu

        return on_cpu
    from kernels.paged_attention import paged_attention as on_gpu

    return on_gpu


@cache
def _kv_write(device_type: str) -> Callable[..., None]:
    if device_type == "cpu":
        from kernels.cpu.kv_write import kv_write as on_cpu

        return on_cpu
    from kernels.kv_write import kv_write as on_gpu

    return on_gpu


@cache
def _rope_kv_write(device_type: str) -> Callable[..., Tensor]:
    if device_type == "cpu":
        from kernels.cpu.rope_kv_write import rope_kv_write as on_cpu

        return on_cpu
    from kernels.rope_kv_write import rope_kv_write as on_gpu

    return on_gpu


@cache
def _add_rms_norm() -> Callable[..., tuple[Tensor, Tensor]]:
    from kernels.add_rms_norm import add_rms_norm as on_gpu

    return on_gpu


@cache
def _swiglu() -> Callable[..., Tensor]:
    from kernels.swiglu import swiglu as on_gpu

    return on_gpu


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
    """Attention of packed queries over their pages; see `kernels.paged_attention.paged_attention`."""
    attend = _paged_attention(query.device.type)
    return attend(
        query, cache, paging, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
    )  # fmt: skip


def kv_write(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Writes new keys and values into their slots; see `kernels.kv_write.kv_write`."""
    _kv_write(key.device.type)(key, value, cache, slots)


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
    """Rotates queries and keys, writes keys and values; see `kernels.rope_kv_write.rope_kv_write`."""
    rotate = _rope_kv_write(query.device.type)
    return rotate(
        query, key, value, cos, sin, cache, slots, query_weight=query_weight, key_weight=key_weight, eps=eps
    )  # fmt: skip


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalised sum, and the sum; see `kernels.add_rms_norm.add_rms_norm`."""
    if _in_pytorch(x):
        return between_attentions.add_rms_norm(x, residual, weight, eps)
    return _add_rms_norm()(x, residual, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; see `kernels.swiglu.swiglu`."""
    if _in_pytorch(gate_up):
        return between_attentions.swiglu(gate_up)
    return _swiglu()(gate_up)


def _in_pytorch(x: Tensor) -> bool:
    """On a CPU, and under torch.compile, which fuses plain operations with what is around them."""
    return torch.compiler.is_compiling() or x.device.type == "cpu"
