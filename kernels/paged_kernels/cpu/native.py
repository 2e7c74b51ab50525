"""Calls of the C++ kernels in csrc/, which `paged_kernels.cpu.build` compiles once per instruction set ("level").

The best level that this machine supports is used, or the one that PAGED_CPU_LEVEL names.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.arguments import (
    check_add_rms_norm,
    check_kv_write,
    check_paged_attention,
    check_rope_kv_write,
    check_swiglu,
)
from paged_kernels.cpu.build import library
from paged_kernels.layer_cache import LayerCache
from paged_kernels.paging import Paging

log = logging.getLogger("paged_llm.kernels")

LEVEL = "PAGED_CPU_LEVEL"
BUILD_COMMAND = "python -m paged_kernels.cpu.build"
TIMED_OPS = ("linear", "add_rms_norm", "swiglu", "rope_kv_write", "paged_attention")  # in the order of OpKind in C++
GROUP = 16  # number of outputs of a linear layer whose weights are stored together


@cache
def levels() -> tuple[str, ...]:
    """Return the levels that were built and that this machine supports, the best first.

    Logs a warning and returns none if nothing was built. Raises ValueError if PAGED_CPU_LEVEL is not among them.
    """
    try:
        torch.ops.load_library(path := library())
    except OSError as error:
        reason = str(error) if path.exists() else "not compiled"
        log.warning("no C++ kernels (%s): PyTorch is used, which is slower. Fix: run %s", reason, BUILD_COMMAND)
        return ()
    names = ctypes.CDLL(str(path)).paged_levels
    names.restype = ctypes.c_char_p
    found = tuple(names().decode().split())
    requested = os.environ.get(LEVEL)
    if requested and requested not in found:
        raise ValueError(f"{LEVEL}={requested}: this machine has {', '.join(found)}")
    log.info("C++ kernels: level %s", requested or found[0])
    return found


@cache
def _read_seconds() -> Callable[[Any], None]:
    found: Callable[[Any], None] = ctypes.CDLL(str(library())).paged_seconds
    return found


def seconds() -> dict[str, float]:
    """Return the time that this thread has spent on each kind of operation so far, inside of `DecoderLayer` too.

    The kernels must be compiled.
    """
    spent = (ctypes.c_double * len(TIMED_OPS))()
    _read_seconds()(spent)
    return dict(zip(TIMED_OPS, spent, strict=True))


def level() -> str:
    """Return the level in use. The kernels must be compiled."""
    return os.environ.get(LEVEL) or levels()[0]


@cache
def _index(name: str | None) -> int:
    chosen = name or level()
    if chosen not in levels():
        raise ValueError(f"level={chosen}: this machine has {', '.join(levels())}")
    return levels().index(chosen)


@cache
def _operator(name: str) -> Callable[..., Any]:
    assert levels(), "not compiled"
    found: Callable[..., Any] = getattr(torch.ops.paged_cpu, name).default
    return found


def paged_attention(
    query: Tensor,
    cache: LayerCache,
    paging: Paging,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """Compute `paged_kernels.paged_attention.paged_attention`. Padding rows get zeros.

    Raises RuntimeError if a sequence has more queries than context, or a block outside the pool.
    """
    check_paged_attention(query, cache, sliding_window, softcap, sinks)
    out = _like(query)
    _operator("paged_attention")(
        out, _dense(query), cache.keys, cache.values, cache.key_scales, cache.value_scales,
        paging.block_tables, paging.context_lens, paging.query_starts,
        scale, sliding_window or 0, softcap or 0.0, sinks if sinks is None else sinks.to(query.dtype).contiguous(),
        _index(level),
    )  # fmt: skip
    return out


def kv_write(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor, *, level: str | None = None) -> None:
    """Compute `paged_kernels.kv_write.kv_write`."""
    check_kv_write(key, value, cache, slots)
    _operator("kv_write")(
        _dense(key), _dense(value), cache.keys, cache.values, cache.key_scales, cache.value_scales,
        slots.contiguous(), _index(level),
    )  # fmt: skip


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
    level: str | None = None,
) -> Tensor:
    """Compute `paged_kernels.rope_kv_write.rope_kv_write`."""
    check_rope_kv_write(query, key, value, cos, sin, cache, slots, query_weight, key_weight)
    out = _like(query)
    _operator("rope_kv_write")(
        out, _dense(query), _dense(key), _dense(value), _dense(cos), _dense(sin.to(cos.dtype)),
        cache.keys, cache.values, cache.key_scales, cache.value_scales, slots.contiguous(),
        query_weight, key_weight, eps, _index(level),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, level: str | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `paged_kernels.add_rms_norm.add_rms_norm`."""
    check_add_rms_norm(x, residual, weight)
    residual = None if residual is None else _dense(residual)
    normed, total = _operator("add_rms_norm")(_dense(x), residual, weight.contiguous(), eps, _index(level))
    return normed, x if residual is None else total


def swiglu(gate_up: Tensor, *, level: str | None = None) -> Tensor:
    """Compute `paged_kernels.swiglu.swiglu`."""
    check_swiglu(gate_up)
    out: Tensor = _operator("swiglu")(_dense(gate_up), _index(level))
    return out


class PackedLinear(NamedTuple):
    """The weight of a linear layer in the layout of `linear`: groups of 16 outputs, padded with zeros.

    [groups, in_features, 16]; for bfloat16, in pairs of inputs, [groups, in_features / 2, 16, 2].
    """

    groups: Tensor
    in_features: int
    out_features: int
    scales: Tensor | None  # [out_features] float32, for an int8 weight


def pack_linear(weight: Tensor, scales: Tensor | None = None) -> PackedLinear:
    """Pack a weight [out_features, in_features] in float32, float16, bfloat16, or int8 with a scale per output."""
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    padded = F.pad(weight, (0, weight.shape[1] % 2, 0, -weight.shape[0] % GROUP))
    groups = padded.view(len(padded) // GROUP, GROUP, padded.shape[1] // pair, pair).transpose(1, 2).contiguous()
    return PackedLinear(groups, weight.shape[1], len(weight), scales)


def linear(x: Tensor, weight: PackedLinear, bias: Tensor | None = None, *, level: str | None = None) -> Tensor:
    """Multiply x [..., in_features] by a packed weight: [..., out_features], accumulated in float32.

    x has the type of the weight, or any floating-point type if the weight is int8. Raises RuntimeError for types or
    sizes that do not match.
    """
    groups, in_features, out_features, scales = weight
    if x.shape[-1] != in_features:
        raise RuntimeError(f"linear: rows of {x.shape[-1]} for a weight of {in_features} inputs")
    x = _dense(x) if x.dim() == 2 else x.contiguous()
    product: Tensor = _operator("linear")(x, groups, scales, bias, out_features, _index(level))
    return product


class DecoderLayer(NamedTuple):
    """A plain decoder layer in one call.

    The result is that of `add_rms_norm`, `linear`, `rope_kv_write` (or `kv_write`), `paged_attention`, `linear`,
    `add_rms_norm`, `linear`, `swiglu` and `linear` in this order, bit for bit.
    """

    norm: Tensor
    eps: float
    qkv: PackedLinear
    qkv_bias: Tensor | None
    num_heads: int
    rotates: bool
    query_norm: Tensor | None
    key_norm: Tensor | None
    head_eps: float
    scale: float
    sliding_window: int | None
    softcap: float | None
    o: PackedLinear
    o_bias: Tensor | None
    post_norm: Tensor
    post_eps: float
    gate_up: PackedLinear
    gate_up_bias: Tensor | None
    down: PackedLinear
    down_bias: Tensor | None

    def bind(self, *, level: str | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the layer as a function of a step's tensors. All of them must be dense.

        Its arguments are the output [num_tokens, hidden] of the previous layer, the residual stream or None, cos and
        sin [1, num_tokens, head_dim], the cache and the paging; it returns the output and the residual stream.
        """
        operator = _operator("decoder_layer")
        constants = (
            self.norm.contiguous(), self.eps, self.qkv.groups, self.qkv.scales, self.qkv_bias, self.num_heads,
            self.rotates, self.query_norm, self.key_norm, self.head_eps,
            self.scale, self.sliding_window or 0, self.softcap or 0.0,
            self.o.groups, self.o.scales, self.o_bias, self.post_norm.contiguous(), self.post_eps,
            self.gate_up.groups, self.gate_up.scales, self.gate_up_bias, self.gate_up.out_features,
            self.down.groups, self.down.scales, self.down_bias, _index(level),
        )  # fmt: skip

        def call(
            output: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, cache: LayerCache, paging: Paging
        ) -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = operator(
                output, residual, cos, sin, cache.keys, cache.values, cache.key_scales, cache.value_scales,
                paging.slots, paging.block_tables, paging.context_lens, paging.query_starts, *constants,
            )  # fmt: skip
            return result

        return call


def _like(x: Tensor) -> Tensor:  # twice as fast as `torch.empty`, of which a step needs hundreds
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
