"""Calls of the C++ kernels in csrc/, which `paged_kernels.cpu.build` compiles for instruction sets ("levels").

The best level that was compiled and that this machine supports is used, or the one that PAGED_CPU_LEVEL names.
"""

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_kernels.cpu.build import (
    COMMON,
    LEVELS,
    WITHOUT_TILES,
    BuildFailed,
    build,
    build_best,
    find_compiler,
    library,
    supported,
    with_tileless,
)
from paged_kernels.cpu.packed_linear import PackedLinear
from paged_kernels.layer_cache import LayerCache
from paged_kernels.paging import Paging

log = logging.getLogger("paged_llm.kernels")
_avoided_tiles: list[bool] = []  # not empty if no tile instructions may be used

NAMESPACE = "paged_cpu"  # namespace of the operators
LEVEL = "PAGED_CPU_LEVEL"
BUILD_COMMAND = "python -m paged_kernels.cpu.build"
TIMED_OPS = ("linear", "add_rms_norm", "swiglu", "rope_kv_write", "paged_attention", "best_tokens")  # as Kind in C++


class PoolCounts(NamedTuple):
    """Counts of the thread pool since the process started."""

    programs: int  # calls of operators
    repeats: int  # work items that a waiting thread computed again
    discarded: int  # results that came after another thread's


_compiles: list[bool] = []  # not empty if levels are compiled when they are used


def compile_on_demand() -> None:
    """Compile the best level now, and every other level when it is asked for by name. For tests.

    Does nothing without a compiler. A process that has not called this never compiles.
    """
    with suppress(BuildFailed):
        find_compiler()
        build_best()
        _compiles.append(True)
        levels.cache_clear()


@cache
def _library() -> ctypes.CDLL:
    """Return the common library, for its functions that are not operators."""
    return ctypes.CDLL(str(library(COMMON)))


@cache
def _table(level: str) -> int:
    """Return the address of a level's table of kernels."""
    table = ctypes.CDLL(str(library(level))).paged_level
    table.restype = ctypes.c_void_p
    address: int = table()
    return address


@cache
def _number(level: str) -> int:
    """Load a level. Returns its number, which operators take."""
    if _compiles and (failed := build(with_tileless(level))):
        raise failed.popitem()[1]
    number, add = list(LEVELS).index(level), _library().paged_add_level
    add.argtypes = (ctypes.c_int, ctypes.c_void_p)
    add(number, _table(level))
    return number


def set_threads(threads: int) -> None:
    """Set the number of threads that the kernels use. Results do not depend on it.

    Raises ValueError if it is not from 1 to 2**31 - 1.
    """
    if not 1 <= threads < 1 << 31:
        raise ValueError(f"threads is {threads}; it must be from 1 to {(1 << 31) - 1}")
    if levels():
        _library().paged_set_threads(threads)


def threads() -> int:
    """Return the number of threads that the kernels use. The kernels must be compiled."""
    count: int = _library().paged_threads()
    return count


def pool_counts() -> PoolCounts:
    """Return counts of the thread pool. The kernels must be compiled."""
    counts = (ctypes.c_int64 * len(PoolCounts._fields))()
    _library().paged_pool_counts(counts)
    return PoolCounts(*counts)


@cache
def levels() -> tuple[str, ...]:
    """Return the levels that were compiled and that this machine supports, the best first.

    Logs a warning and returns an empty tuple if nothing was compiled. Raises ValueError if PAGED_CPU_LEVEL is not among
    them.
    """
    compiled = tuple(
        level for level in supported() if _compiles or all(library(name).exists() for name in with_tileless(level))
    )
    requested = os.environ.get(LEVEL)
    try:
        if not compiled or not library(COMMON).exists():
            raise OSError("not compiled")
        torch.ops.load_library(library(COMMON))
        if requested:
            _check(requested, LEVEL, compiled)
        _number(requested or compiled[0])
    except OSError as error:
        log.warning("no C++ kernels (%s): PyTorch is used, which is slower. Fix: run %s", error, BUILD_COMMAND)
        return ()
    log.info("C++ kernels: level %s", requested or compiled[0])
    if compiled[0] != supported()[0]:
        log.warning(
            "This processor has level %s, which is not compiled; it is faster. Fix: run %s",
            supported()[0],
            BUILD_COMMAND,
        )
    return compiled


def _check(level: str, field: str, known: Sequence[str]) -> None:
    if level in known:
        return
    if level in supported():
        raise ValueError(f"{field}={level}: not compiled; run {BUILD_COMMAND} {level}")
    raise ValueError(f"{field}={level}: this machine has {', '.join(known)}")


def seconds() -> dict[str, float]:
    """Return the time that this thread has spent on each kind of operation so far, inside of `DecoderLayer` too.

    The kernels must be compiled.
    """
    spent = (ctypes.c_double * len(TIMED_OPS))()
    _library().paged_seconds(spent)
    return dict(zip(TIMED_OPS, spent, strict=True))


def level() -> str:
    """Return the level in use. The kernels must be compiled."""
    best = os.environ.get(LEVEL) or levels()[0]
    return WITHOUT_TILES.get(best, best) if _avoided_tiles else best


def avoid_tiles() -> None:
    """Use no tile instructions from now on. The result of a row then does not depend on the number of rows."""
    _avoided_tiles.append(True)
    _index.cache_clear()


@cache
def _index(name: str | None) -> int:
    chosen = name or level()
    _check(chosen, "level", levels())
    return _number(chosen)


@cache
def _operator(name: str) -> Callable[..., Any]:
    assert levels(), "not compiled"
    found: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
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
    same_size = cache.value_dim == query.shape[2]
    out = _like(query) if same_size else query.new_empty(*query.shape[:2], cache.value_dim)
    tensors, packed = _packed_of(cache, paging)
    packed_slots, packed_tables = (packed.slots.contiguous(), packed.block_tables) if packed else (None, None)
    _operator("paged_attention")(
        out, _dense(query), cache.keys, cache.values, cache.key_scales, cache.value_scales, cache.key_channels,
        tensors, paging.slots.contiguous(), paging.block_tables, paging.context_lens, paging.query_starts,
        packed_slots, packed_tables,
        scale, sliding_window or 0, softcap or 0.0, sinks if sinks is None else sinks.to(query.dtype).contiguous(),
        _index(level),
    )  # fmt: skip
    return out


def kv_write(key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, *, level: str | None = None) -> None:
    """Compute `paged_kernels.kv_write.kv_write`."""
    _operator("kv_write")(
        _dense(key), None if value is None else _dense(value),
        cache.keys, cache.values, cache.key_scales, cache.value_scales, cache.key_channels,
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
    """Compute `paged_kernels.kv_write.rope_kv_write`."""
    out = _like(query)
    _operator("rope_kv_write")(
        out, _dense(query), _dense(key), _dense(value), _dense(cos), _dense(sin.to(cos.dtype)),
        cache.keys, cache.values, cache.key_scales, cache.value_scales, cache.key_channels, slots.contiguous(),
        query_weight, key_weight, eps, _index(level),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, level: str | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `paged_kernels.layer_ops.add_rms_norm`."""
    residual = None if residual is None else _dense(residual)
    normed, total = _operator("add_rms_norm")(_dense(x), residual, weight.contiguous(), eps, _index(level))
    return normed, x if residual is None else total


def swiglu(gate_up: Tensor, *, level: str | None = None) -> Tensor:
    """Compute `paged_kernels.layer_ops.swiglu`."""
    out: Tensor = _operator("swiglu")(_dense(gate_up), _index(level))
    return out


def best_tokens(logits: Tensor, *, out: Tensor | None = None, level: str | None = None) -> Tensor:
    """Return the token with the largest of the logits [num_rows, vocab], [num_rows] int64.

    The first of them if there are several, and -1 if a logit is NaN or infinity, or all are -infinity.
    """
    tokens = logits.new_empty(len(logits), dtype=torch.int64) if out is None else out
    _operator("best_tokens")(_dense(logits), tokens, _index(level))
    return tokens


def linear(x: Tensor, weight: PackedLinear, bias: Tensor | None = None, *, level: str | None = None) -> Tensor:
    """Multiply x [..., in_features] by a packed weight: [..., out_features], accumulated in float32.

    Rows are rounded to 8 bits first if the weight has `int8_rows`.

    x has the type of the weight, or any floating-point type if the weight is quantized. Raises RuntimeError for types
    or sizes that do not match.
    """
    if x.shape[-1] != weight.in_features:
        raise RuntimeError(f"linear: rows of {x.shape[-1]} for a weight of {weight.in_features} inputs")
    x = _dense(x) if x.dim() == 2 else x.contiguous()
    product: Tensor = _operator("linear")(
        x, weight.groups, weight.layout, bias, weight.out_features, _index(level),
    )  # fmt: skip
    return product


class DecoderLayer(NamedTuple):
    """The weights of a plain decoder layer, for `DecoderLayers`.

    The result is the same as from `add_rms_norm`, `linear`, `rope_kv_write` (or `kv_write`), `paged_attention`,
    `linear`, `add_rms_norm`, `linear`, `swiglu` and `linear` in this order, bit for bit. The number of inputs of `down`
    must be a multiple of 16.
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
    sinks: Tensor | None
    o: PackedLinear
    o_bias: Tensor | None
    post_norm: Tensor
    post_eps: float
    gate_up: PackedLinear
    gate_up_bias: Tensor | None
    down: PackedLinear
    down_bias: Tensor | None


class DecoderLayers:
    """Consecutive decoder layers with their caches, computed in one call."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        caches: Sequence[LayerCache],
        pages: Sequence[tuple[int, int | None]],
        *,
        level: str | None = None,
    ) -> None:
        """caches: of each layer. pages: of each layer, the indices of the addresses in its cache and in its packed
        blocks, if it has any.

        Raises RuntimeError for sizes that do not match.
        """
        if not len(layers) == len(caches) == len(pages):
            raise RuntimeError(f"{len(layers)} layers with {len(caches)} caches and {len(pages)} pages")
        self.numbers: list[int] = []
        weakref.finalize(self, _free_layers, self.numbers)
        for parts in zip(layers, caches, pages, strict=True):
            self.numbers.append(_make_layer(*parts, _index(level)))

    def __call__(self, stream: Tensor, cos: Tensor, sin: Tensor, pagings: Sequence[Paging]) -> Tensor:
        """Return the residual stream [num_tokens, hidden] after the layers. All tensors must be dense.

        Args:
            stream: the residual stream before the layers, [num_tokens, hidden].
            cos, sin: [1, num_tokens, head_dim].
            pagings: the addresses in each page. They differ in slots and block tables only.
        """
        result: Tensor = _operator("decoder_layers")(self.numbers, stream, cos, sin, *_addresses(pagings))
        return result


class CausalModel:
    """A whole language model in one call: embeddings, angles, decoder layers, the last norm and the output layer."""

    def __init__(
        self,
        layers: DecoderLayers,
        embedding: Tensor,
        angles: Tensor,
        norm: Tensor,
        eps: float,
        head: PackedLinear,
        bias: Tensor | None,
    ) -> None:
        """embedding: [vocab, hidden]. angles: cosines and sines of each position, [positions, 2 * head_dim].

        Raises RuntimeError for sizes that do not match.
        """
        number: int = _operator("make_model")(
            layers.numbers, embedding, angles, norm, eps, head.groups, head.layout, bias, head.out_features,
        )  # fmt: skip
        self._number = number
        weakref.finalize(self, _operator("free_model"), number)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor, pagings: Sequence[Paging]) -> Tensor:
        """Return the logits [num_rows, vocab] of some rows.

        Raises RuntimeError for a token, position or row that does not exist.

        Args:
            input_ids, position_ids: [1, num_tokens] int64.
            rows: [num_rows] int64.
            pagings: as for `DecoderLayers`.
        """
        logits: Tensor = _operator("model_logits")(
            self._number, input_ids, position_ids, rows, *_addresses(pagings),
        )  # fmt: skip
        return logits


class ExpertLinear:
    """The linear layers of all experts of a mixture of experts, each of which multiplies some rows."""

    def __init__(
        self, weights: Sequence[PackedLinear], biases: Tensor | None = None, *, level: str | None = None
    ) -> None:
        """weights: the weight of each expert, all of one shape. biases: [experts, out_features]."""
        in_features, out_features = weights[0].in_features, weights[0].out_features
        if any((weight.in_features, weight.out_features) != (in_features, out_features) for weight in weights):
            raise RuntimeError("the weights of the experts have different shapes")
        number: int = _operator("make_experts")(
            [weight.groups for weight in weights], [number for weight in weights for number in weight.layout],
            [None] * len(weights) if biases is None else list(biases.contiguous()),
            in_features, out_features, _index(level),
        )  # fmt: skip
        self._number = number
        weakref.finalize(self, _operator("free_experts"), number)

    def __call__(self, x: Tensor, starts: Tensor, *, swiglu: bool = False) -> Tensor:
        """Multiply rows x [rows, in_features]: [rows, out_features], accumulated in float32.

        Raises RuntimeError for types or sizes that do not match.

        Args:
            x: in the order of the experts.
            starts: [experts + 1] int64; the rows from starts[i] to starts[i + 1] belong to expert i.
            swiglu: return silu(first half) * second half of the products, [rows, out_features / 2]. out_features must
                be a multiple of 32.
        """
        product: Tensor = _operator("expert_linear")(self._number, x.contiguous(), starts, swiglu)
        return product


def _make_layer(layer: DecoderLayer, cache: LayerCache, pages: tuple[int, int | None], level: int) -> int:
    weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
    page, packed_page = pages
    packed = () if cache.packed is None else cache.packed.tensors
    number: int = _operator("make_layer")(
        layer.norm.contiguous(), layer.eps, layer.num_heads, layer.rotates,
        layer.query_norm, layer.key_norm, layer.head_eps,
        layer.scale, layer.sliding_window or 0, layer.softcap or 0.0, layer.sinks,
        layer.post_norm.contiguous(), layer.post_eps, layer.down.in_features,
        [weight.groups for weight in weights], [number for weight in weights for number in weight.layout],
        [layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias],
        cache.keys, cache.values, cache.key_scales, cache.value_scales, cache.key_channels, packed,
        page, -1 if packed_page is None or cache.packed is None else packed_page, level,
    )  # fmt: skip
    return number


def _free_layers(numbers: Sequence[int]) -> None:
    for number in numbers:
        _operator("free_layer")(number)


def _addresses(pagings: Sequence[Paging]) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Return the slots and block tables of each page, and the lengths and rows of the sequences."""
    lens = pagings[0]
    return (
        [paging.slots for paging in pagings],
        [paging.block_tables for paging in pagings],
        lens.context_lens,
        lens.query_starts,
    )


def _packed_of(cache: LayerCache, paging: Paging) -> tuple[Sequence[Tensor], Paging | None]:
    """Return the tensors of a layer's packed blocks and their addresses, if it has any."""
    if cache.packed is None:
        return (), None
    assert paging.packed is not None
    return cache.packed.tensors, paging.packed


def _like(x: Tensor) -> Tensor:  # twice as fast as `torch.empty`, of which a step needs hundreds
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
