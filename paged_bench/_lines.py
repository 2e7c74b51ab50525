"""The memory-bound kernels of `paged bench kernels`, one line of figures each.

A function creates the inputs of a kernel and returns a call, the number of copies of the inputs, and the bytes that a
call has to read and write. To add a kernel, write such a function and add it to LINES.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from paged_backend.memory.kv_cache import KVCache, LayerShape
from paged_bench._race import Call, rotations
from paged_kernels import ops
from paged_kernels.block_pair import BlockPair
from paged_kernels.layer_cache import LayerCache
from paged_kernels.sampling_metadata import SamplingFilters, SamplingMetadata

SHAPE = LayerShape(8, 128)
HEADS, HIDDEN, INNER, VOCAB = 32, 4096, 14336, 128256  # the sizes of Llama-3.1-8B, with SHAPE
BLOCK = 16

Line = Callable[[torch.device, torch.dtype, int], tuple[Call, int, int]]  # the last argument: tokens in a step


def kv_write(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    nbytes = 4 * tokens * SHAPE.num_kv_heads * SHAPE.head_dim * dtype.itemsize
    count = rotations(nbytes, device)
    cache, slots = _pool(count * tokens, device, dtype), _slots(count, tokens, device)
    key, value = _random(2, count, tokens, SHAPE.num_kv_heads, SHAPE.head_dim, device=device, dtype=dtype).unbind()
    return lambda i: ops.kv_write(key[i], value[i], cache, slots[i]), count, nbytes


def rope_kv_write(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    heads = HEADS + 2 * SHAPE.num_kv_heads
    nbytes = 2 * tokens * (heads + 1) * SHAPE.head_dim * dtype.itemsize  # +1: cosines and sines, which are only read
    count = rotations(nbytes, device)
    cache, slots = _pool(count * tokens, device, dtype), _slots(count, tokens, device)
    rows = _random(count, tokens, heads, SHAPE.head_dim, device=device, dtype=dtype)
    query, key, value = rows.split([HEADS, SHAPE.num_kv_heads, SHAPE.num_kv_heads], 2)
    angles = _random(tokens, SHAPE.head_dim // 2, device=device, dtype=torch.float32).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return lambda i: ops.rope_kv_write(query[i], key[i], value[i], cos, sin, cache, slots[i]), count, nbytes


def add_rms_norm(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    nbytes = 4 * tokens * HIDDEN * dtype.itemsize  # two read, two written
    count = rotations(nbytes, device)
    x, residual = _random(2, count, tokens, HIDDEN, device=device, dtype=dtype).unbind()
    weight = torch.ones(HIDDEN, device=device, dtype=dtype)
    return lambda i: ops.add_rms_norm(x[i], residual[i], weight, 1e-6), count, nbytes


def swiglu(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    nbytes = 3 * tokens * INNER * dtype.itemsize
    count = rotations(nbytes, device)
    gate_up = _random(count, tokens, 2 * INNER, device=device, dtype=dtype)
    return lambda i: ops.swiglu(gate_up[i]), count, nbytes


def greedy(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    return _sampling(device, tokens, None)


def filtered(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    """Sample every row with temperature, top_k and top_p."""
    rows = _rows(tokens)

    def full(value: float, kind: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=kind, device=device)

    filters = SamplingFilters(full(50, torch.int32), full(0.9, torch.float32), full(math.inf, torch.float32))
    whole = torch.arange(rows, device=device)
    return _sampling(device, tokens, SamplingMetadata(full(1.25, torch.float32), whole, whole, filters))


def _sampling(device: torch.device, tokens: int, draws: SamplingMetadata | None) -> tuple[Call, int, int]:
    nbytes = 4 * _rows(tokens) * VOCAB
    count = rotations(nbytes, device)
    logits = _random(count, _rows(tokens), VOCAB, device=device, dtype=torch.float32)
    return lambda i: ops.sample(logits[i], draws), count, nbytes


def _rows(tokens: int) -> int:
    return min(tokens, 256)


def block_copy(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    """Copy blocks as copy-on-write does: whole blocks in all layers, here four."""
    copies = max(1, tokens // BLOCK)
    kv = KVCache.allocate([SHAPE] * 4, num_blocks=4 * copies, block_size=BLOCK, dtype=dtype, device=device)
    pair = BlockPair.of(kv.tensors, kv.tensors)
    order = torch.randperm(4 * copies, generator=torch.Generator().manual_seed(0))
    moves = order[: 2 * copies].view(2, copies).T.contiguous().to(device)
    return lambda _: ops.block_copy(pair, moves), 1, 2 * copies * sum(one[0].nbytes for one in kv.tensors)


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def _pool(slots: int, device: torch.device, dtype: torch.dtype) -> LayerCache:
    blocks = -(-slots // BLOCK)
    kv = KVCache.allocate([SHAPE], num_blocks=blocks, block_size=BLOCK, dtype=dtype, device=device)
    return kv.layers[0]


def _slots(count: int, tokens: int, device: torch.device) -> torch.Tensor:
    order = torch.randperm(count * tokens, generator=torch.Generator().manual_seed(0))
    return order.view(count, tokens).to(device)


LINES: dict[str, Line] = {
    "kv_write": kv_write,
    "rope_kv_write": rope_kv_write,
    "add_rms_norm": add_rms_norm,
    "swiglu": swiglu,
    "sample, greedy": greedy,
    "sample, top_k 50 and top_p 0.9": filtered,
    "block_copy": block_copy,
}
