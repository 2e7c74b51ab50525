"""Paged attention with PyTorch on a CPU: gather the pages of a few sequences, then compute attention.

Once per step, a plan turns the block tables into calls. Decode rows of similar length share a call; a prefill chunk
becomes one call per QUERY_TILE of its queries, so that no call reads far past its own causal edge:

    calls of one step      keys ->
    seq 0, seq 3 (decode)  [kkkkkkkkkkkkkk....]  one row each, padded to the longer one
    seq 1, rows 0..255     [kkkkkkkk]
    seq 1, rows 256..399   [kkkkkkkkkkkk]
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.layer_cache import LayerCache, as_bytes, dequantize, pack_full_blocks, scale_queries
from paged_kernels.packed_blocks import PackedBlocks, is_packed
from paged_kernels.paging import Paging

QUERY_TILE = 256  # rows of a prefill chunk per call
CALL_BYTES = 2 << 20  # bytes of keys and values per decode call, which fit the L2 cache of a core
PADDING_BYTES = 128 << 10  # maximum padding per call, which costs no more than another call
PADDING_SHARE = 0.15


@dataclass(frozen=True)
class Span:
    """Consecutive queries of one sequence, and the blocks that they see."""

    seq: int
    row: int  # packed row of the first query
    length: int
    position: int  # position of the first query
    first_block: int
    end_block: int

    @property
    def num_blocks(self) -> int:
        return self.end_block - self.first_block


@dataclass(frozen=True, eq=False)
class Call:
    """One gather and one attention: S spans with Q queries each over L keys, including padding."""

    rows: Tensor  # [S * Q] packed rows
    pages: Tensor  # [S * num_kv_heads * L / block_size]: block * num_kv_heads + head
    unwritten: Tensor  # rows of the gathered [S * num_kv_heads * L] without a token of the sequence
    bias: Tensor  # [S, 1, Q, L]: 0 where visible, -inf elsewhere; query's type
    keys: Tensor  # [S, num_kv_heads, L, head_dim] scratch, shared by the calls of a plan, which run one after the other
    values: Tensor  # [S, num_kv_heads, L, value_dim] likewise
    packed: Tensor | None = None  # [S, L / block_size] packed blocks; None: the layer has none
    unpacked: tuple[Tensor, Tensor, Tensor] | None = None  # [n] each: spans, places of blocks in them, and these blocks


def _spans(paging: Paging, key: "LayerKey") -> Iterator[Span]:
    """Divide the queries of a step. With packed blocks, the queries of a span are in the same block, its last one."""
    block_size, window, tile = key.block_size, key.window, key.block_size if key.packed else QUERY_TILE
    starts = paging.query_starts.tolist()
    for seq, context_len in enumerate(paging.context_lens.tolist()):
        query_len = starts[seq + 1] - starts[seq]
        if context_len == 0 or query_len == 0:
            continue  # skips a padding sequence
        assert context_len >= query_len, f"sequence {seq}: {query_len} queries, context of {context_len}"
        first = context_len - query_len
        for start in range(first - (first % block_size if key.packed else 0), context_len, tile):
            position = max(first, start)
            length = min(start + tile, context_len) - position
            oldest = 0 if window is None else max(0, position - window + 1)
            end_block = (position + length - 1) // block_size + 1
            row = starts[seq] + position - first
            yield Span(seq, row, length, position, oldest // block_size, end_block)


def _groups(spans: list[Span], block_bytes: int) -> Iterator[list[Span]]:
    """Group decode rows of similar length, up to CALL_BYTES; every other span is a group of its own."""
    yield from ([span] for span in spans if span.length > 1)
    group: list[Span] = []
    used = 0
    for span in sorted((s for s in spans if s.length == 1), key=lambda s: -s.num_blocks):
        padded = (len(group) + 1) * (group[0] if group else span).num_blocks
        padding = (padded - used - span.num_blocks) * block_bytes
        too_long = padding > max(PADDING_BYTES, PADDING_SHARE * padded * block_bytes)
        if group and (too_long or padded * block_bytes > CALL_BYTES):
            yield group
            group, used = [], 0
        group.append(span)
        used += span.num_blocks
    if group:
        yield group


def _call(spans: list[Span], paging: Paging, key: "LayerKey", scratch: list[Tensor]) -> Call:
    num_kv_heads, block_size, window = key.num_kv_heads, key.block_size, key.window
    width = max(span.num_blocks for span in spans)
    blocks = torch.zeros((len(spans), width), dtype=torch.int64)
    for i, span in enumerate(spans):
        blocks[i, : span.num_blocks] = paging.block_tables[span.seq, span.first_block : span.end_block]
    pages = blocks[:, None, :] * num_kv_heads + torch.arange(num_kv_heads)[:, None]

    query = torch.arange(spans[0].length)
    first_key = torch.tensor([span.first_block * block_size for span in spans])
    key_position = first_key[:, None] + torch.arange(width * block_size)  # [S, L]
    position = torch.tensor([span.position for span in spans])[:, None] + query  # [S, Q]
    age = position[:, :, None] - key_position[:, None, :]
    hidden = (age < 0) if window is None else (age < 0) | (age >= window)
    bias = torch.zeros(hidden.shape, dtype=scratch[0].dtype).masked_fill_(hidden, float("-inf"))
    # Memory that this sequence has not written may hold another request's NaN, and 0 * NaN is NaN.
    unwritten = (key_position > position[:, -1:])[:, None, :].expand(-1, num_kv_heads, -1)
    keys, values = (part[: pages.numel()].view(len(spans), num_kv_heads, width * block_size, -1) for part in scratch)
    packed, unpacked = None, None
    if key.packed:
        assert paging.packed is not None
        packed = torch.zeros_like(blocks)
        for i, span in enumerate(spans):
            packed[i, : span.num_blocks] = paging.packed.block_tables[span.seq, span.first_block : span.end_block]
        in_cache = ~is_packed(key_position[:, ::block_size], position[:, :1])
        packed.masked_fill_(in_cache, 0)
        of_span, place = in_cache.nonzero(as_tuple=True)
        unpacked = of_span, place, blocks[of_span, place]
    return Call(
        rows=torch.cat([span.row + query for span in spans]),
        pages=pages.flatten(),
        unwritten=unwritten.reshape(-1).nonzero().flatten(),
        bias=bias[:, None],
        keys=keys,
        values=values,
        packed=packed,
        unpacked=unpacked,
    )


@dataclass(frozen=True)
class LayerKey:
    """The properties of a layer that decide how its attention is called. A `paging.PlanKey`."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    value_dim: int  # elements of a value that are stored apart from keys
    dtype: torch.dtype  # data type of queries
    window: int | None
    packed: bool  # whether full blocks are packed

    def plan(self, paging: Paging) -> list[Call]:
        """Return the calls of a step for layers with this key."""
        block_bytes = self.num_kv_heads * self.block_size * (self.head_dim + self.value_dim) * self.dtype.itemsize
        groups = list(_groups(list(_spans(paging, self)), block_bytes))
        pages = max((len(g) * g[0].num_blocks * self.num_kv_heads for g in groups), default=0)
        sizes = self.head_dim, self.value_dim
        scratch = [torch.empty((pages, self.block_size * size), dtype=self.dtype) for size in sizes]
        return [_call(group, paging, self, scratch) for group in groups]


def _gather(pool: Tensor, scales: Tensor | None, call: Call, into: Tensor) -> Tensor:
    """Gather the call's pages of a pool, [S, num_kv_heads, L, head_dim], in one copy, dequantized if needed."""
    block_size, head_dim = pool.shape[2:]
    pages = into.view(-1, block_size, head_dim)
    if scales is None:
        _select(pool, call.pages, out=pages)
    else:
        codes = _select(as_bytes(pool), call.pages).view(pool.dtype)
        dequantize(codes, _select(scales, call.pages), out=pages)
    into.view(-1, head_dim).index_fill_(0, call.unwritten, 0)
    return into


def _gather_packed(cache: LayerCache, packed: PackedBlocks, call: Call) -> tuple[Tensor, Tensor]:
    """Gather the keys and values of a call, of a layer with packed blocks."""
    assert call.packed is not None and call.unpacked is not None
    num_spans, width = call.packed.shape
    of_span, place, unpacked = call.unpacked
    full = packed.read(call.packed.flatten())
    for of_call, blocks, (pool, scales) in zip((call.keys, call.values), full, cache.pools, strict=True):
        assert scales is not None
        in_blocks = of_call.unflatten(2, (width, -1))  # [S, num_kv_heads, width, block_size, head_dim]
        in_blocks.copy_(blocks.unflatten(0, (num_spans, width)).transpose(1, 2))
        in_blocks[of_span, :, place] = (pool[unpacked].float() * scales[unpacked][..., None]).to(of_call)
        of_call.view(-1, of_call.shape[3]).index_fill_(0, call.unwritten, 0)
    return call.keys, call.values


def _select(pool: Tensor, pages: Tensor, out: Tensor | None = None) -> Tensor:
    """Select rows block * num_kv_heads + head of a tensor [num_blocks, num_kv_heads, ...]."""
    if pool.is_contiguous():
        return torch.index_select(pool.flatten(0, 1), 0, pages, out=out)
    num_kv_heads = pool.shape[1]
    gathered = pool[pages // num_kv_heads, pages % num_kv_heads]
    return gathered if out is None else out.copy_(gathered)


def _softmax_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute scaled_dot_product_attention with soft-cap and sinks, broadcast over the query's rows, in fp32."""
    scores = query.float() @ keys.float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(scores.shape[:-1])[..., None]], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(query.dtype)


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
    """Compute `paged_kernels.paged_attention.paged_attention`. Padding rows get zeros."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = cache.keys.shape[1:3]
    group = num_heads // num_kv_heads
    value_dim, stored = cache.value_dim, 0 if cache.shares_memory else cache.value_dim
    out = torch.zeros((*query.shape[:2], value_dim), dtype=query.dtype)
    if cache.key_channels is not None:
        query = scale_queries(query, cache.key_channels)
    if paging.packed is not None:
        pack_full_blocks(cache, paging.slots, paging.packed.slots)
    packed = cache.packed
    key = LayerKey(num_kv_heads, block_size, head_dim, stored, query.dtype, sliding_window, packed is not None)
    for call in paging.plan(key):
        if packed is not None:
            keys, values = _gather_packed(cache, packed, call)
        else:
            keys = _gather(cache.keys, cache.key_scales, call, call.keys)
            shares = cache.shares_memory
            values = keys[..., :value_dim] if shares else _gather(cache.values, cache.value_scales, call, call.values)
        num_spans, query_len = len(keys), len(call.rows) // len(keys)
        q = query[call.rows].view(-1, num_kv_heads, group, head_dim)
        bias = call.bias
        sink = None if sinks is None else sinks.view(num_kv_heads, group, 1)
        if query_len == 1:  # heads of a group as rows, so that each key is read once for all of them
            bias = bias.expand(num_spans, 1, group, -1)
            sink = None if sink is None else sink[:, :, 0]
        else:  # KV heads as batch; a stride of 0 shares the keys with all heads of a group
            q = q.permute(1, 2, 0, 3)
            keys, values = (x[0, :, None].expand(-1, group, -1, -1) for x in (keys, values))
        if softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scale)
        else:
            attended = _softmax_attention(q, keys, values, bias, scale, softcap, sink)
        if query_len > 1:
            attended = attended.permute(2, 0, 1, 3)
        out[call.rows] = attended.reshape(-1, num_heads, value_dim)
    return out
