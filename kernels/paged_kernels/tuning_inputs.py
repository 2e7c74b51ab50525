"""Inputs, expected outputs and launches for the tuner: one `Problem` per tuning key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paged_kernels.launch import Launch, device_of
from paged_kernels.launch_table import ROW_COUNT_INVARIANT, AnyKey, RowTuningKey, TuningKey
from paged_kernels.layer_cache import LayerCache, plain_channels, quantize
from paged_kernels.paging import Paging

NUM_KV_HEADS, BLOCK_SIZE = 8, 16
PREFILL_SEQS = 4
CACHED_TOKENS = 1024  # tokens of context before a prefill chunk
MEDIUM_ROWS = 256  # rows timed for kinds with one tile for any number of rows; sequences that sample
COPY_TENSORS = 16  # tensors that hold a copied block
TOLERANCE = 0.03  # relative to the largest magnitude; above the rounding error of bfloat16


@dataclass(frozen=True)
class Problem:
    """The launches for a tuning key, and the expected result."""

    plans: Sequence[Callable[[], list[Launch]]]  # one plan per copy of the inputs, called for every candidate
    outputs: list[Tensor]  # outputs of the first plan
    expected: list[Tensor]
    checked: Any = ...  # index into each output that selects the expected elements

    def is_correct(self) -> bool:
        """Compare the outputs: floating-point ones up to rounding; codes, tokens and bytes exactly."""
        return all(map(_agree, (output[self.checked] for output in self.outputs), self.expected))


def _agree(actual: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    error = (actual.float() - expected.float()).abs().max()
    return bool(error <= TOLERANCE * expected.float().abs().max())


def make_problem(
    key: AnyKey,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    quantized_dtype: torch.dtype = torch.float8_e4m3fn,
) -> Problem:
    """Make random inputs for a tuning key, and compute the expected outputs with the reference.

    quantized_dtype: type of the keys and values of attention for a quantized key.
    """
    if isinstance(key, TuningKey):
        return _attention_problem(key, device, dtype, quantized_dtype if key.quantized else dtype)
    return ROW_PROBLEMS[key.kind](RowInputs(key, device, dtype))


def _attention_problem(key: TuningKey, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> Problem:
    """Make a step of chunks over shuffled blocks, with enough pools to exceed twice the L2 cache.

    One query of every sequence is checked, in four heads of the first KV head.
    """
    from paged_kernels import paged_attention as attention

    num_seqs, query_len, context_len = PREFILL_SEQS, key.length, CACHED_TOKENS + key.length
    group = 4 if key.rows == 16 else key.rows
    blocks = -(-context_len // BLOCK_SIZE)
    order = torch.randperm(num_seqs * blocks, device=device, dtype=torch.int32)
    caches = _random_caches(key, len(order), device, dtype, kv_dtype)

    def paging(context_lens: Tensor, query_len: int) -> Paging:
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
        slots = torch.zeros(num_seqs * query_len, dtype=torch.int64, device=device)
        return Paging(slots, order.view(num_seqs, blocks), context_lens, starts, query_len, context_len)

    step = paging(torch.full((num_seqs,), context_len, dtype=torch.int32, device=device), query_len)
    query = torch.randn(num_seqs * query_len, NUM_KV_HEADS * group, key.block_d, device=device, dtype=dtype)
    out = torch.empty_like(query)

    def plan(cache: LayerCache) -> list[Launch]:
        step.plans.clear()
        return attention.plan_launch(
            out, query, cache, step,
            scale=0.1, sliding_window=None, softcap=None, sinks=None, device=device_of(device),
        )  # fmt: skip

    picked = torch.randint(query_len, (num_seqs,), device=device)
    rows, heads = torch.arange(num_seqs, device=device) * query_len + picked, slice(0, group, max(1, group // 4))
    pairs = ((pool[:, :1], scales if scales is None else scales[:, :1]) for pool, scales in caches[0].pools)
    (keys, key_scales), (values, value_scales) = pairs
    expected = attention.paged_attention_reference(
        query[rows][:, heads], LayerCache(keys, values, key_scales, value_scales),
        paging((context_len - query_len + 1 + picked).int(), 1), scale=0.1,
    )  # fmt: skip
    return Problem([partial(plan, cache) for cache in caches], [out], [expected], (rows, heads))


def _random_caches(
    key: TuningKey, num_blocks: int, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> list[LayerCache]:
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, key.block_d)
    pool_bytes = 2 * num_blocks * NUM_KV_HEADS * BLOCK_SIZE * key.block_d * kv_dtype.itemsize
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    caches = []
    for _ in range(1 + 2 * l2_bytes // pool_bytes):
        keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        if key.quantized:
            (keys, key_scales), (values, value_scales) = (quantize(x, kv_dtype) for x in (keys, values))
            channels = plain_channels(NUM_KV_HEADS, key.block_d, device)
            caches.append(LayerCache(keys, values, key_scales, value_scales, channels))
        else:
            caches.append(LayerCache(keys, values))
    return caches


class RowInputs:
    """The sizes of a row-wise problem, and random tensors on its device."""

    def __init__(self, key: RowTuningKey, device: torch.device, dtype: torch.dtype) -> None:
        self.kind, self.width, self.torch_device, self.dtype = key.kind, key.width, device, dtype
        self.device = device_of(device)
        medium = key.kind == "sampling" or key.kind in ROW_COUNT_INVARIANT
        self.rows = min(key.rows, MEDIUM_ROWS) if medium else key.rows

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed elements."""
        return torch.randn(shape, device=self.torch_device, dtype=dtype or self.dtype)


def _problem(expected: Sequence[Tensor], outputs: Sequence[Tensor], plan: Callable[[], list[Launch]]) -> Problem:
    return Problem([plan], list(outputs), [tensor.clone() for tensor in expected])


def _add_rms_norm_problem(inputs: RowInputs) -> Problem:
    from paged_kernels import layer_ops

    rows, width = inputs.rows, inputs.width
    x, residual, weight = inputs.normal(rows, width), inputs.normal(rows, width), inputs.normal(width)
    normed, total = inputs.normal(2, rows, width)
    expected = layer_ops.add_rms_norm_reference(x, residual, weight, 1e-6)
    return _problem(
        expected,
        [normed, total],
        lambda: [layer_ops.plan_add_rms_norm(normed, total, x, residual, weight, 1e-6, device=inputs.device)],
    )


def _swiglu_problem(inputs: RowInputs) -> Problem:
    from paged_kernels import layer_ops

    gate_up, out = inputs.normal(inputs.rows, 2 * inputs.width), inputs.normal(inputs.rows, inputs.width)
    expected = layer_ops.swiglu_reference(gate_up)
    return _problem([expected], [out], lambda: [layer_ops.plan_swiglu(out, gate_up, device=inputs.device)])


def _sampling_problem(inputs: RowInputs) -> Problem:
    from paged_kernels import sampling
    from paged_kernels.cpu import sampling as on_cpu  # used as reference, since `sample_reference` is slow
    from paged_kernels.sampling_metadata import SamplingMetadata

    rows, device = inputs.rows, inputs.torch_device
    logits, out = 3 * inputs.normal(rows, inputs.width), torch.empty(rows, dtype=torch.int64, device=device)
    seeds = torch.arange(rows)
    expected = on_cpu.sample(logits.cpu(), SamplingMetadata(torch.ones(rows), seeds, seeds, None)).to(device)
    metadata = SamplingMetadata(torch.ones(rows, device=device), seeds.to(device), seeds.to(device), None)
    return _problem([expected], [out], lambda: sampling.plan_launch(logits, metadata, out, device=inputs.device))


def _block_copy_problem(inputs: RowInputs) -> Problem:
    from paged_kernels import block_copy
    from paged_kernels.layer_cache import BlockPair

    shape = (2, COPY_TENSORS, inputs.rows, inputs.width)
    source, target = torch.randint(-128, 128, shape, dtype=torch.int8, device=inputs.torch_device)
    pair = BlockPair.of(source.unbind(), target.unbind())
    moves = torch.randperm(inputs.rows, device=inputs.torch_device)[:, None].repeat(1, 2)
    block_copy.block_copy_reference(pair, moves)

    def plan() -> list[Launch]:
        sizes = dict(largest=pair.largest, aligned=pair.aligned)
        return [block_copy.plan_launch(moves, pair.table, **sizes, device=inputs.device)]

    return _problem(list(target), list(target), plan)


def _random_cache(inputs: RowInputs, num_kv_heads: int, head_dim: int) -> tuple[Tensor, LayerCache, Tensor]:
    """Return the joint pool of keys and values, the cache over it, and a random slot for every row."""
    shape = (2, -(-inputs.rows // BLOCK_SIZE), num_kv_heads, BLOCK_SIZE, head_dim)
    pool = torch.zeros(shape, device=inputs.torch_device, dtype=inputs.dtype)
    slots = torch.randperm(pool.shape[1] * BLOCK_SIZE, device=inputs.torch_device)[: inputs.rows]
    return pool, LayerCache(pool[0], pool[1]), slots


def _kv_write_problem(inputs: RowInputs) -> Problem:
    from paged_kernels import kv_write

    head_dim = min(128, inputs.width)
    num_kv_heads = inputs.width // head_dim
    pool, cache, slots = _random_cache(inputs, num_kv_heads, head_dim)
    key, value = inputs.normal(2, inputs.rows, num_kv_heads, head_dim)
    kv_write.kv_write_reference(key, value, cache, slots)
    return _problem(
        list(pool), list(pool), lambda: [kv_write.plan_kv_write(key, value, cache, slots, device=inputs.device)]
    )


def _rope_kv_write_problem(inputs: RowInputs) -> Problem:
    from paged_kernels import kv_write

    head_dim = min(128, inputs.width)
    num_heads = inputs.width // head_dim
    num_kv_heads = max(1, num_heads // 4)
    pool, cache, slots = _random_cache(inputs, num_kv_heads, head_dim)
    key, value = inputs.normal(2, inputs.rows, num_kv_heads, head_dim)
    query = inputs.normal(inputs.rows, num_heads, head_dim)
    angles = inputs.normal(inputs.rows, head_dim, dtype=torch.float32)
    cos, sin = angles.cos().to(inputs.dtype), angles.sin().to(inputs.dtype)
    norm = inputs.kind.startswith("norm")
    query_weight, key_weight = (inputs.normal(head_dim), inputs.normal(head_dim)) if norm else (None, None)
    rotated = kv_write.rope_kv_write_reference(
        query, key, value, cos, sin, cache, slots, query_weight=query_weight, key_weight=key_weight, eps=1e-6
    )  # fmt: skip
    out = torch.empty_like(query)

    def plan() -> list[Launch]:
        return [
            kv_write.plan_rope_kv_write(
                out, query, key, value, cos, sin, cache, slots, query_weight, key_weight, 1e-6, device=inputs.device
            )
        ]

    return _problem([rotated, *pool], [out, *pool], plan)


ROW_PROBLEMS: dict[str, Callable[[RowInputs], Problem]] = {
    "kv_write": _kv_write_problem,
    "rope_kv_write": _rope_kv_write_problem,
    "norm_rope_kv_write": _rope_kv_write_problem,
    "add_rms_norm": _add_rms_norm_problem,
    "swiglu": _swiglu_problem,
    "sampling": _sampling_problem,
    "block_copy": _block_copy_problem,
}
