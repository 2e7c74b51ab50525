"""Paged attention for any mixture of prefill chunks and decode rows.

A program owns a tile of query rows of one sequence and one KV head, walks that sequence's block table, and
keeps a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; FlashAttention, arXiv:2205.14135) over
keys and values in pages (PagedAttention, arXiv:2309.06180). Where there are too few tiles to fill the device, several
programs share a sequence's keys, and a second kernel merges what they found (Flash-Decoding, Dao et al. 2023). Keys
that many sequences share are walked for all of them at once (Hydragen, arXiv:2402.05099). The grids depend on the
number of rows and sequences only, never on their lengths.

    tile rows (GQA packed):  row r -> query r // HEADS, head r % HEADS of this KV head's group

             begin          low                         high           end
    keys    ...|=============|###########################|==============|.....
      before the window   window edge   all rows see all keys   causal edge   newer than the tile's last query
      or in the prefix
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels import launch
from paged_kernels.arguments import check_paged_attention
from paged_kernels.launch import Device, Launch, LaunchShape, Tile, device_of, launch_shape
from paged_kernels.layer_cache import LayerCache, as_bytes
from paged_kernels.paging import Paging

LOG2E = 1.4426950408889634


@triton.jit
def _find_sequence(query_starts, num_seqs, tile, BLOCK_Q: tl.constexpr):
    """The last sequence whose first tile, query_starts[s] // BLOCK_Q + s, is not past `tile`."""
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_starts + middle) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _tanh(x):
    return 1 - 2 / (1 + tl.exp2(x * 2.8853900817779268))  # 2 * log2(e); saturates at +-1, never NaN


@triton.jit
def _widen(codes, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Codes in a type to multiply in, exactly; fp8 comes out 256 times too small. Widened to 16 bits and shifted by 7,
    an e4m3 is the float16 with another exponent bias; bit 14 is left of the sign. Subnormal numbers come out right."""
    if FORMAT == "fp8":
        codes = ((codes.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True)
    return codes.to(dtype)


@triton.jit
def _blocks(table, start, begin, end, MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of positions start to start + BLOCK_N: one for each, or one for all if a step lies within a block.

    Outside [begin, end) it is block 0 (MASKED)."""
    if BLOCK_SIZE >= BLOCK_N:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        n = start + tl.arange(0, BLOCK_N)
        if MASKED:
            block = tl.load(table + n // BLOCK_SIZE, mask=(n >= begin) & (n < end), other=0)
        else:
            block = tl.load(table + n // BLOCK_SIZE)
    return block


@triton.jit
def _load_step(
    start, block, begin, end, key_head, value_head, key_scale_head, value_scale_head,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_SLOT: tl.constexpr, STRIDE_S_BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys [BLOCK_D, BLOCK_N] and values [BLOCK_N, BLOCK_D] of positions start to start + BLOCK_N, and their scales."""
    d = tl.arange(0, BLOCK_D)
    n = start + tl.arange(0, BLOCK_N)
    # What lies outside [begin, end) may be another request's, even NaN: it is not loaded at all.
    in_context = (n >= begin) & (n < end)
    block = block.to(tl.int64)
    slot = start % BLOCK_SIZE + tl.arange(0, BLOCK_N) if BLOCK_SIZE >= BLOCK_N else n % BLOCK_SIZE
    k_row = key_head + block * STRIDE_K_BLOCK + slot * STRIDE_K_SLOT
    v_row = value_head + block * STRIDE_V_BLOCK + slot * STRIDE_V_SLOT
    k_scale = 1.0
    v_scale = 1.0
    if MASKED:
        k_mask = (d[:, None] < HEAD_DIM) & in_context[None, :]
        v_mask = (d[None, :] < HEAD_DIM) & in_context[:, None]
        k = tl.load(k_row[None, :] + d[:, None], mask=k_mask, other=0.0)
        v = tl.load(v_row[:, None] + d[None, :], mask=v_mask, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        k = tl.load(k_row[None, :] + d[:, None], mask=d[:, None] < HEAD_DIM, other=0.0)
        v = tl.load(v_row[:, None] + d[None, :], mask=d[None, :] < HEAD_DIM, other=0.0)
    else:
        k = tl.load(k_row[None, :] + d[:, None])
        v = tl.load(v_row[:, None] + d[None, :])
    if FORMAT is not None:
        s_row = block * STRIDE_S_BLOCK + slot
        if MASKED:
            k_scale = tl.load(key_scale_head + s_row, mask=in_context, other=0.0)
            v_scale = tl.load(value_scale_head + s_row, mask=in_context, other=0.0)
        else:
            k_scale = tl.load(key_scale_head + s_row)
            v_scale = tl.load(value_scale_head + s_row)
    return k, v, k_scale, v_scale


@triton.jit
def _attend(
    acc, row_max, row_sum, unit, q, start, block, begin, end, position, window, scale, softcap,
    key_head, value_head, key_scale_head, value_scale_head,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_SLOT: tl.constexpr, STRIDE_S_BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax, with the keys from position `start` on."""
    k, v, k_scale, v_scale = _load_step(
        start, block, begin, end, key_head, value_head, key_scale_head, value_scale_head,
        STRIDE_K_BLOCK, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_SLOT, STRIDE_S_BLOCK, FORMAT,
        MASKED, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    CODE_UNIT: tl.constexpr = 256.0 if FORMAT == "fp8" else 1.0  # a code over what _widen makes of it
    if FORMAT is not None:
        k = _widen(k, FORMAT, q.dtype)
        v = _widen(v, FORMAT, q.dtype)

    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if FORMAT is not None:
        scores = scores * (k_scale * CODE_UNIT)[None, :]
    if HAS_SOFTCAP:
        scores = softcap * _tanh(scores)
    if MASKED:
        n = start + tl.arange(0, BLOCK_N)
        visible = ((n >= begin) & (n < end))[None, :] & (n[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (n[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen no key yet: -inf - -inf would be NaN, -inf - 0 gives the weight 0.
    base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(row_max - base)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    if FORMAT is not None:
        # acc is in this unit, so that a weight times its value's scale is at most 2**14: the range of float16.
        new_unit = tl.maximum(unit, tl.max(v_scale, 0) * 0.00006103515625)
        weights = weights * (v_scale / new_unit)[None, :]
        shrink = shrink * (unit / new_unit)
        unit = new_unit
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum, unit


@triton.jit
def _walk(
    q, row_max, row_sum, position, first, begin, low, high, end, window, scale, softcap,
    table, kv_head, key_cache, value_cache, key_scales, value_scales,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr, FORMAT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    ONE_LOOP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax of rows [BLOCK_M] over keys [begin, end) times the values, and the log2 of the softmax's denominator.

    low and high are whole steps from begin. Steps in [low, high) need no mask; the others are taken after them. With
    ONE_LOOP every step is masked: a few rows' masks cost less than a second loop that starts with nothing loaded.
    """
    if ONE_LOOP:
        low = begin
        high = end
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    unit = 1e-37  # of acc; below the smallest scale times 2**-14
    key_head = key_cache + kv_head.to(tl.int64) * STRIDE_K_HEAD
    value_head = value_cache + kv_head.to(tl.int64) * STRIDE_V_HEAD
    key_scale_head = key_scales
    value_scale_head = value_scales
    if FORMAT is not None:
        key_scale_head += kv_head.to(tl.int64) * STRIDE_S_HEAD
        value_scale_head += kv_head.to(tl.int64) * STRIDE_S_HEAD
    # A step's blocks are read one step ahead: keys that waited for them in the same step would be loaded a step later.
    block = _blocks(table, low, low, high, True, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        next_block = _blocks(table, start + BLOCK_N, low, high, True, BLOCK_SIZE, BLOCK_N)
        acc, row_max, row_sum, unit = _attend(
            acc, row_max, row_sum, unit, q, start, block, first, end, position, window, scale, softcap,
            key_head, value_head, key_scale_head, value_scale_head,
            STRIDE_K_BLOCK, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_SLOT, STRIDE_S_BLOCK, FORMAT,
            ONE_LOOP, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
        block = next_block
    if not ONE_LOOP:
        masked_before = low - begin
        for done in tl.range(0, masked_before + end - high, BLOCK_N, num_stages=STAGES):
            start = tl.where(done < masked_before, begin + done, high - masked_before + done)
            acc, row_max, row_sum, unit = _attend(
                acc, row_max, row_sum, unit, q, start, _blocks(table, start, first, end, True, BLOCK_SIZE, BLOCK_N),
                first, end, position, window, scale, softcap, key_head, value_head, key_scale_head, value_scale_head,
                STRIDE_K_BLOCK, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_SLOT, STRIDE_S_BLOCK, FORMAT,
                True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION,
            )  # fmt: skip

    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    norm = 1.0 / total
    if FORMAT is not None:
        norm = norm * unit * (256.0 if FORMAT == "fp8" else 1.0)
    # Without a key row_max is -inf, and so is the logarithm.
    return acc * norm[:, None], row_max + tl.log2(total)


@triton.jit
def _range(
    first_position, last_position, context_len, prefix_len, window,
    HAS_WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of a tile whose queries sit at these positions: the first key it sees, the first of its first step, and the end.

    A step starts where the keys do, unless it shall lie within one block.
    """
    end = tl.minimum(last_position + 1, context_len)
    first = tl.maximum(first_position - window + 1, 0) if HAS_WINDOW else prefix_len
    begin = first // BLOCK_N * BLOCK_N if BLOCK_SIZE >= BLOCK_N else first
    return first, begin, end


@triton.jit
def _split_len(begin, end, num_splits, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of each split of [begin, end) but the last: whole steps, at least MIN_SPLIT."""
    share = tl.maximum((end - begin + num_splits - 1) // num_splits, MIN_SPLIT)
    return (share + BLOCK_N - 1) // BLOCK_N * BLOCK_N


@triton.jit
def _unmasked(
    first_position, last_position, begin, split_begin, split_end, window,
    HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The steps of a split in which every row sees every key: from, and up to."""
    last_step = split_begin + tl.maximum(split_end - split_begin, 0) // BLOCK_N * BLOCK_N
    high = begin + tl.maximum(first_position + 1 - begin, 0) // BLOCK_N * BLOCK_N
    high = tl.minimum(tl.maximum(high, split_begin), last_step)
    low = begin
    if HAS_WINDOW:
        low += (tl.maximum(last_position - window + 1 - begin, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return tl.minimum(tl.maximum(low, split_begin), high), high


@triton.jit
def _tile(
    out, partials, logs, query, key_cache, value_cache, key_scales, value_scales,
    block_tables, context_lens, query_starts, shared_lens, sinks,
    seq, q_first, query_start, query_len, kv_head, first_head, split, num_splits, slots, queries,
    window, scale, softcap, stride_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, BLOCK_D: tl.constexpr,
    ONE_LOOP: tl.constexpr, PARTIAL: tl.constexpr, MIN_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M // HEADS queries of a sequence from q_first on: their output, or a split's part of it (PARTIAL)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    context_len = tl.load(context_lens + seq)
    row = tl.arange(0, BLOCK_M)
    q_index = q_first + row // HEADS
    head_of_group = first_head + row % HEADS
    head = kv_head * GROUP + head_of_group
    is_query = (row < BLOCK_Q * HEADS) & (q_index < query_len) & (head_of_group < GROUP)

    position = context_len - query_len + q_index
    first_position = context_len - query_len + q_first
    last_position = first_position + tl.minimum(BLOCK_Q, query_len - q_first) - 1
    prefix_len = 0
    if PARTIAL and shared_lens is not None:
        prefix_len = tl.load(shared_lens + seq)
    first, begin, end = _range(
        first_position, last_position, context_len, prefix_len, window, HAS_WINDOW, BLOCK_SIZE, BLOCK_N
    )  # fmt: skip
    split_begin = begin
    split_end = end
    has_keys = True
    if PARTIAL:
        split_len = _split_len(begin, end, num_splits, MIN_SPLIT, BLOCK_N)
        split_begin = begin + split * split_len
        split_end = tl.minimum(split_begin + split_len, end)
        has_keys = split_begin < split_end
    if has_keys:
        d = tl.arange(0, BLOCK_D)
        mask = is_query[:, None] & (d[None, :] < HEAD_DIM)
        token = (query_start + q_index).to(tl.int64)
        q = tl.load(
            query + (token * stride_q_token + head * stride_q_head)[:, None] + d[None, :], mask=mask, other=0.0
        )  # fmt: skip
        if HAS_SINKS and not PARTIAL:  # a sink is one more key with this logit and no value; the merge adds its own
            row_max = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * 1.4426950408889634
            row_sum = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
        else:
            row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        low, high = _unmasked(
            first_position, last_position, begin, split_begin, split_end, window, HAS_WINDOW, BLOCK_N
        )  # fmt: skip
        found, log = _walk(
            q, row_max, row_sum, position, first, split_begin, low, high, split_end, window, scale, softcap,
            block_tables + stride_table.to(tl.int64) * seq, kv_head, key_cache, value_cache, key_scales, value_scales,
            STRIDE_K_BLOCK, STRIDE_K_HEAD, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_HEAD, STRIDE_V_SLOT,
            STRIDE_S_BLOCK, STRIDE_S_HEAD, FORMAT, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE,
            BLOCK_D, BLOCK_M, BLOCK_N, STAGES, ONE_LOOP, PRECISION,
        )  # fmt: skip
        if PARTIAL:
            _store_partial(
                partials, logs, found, log, is_query, (seq.to(tl.int64) * slots + split) * queries + q_index, head,
                NUM_HEADS, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        else:
            o_offset = token * stride_o_token + head * stride_o_head
            tl.store(out + o_offset[:, None] + d[None, :], found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_partial(
    partials, logs, found, log, is_query, place, head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """partials [num_seqs, slots, queries, NUM_HEADS, HEAD_DIM], and logs without the last, at place and head."""
    d = tl.arange(0, BLOCK_D)
    place = place * NUM_HEADS + head
    tl.store(
        partials + place[:, None] * HEAD_DIM + d[None, :], found, mask=is_query[:, None] & (d[None, :] < HEAD_DIM)
    )  # fmt: skip
    tl.store(logs + place, log, mask=is_query)


@triton.jit(
    # These change from step to step or layer to layer: specialising on them would compile while serving.
    do_not_specialize=["num_seqs", "large_tiles", "num_splits", "slots", "queries", "window", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_starts", "shared_lens", "sinks"],
)
def paged_attention_kernel(
    out, partials, logs, query, key_cache, value_cache, key_scales, value_scales,
    block_tables, context_lens, query_starts, shared_lens, sinks,
    num_seqs, large_tiles, num_splits, slots, queries, window, scale, softcap,
    stride_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
    # The cache's strides never change, and their exact divisors (72 = 8 * 9) let loads be vectors.
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SMALL_M: tl.constexpr, SMALL_N: tl.constexpr, SMALL_STAGES: tl.constexpr,
    LARGE_M: tl.constexpr, LARGE_N: tl.constexpr, LARGE_STAGES: tl.constexpr,
    BLOCK_D: tl.constexpr, PARTIAL: tl.constexpr, MIN_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (large_tiles + num_splits * num_seqs, num_kv_heads * tiles of a group's heads).

    The large tiles take the sequences with more queries than a small one holds, the longest work first; the rest of
    the programs take one split each of the other sequences. Scores are times log2(e): exp is exp2. FORMAT as in
    `layer_cache`; scales are folded into the scores and the weights, so that no tile is dequantized."""
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    SMALL_Q: tl.constexpr = SMALL_M // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    first_head = tl.program_id(1) % HEAD_TILES * HEADS
    item = tl.program_id(0)
    if LARGE_M > 0 and item < large_tiles:
        LARGE_Q: tl.constexpr = LARGE_M // HEADS
        tile = large_tiles - 1 - item
        seq = _find_sequence(query_starts, num_seqs, tile, LARGE_Q)
        query_start = tl.load(query_starts + seq)
        query_len = tl.load(query_starts + seq + 1) - query_start
        q_first = (tile - (query_start // LARGE_Q + seq)) * LARGE_Q
        if (query_len > SMALL_Q) & (q_first < query_len):
            _tile(
                out, partials, logs, query, key_cache, value_cache, key_scales, value_scales,
                block_tables, context_lens, query_starts, shared_lens, sinks,
                seq, q_first, query_start, query_len, kv_head, first_head, 0, 1, slots, queries, window,
                scale, softcap,
                stride_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
                STRIDE_K_BLOCK, STRIDE_K_HEAD, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_HEAD, STRIDE_V_SLOT,
                STRIDE_S_BLOCK, STRIDE_S_HEAD, FORMAT, GROUP, NUM_HEADS, HEADS, HEAD_DIM, BLOCK_SIZE,
                HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, LARGE_M, LARGE_N, LARGE_STAGES, BLOCK_D,
                False, False, MIN_SPLIT, PRECISION,
            )  # fmt: skip
    else:
        item -= large_tiles
        split = item // num_seqs  # the last ones may be empty: they come last
        seq = item % num_seqs
        query_start = tl.load(query_starts + seq)
        query_len = tl.load(query_starts + seq + 1) - query_start
        if (query_len > 0) & (query_len <= SMALL_Q):
            _tile(
                out, partials, logs, query, key_cache, value_cache, key_scales, value_scales,
                block_tables, context_lens, query_starts, shared_lens, sinks,
                seq, 0, query_start, query_len, kv_head, first_head, split, num_splits, slots, queries, window,
                scale, softcap,
                stride_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
                STRIDE_K_BLOCK, STRIDE_K_HEAD, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_HEAD, STRIDE_V_SLOT,
                STRIDE_S_BLOCK, STRIDE_S_HEAD, FORMAT, GROUP, NUM_HEADS, HEADS, HEAD_DIM, BLOCK_SIZE,
                HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, SMALL_M, SMALL_N, SMALL_STAGES, BLOCK_D,
                True, PARTIAL, MIN_SPLIT, PRECISION,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_groups", "num_splits", "first_slot", "slots", "queries", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "shared_lens", "members", "group_starts"],
)
def prefix_attention_kernel(
    partials, logs, query, key_cache, value_cache, key_scales, value_scales,
    block_tables, query_starts, shared_lens, members, group_starts,
    num_groups, num_splits, first_slot, slots, queries, scale, softcap,
    stride_table, stride_q_token, stride_q_head,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_D: tl.constexpr, MIN_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (num_seqs // (BLOCK_M // HEADS) + num_groups, num_kv_heads * tiles of a group's heads, num_splits).

    A tile's rows are the decode rows of BLOCK_M // HEADS members of a group: row r is member r // HEADS, head
    r % HEADS. Its split of the group's shared keys goes to slot first_slot + split of each member's partials."""
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    BLOCK_S: tl.constexpr = BLOCK_M // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    first_head = tl.program_id(1) % HEAD_TILES * HEADS
    split = tl.program_id(2)
    tile = tl.program_id(0)
    group = _find_sequence(group_starts, num_groups, tile, BLOCK_S)
    group_start = tl.load(group_starts + group)
    group_len = tl.load(group_starts + group + 1) - group_start
    first_member = (tile - (group_start // BLOCK_S + group)) * BLOCK_S
    if first_member < group_len:
        leader = tl.load(members + group_start)
        shared_len = tl.load(shared_lens + leader)
        split_len = _split_len(0, shared_len, num_splits, MIN_SPLIT, BLOCK_N)
        begin = split * split_len
        end = tl.minimum(begin + split_len, shared_len)
        if begin < end:
            row = tl.arange(0, BLOCK_M)
            d = tl.arange(0, BLOCK_D)
            index = first_member + row // HEADS
            head_of_group = first_head + row % HEADS
            head = kv_head * GROUP + head_of_group
            is_query = (row < BLOCK_S * HEADS) & (index < group_len) & (head_of_group < GROUP)
            seq = tl.load(members + group_start + index, mask=is_query, other=0)
            token = tl.load(query_starts + seq, mask=is_query, other=0).to(tl.int64)
            q_offset = token * stride_q_token + head * stride_q_head
            mask = is_query[:, None] & (d[None, :] < HEAD_DIM)
            q = tl.load(query + q_offset[:, None] + d[None, :], mask=mask, other=0.0)
            row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
            found, log = _walk(
                q, row_max, row_sum, tl.full([BLOCK_M], 0, tl.int32) + end, begin, begin, begin, end, end, 0,
                scale, softcap, block_tables + stride_table.to(tl.int64) * leader, kv_head,
                key_cache, value_cache, key_scales, value_scales,
                STRIDE_K_BLOCK, STRIDE_K_HEAD, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_HEAD, STRIDE_V_SLOT,
                STRIDE_S_BLOCK, STRIDE_S_HEAD, FORMAT, False, HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE,
                BLOCK_D, BLOCK_M, BLOCK_N, STAGES, True, PRECISION,
            )  # fmt: skip
            _store_partial(
                partials, logs, found, log, is_query, (seq.to(tl.int64) * slots + first_slot + split) * queries, head,
                NUM_HEADS, HEAD_DIM, BLOCK_D,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_splits", "prefix_splits", "slots", "queries", "window"],
    do_not_specialize_on_alignment=["context_lens", "query_starts", "shared_lens", "sinks"],
)
def merge_partials_kernel(
    out, partials, logs, context_lens, query_starts, shared_lens, sinks,
    num_splits, prefix_splits, slots, queries, window, stride_o_token, stride_o_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_N: tl.constexpr, PREFIX_N: tl.constexpr,
    MOST_SLOTS: tl.constexpr, BLOCK_D: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (num_seqs, queries, NUM_HEADS): one row's output from the partials of the splits in use,
    and of its shared prefix. Each weighs as much as its part of the softmax's denominator, whose log2 is in `logs`."""
    STEP: tl.constexpr = 8  # partials under way at once
    seq = tl.program_id(0)
    q_index = tl.program_id(1)
    head = tl.program_id(2)
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    if (q_index < query_len) & (query_len <= queries):
        context_len = tl.load(context_lens + seq)
        prefix_len = 0
        if shared_lens is not None:
            prefix_len = tl.load(shared_lens + seq)
        first_position = context_len - query_len
        _, begin, end = _range(
            first_position, context_len - 1, context_len, prefix_len, window, HAS_WINDOW, BLOCK_SIZE, BLOCK_N
        )  # fmt: skip
        split_len = _split_len(begin, end, num_splits, MIN_SPLIT, BLOCK_N)
        own = (tl.maximum(end - begin, 0) + split_len - 1) // split_len
        used = own
        if shared_lens is not None:
            prefix_split_len = _split_len(0, prefix_len, prefix_splits, MIN_SPLIT, PREFIX_N)
            used += (prefix_len + prefix_split_len - 1) // prefix_split_len

        # The slots in use: 0 to own - 1, and those of the prefix from num_splits on.
        place = (seq.to(tl.int64) * slots * queries + q_index) * NUM_HEADS + head
        stride_slot = queries * NUM_HEADS
        index = tl.arange(0, MOST_SLOTS)
        slot = tl.where(index < own, index, index - own + num_splits)
        log = tl.load(logs + place + slot * stride_slot, mask=index < used, other=float("-inf"))
        top = tl.max(log, 0)
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(top, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(log - top), 0)
        if HAS_SINKS:
            total += tl.exp2(sink - top)
        total = tl.where(total == 0.0, 1.0, total)

        d = tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_D], dtype=tl.float32)
        for done in range(0, used, STEP):
            i = done + tl.arange(0, STEP)
            at = place + tl.where(i < own, i, i - own + num_splits) * stride_slot
            weight = tl.exp2(tl.load(logs + at, mask=i < used, other=float("-inf")) - top)
            mask = (i < used)[:, None] & (d[None, :] < HEAD_DIM)
            found = tl.load(partials + at[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
            acc += tl.sum(found * weight[:, None], 0)
        token = (query_start + q_index).to(tl.int64)
        o_offset = token * stride_o_token + head * stride_o_head
        tl.store(out + o_offset + d, (acc / total).to(out.dtype.element_ty), mask=d < HEAD_DIM)


@dataclass(frozen=True)
class LaunchPlan:
    """How a step's launches are cut up; alike for all its layers of one kind."""

    shape: LaunchShape
    grid: tuple[int, int]
    num_splits: int
    prefix: Tile | None  # None: no shared prefix is walked
    prefix_grid: tuple[int, int, int]
    queries: int  # of a sequence whose tiles are split, at most

    @property
    def prefix_splits(self) -> int:
        return self.prefix_grid[2] if self.prefix else 0

    @property
    def slots(self) -> int:
        return self.num_splits + self.prefix_splits

    @property
    def partial(self) -> bool:
        return self.slots > 1


def _cut(query: Tensor, cache: LayerCache, paging: Paging, device: Device, *, windowed: bool) -> LaunchPlan:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = cache.keys.shape[1]
    group = num_heads // num_kv_heads
    facts = dict(
        chip=device.chip, head_dim=head_dim, itemsize=query.element_size(), group=group,
        quantized=cache.format is not None,
    )  # fmt: skip
    shape = launch_shape(
        **facts, num_kv_heads=num_kv_heads, multiprocessors=device.multiprocessors, num_tokens=num_tokens,
        max_query_len=paging.max_query_len, max_context_len=paging.max_context_len,
    )  # fmt: skip
    head_programs = num_kv_heads * triton.cdiv(group, shape.HEADS)
    small = paging.num_seqs - (shape.LARGE_M > 0)  # at least one sequence takes large tiles, if there are any
    splits = launch.count_splits(small * head_programs, paging.max_context_len, device.multiprocessors)
    large_tiles = num_tokens // (shape.LARGE_M // shape.HEADS) + paging.num_seqs if shape.LARGE_M else 0
    prefix, prefix_grid = None, (0, 0, 0)
    if paging.shared is not None and not windowed:
        prefix = launch.prefix_tile(**facts, num_seqs=paging.num_seqs)
        members = prefix.block_m // shape.HEADS
        tiles = triton.cdiv(paging.num_seqs, members)
        prefix_grid = (
            paging.num_seqs // members + paging.shared.num_groups,
            head_programs,
            launch.count_splits(tiles * head_programs, paging.shared.max_len, device.multiprocessors),
        )
    return LaunchPlan(
        shape,
        (large_tiles + splits * paging.num_seqs, head_programs),
        splits,
        prefix,
        prefix_grid,
        min(paging.max_query_len, shape.SMALL_M // shape.HEADS),
    )


@dataclass(frozen=True)
class LaunchTemplate:
    """A launch but for what changes from layer to layer."""

    kernel: Any
    grid: tuple[int, ...]
    constants: dict[str, Any]
    varying: tuple[str, ...]

    def launch(self, layer: dict[str, Any]) -> Launch:
        return Launch(self.kernel, self.grid, {**self.constants, **{name: layer[name] for name in self.varying}})


def _templates(
    out: Tensor, query: Tensor, cache: LayerCache, paging: Paging, cut: LaunchPlan, flags: dict[str, bool]
) -> list[LaunchTemplate]:
    """The kernels of a call, in order; alike for all layers whose tensors are laid out alike."""
    num_heads, head_dim = query.shape[1:]
    keys, values = cache.keys, cache.values
    shape, shared = cut.shape, paging.shared if cut.prefix else None
    named = dict(
        block_tables=paging.block_tables, context_lens=paging.context_lens, query_starts=paging.query_starts,
        shared_lens=shared.lens if shared else None, num_seqs=paging.num_seqs,
        large_tiles=cut.grid[0] - cut.num_splits * paging.num_seqs, num_splits=cut.num_splits,
        prefix_splits=cut.prefix_splits, slots=cut.slots, queries=cut.queries,
        stride_table=paging.block_tables.stride(0),
        stride_o_token=out.stride(0), stride_o_head=out.stride(1),
        stride_q_token=query.stride(0), stride_q_head=query.stride(1),
        STRIDE_K_BLOCK=keys.stride(0), STRIDE_K_HEAD=keys.stride(1), STRIDE_K_SLOT=keys.stride(2),
        STRIDE_V_BLOCK=values.stride(0), STRIDE_V_HEAD=values.stride(1), STRIDE_V_SLOT=values.stride(2),
        STRIDE_S_BLOCK=cache.scale_strides[0], STRIDE_S_HEAD=cache.scale_strides[1], FORMAT=cache.format,
        GROUP=num_heads // keys.shape[1], NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_SIZE=keys.shape[2],
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        PARTIAL=cut.partial, MIN_SPLIT=launch.MIN_SPLIT,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # tf32 drops 13 bits of fp32
        **flags, **vars(shape),
    )  # fmt: skip
    made = [_template(paged_attention_kernel, cut.grid, named)]
    if cut.prefix and shared:
        tile = cut.prefix
        prefix = dict(
            members=shared.members, group_starts=shared.group_starts, num_groups=shared.num_groups,
            first_slot=cut.num_splits, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.num_stages,
            num_splits=cut.prefix_splits, num_warps=tile.num_warps,
        )  # fmt: skip
        made.insert(0, _template(prefix_attention_kernel, cut.prefix_grid, {**named, **prefix}))
    if cut.partial:
        merge = dict(
            BLOCK_N=shape.SMALL_N, PREFIX_N=cut.prefix.block_n if cut.prefix else 1,
            MOST_SLOTS=launch.MAX_SPLITS * (2 if cut.prefix else 1), num_warps=4,
        )  # fmt: skip
        grid = (paging.num_seqs, cut.queries, num_heads)
        made.append(_template(merge_partials_kernel, grid, {**named, **merge}))
    return made


def _template(kernel: Any, grid: tuple[int, ...], named: dict[str, Any]) -> LaunchTemplate:
    constants = {name: named[name] for name in (*kernel.arg_names, "num_warps") if name in named}
    return LaunchTemplate(kernel, grid, constants, tuple(name for name in kernel.arg_names if name not in named))


def plan_launch(
    out: Tensor, query: Tensor, cache: LayerCache, paging: Paging, *,
    scale: float, sliding_window: int | None, softcap: float | None, sinks: Tensor | None, device: Device,
) -> list[Launch]:  # fmt: skip
    """The kernels of one call, in order. What a step's layers have in common is worked out for the first of them."""
    keys, values = cache.keys, cache.values
    flags = sliding_window is not None, softcap is not None, sinks is not None
    key = (
        "triton", query.shape, query.stride(), query.dtype, keys.shape, keys.dtype, keys.stride(), values.stride(),
        flags, device,
    )  # fmt: skip
    if key not in paging.derived:
        cut = _cut(query, cache, paging, device, windowed=flags[0])
        names = dict(zip(("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS"), flags, strict=True))
        paging.derived[key] = cut, _templates(out, query, cache, paging, cut, names)
    cut, templates = paging.derived[key]
    partials = logs = None
    if cut.partial:
        rows, head_dim = paging.num_seqs * cut.slots * cut.queries * query.shape[1], query.shape[2]
        workspace = torch.empty(rows * (head_dim + 1), dtype=torch.float32, device=query.device)
        partials, logs = workspace[: rows * head_dim], workspace[rows * head_dim :]
    layer = dict(
        out=out, partials=partials, logs=logs, query=query, key_cache=as_bytes(keys), value_cache=as_bytes(values),
        key_scales=cache.key_scales, value_scales=cache.value_scales, sinks=sinks, window=sliding_window or 0,
        scale=scale / softcap if softcap else scale * LOG2E, softcap=(softcap or 0.0) * LOG2E,
    )  # fmt: skip
    return [template.launch(layer) for template in templates]


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim] fp32, fp16 or bf16
    cache: LayerCache,  # of query's type, or quantized
    paging: Paging,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [num_heads]
) -> Tensor:
    """Causal attention of every packed query over its own sequence's pages; shape and type of query.

    Query i of a sequence sits at position context_len - query_len + i and sees the positions up to its own,
    the newest `sliding_window` of them if that is given. softcap c turns a score s into c * tanh(s / c)
    (Gemma 2, arXiv:2408.00118). A sink is a logit per head that takes part in the denominator only
    (arXiv:2309.17453). The softmax runs in fp32. Raises ValueError for a setting out of range.
    """
    check_paged_attention(query, cache, sliding_window, softcap, sinks)
    query = query if query.stride(2) == 1 else query.contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for planned in plan_launch(
        out, query, cache, paging,
        scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks, device=device_of(query.device),
    ):  # fmt: skip
        planned.run()
    return out


def paged_attention_reference(
    query: Tensor,
    cache: LayerCache,
    paging: Paging,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `paged_attention` means, in fp32 and one sequence at a time; for tests, not for speed."""
    check_paged_attention(query, cache, sliding_window, softcap, sinks)
    num_kv_heads, block_size = cache.keys.shape[1:3]
    group = query.shape[1] // num_kv_heads
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    starts = paging.query_starts.tolist()
    for seq, context_len in enumerate(paging.context_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        query_len = rows.stop - rows.start
        if context_len == 0 or query_len == 0:
            continue
        positions = torch.arange(context_len, device=query.device)
        blocks = paging.block_tables[seq].long()[positions // block_size]
        place = blocks, slice(None), positions % block_size
        keys, values = (
            pool[place].float() * (1 if scales is None else scales[place][..., None]) for pool, scales in cache.pools
        )
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        age = positions[context_len - query_len :, None] - positions  # [query_len, context_len]
        hidden = (age < 0) if sliding_window is None else (age < 0) | (age >= sliding_window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, query_len, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :context_len]
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out
