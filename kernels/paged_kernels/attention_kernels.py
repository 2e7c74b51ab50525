"""The attention kernels: mixed prefill and decode with the merge of partial results, and shared prefixes.

A program processes a tile of query rows of one sequence and one KV head: it walks the sequence's block table with the
loop of `attention_tile`. If there are too few tiles to fill the device, several programs split a sequence's keys
(Flash-Decoding, Dao et al. 2023), and the last of them to finish merges their results. Keys that many sequences share
are processed once for all of them (Hydragen, arXiv:2402.05099), before the rest. The grids depend on the number of rows
and sequences only, never on their lengths, so that a CUDA graph can be captured.
"""

import triton
import triton.language as tl

from paged_kernels.attention_tile import attend_keys, find_sequence, key_range, split_len_of, unmasked_range
from paged_kernels.splits import is_last


@triton.jit
def load_query(  # type: ignore[no-untyped-def]
    query, offset, is_query, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """Load rows at `offset` [BLOCK_M] in two parts, as `attention_tile` loads keys."""
    d = tl.arange(0, BLOCK_D)
    rows = query + offset[:, None]
    q = tl.load(rows + d[None, :], mask=is_query[:, None] & (d[None, :] < HEAD_DIM), other=0.0)
    q_rest = q
    if BLOCK_R > 0:
        r = BLOCK_D + tl.arange(0, BLOCK_R)
        q_rest = tl.load(rows + r[None, :], mask=is_query[:, None] & (r[None, :] < HEAD_DIM), other=0.0)
    return q, q_rest


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    out, partials, logs, arrivals, query, key_cache, value_cache, key_scales, value_scales,
    block_tables, context_lens, query_starts, shared_lens, sinks,
    seq, q_first, query_start, query_len, kv_head, first_head, split, num_splits, prefix_splits, slots, queries,
    window, scale, softcap, stride_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, SHARED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    ONE_LOOP: tl.constexpr, PARTIAL: tl.constexpr, MIN_SPLIT: tl.constexpr, PREFIX_N: tl.constexpr,
    MAX_SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M // HEADS queries of a sequence from q_first on; with PARTIAL, the part of one split."""
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
    first, begin, end = key_range(
        first_position, last_position, context_len, prefix_len, window, HAS_WINDOW, BLOCK_SIZE, BLOCK_N
    )  # fmt: skip
    split_begin = begin
    split_end = end
    own = 1
    if PARTIAL:
        split_len = split_len_of(begin, end, num_splits, MIN_SPLIT, BLOCK_N)
        split_begin = begin + split * split_len
        split_end = tl.minimum(split_begin + split_len, end)
        own = (tl.maximum(end - begin, 0) + split_len - 1) // split_len  # splits that have keys
    if split < tl.maximum(own, 1):  # without any keys the first program writes zeros
        token = (query_start + q_index).to(tl.int64)
        q, q_rest = load_query(
            query, token * stride_q_token + head * stride_q_head, is_query, HEAD_DIM, BLOCK_D, BLOCK_R
        )  # fmt: skip
        # A sink is a key with this logit and value 0. With several partials it is added when they are merged.
        sink = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * 1.4426950408889634
        row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        if HAS_SINKS and not PARTIAL:
            row_max = sink
            row_sum += 1.0
        low, high = unmasked_range(
            first_position, last_position, begin, split_begin, split_end, window, HAS_WINDOW, BLOCK_N
        )  # fmt: skip
        found, log = attend_keys(
            q, q_rest, row_max, row_sum, position, first, split_begin, low, high, split_end, window, scale, softcap,
            block_tables + stride_table.to(tl.int64) * seq, kv_head, key_cache, value_cache, key_scales, value_scales,
            STRIDE_K_BLOCK, STRIDE_K_HEAD, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_HEAD, STRIDE_V_SLOT,
            STRIDE_S_BLOCK, STRIDE_S_HEAD, FORMAT, HAS_WINDOW, HAS_SOFTCAP,
            HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_R, BLOCK_V, SHARED,
            BLOCK_M, BLOCK_N, STAGES, ONE_LOOP, False, PRECISION,
        )  # fmt: skip
        o_offset = token * stride_o_token + head * stride_o_head
        is_done = True
        if PARTIAL:
            place = seq.to(tl.int64) * slots * queries + q_index
            parts = own
            if shared_lens is not None:
                prefix_split_len = split_len_of(0, prefix_len, prefix_splits, MIN_SPLIT, PREFIX_N)
                parts += (prefix_len + prefix_split_len - 1) // prefix_split_len
            if parts > 1:
                _store_partial(
                    partials, logs, found, log, is_query, place + split * queries, head, NUM_HEADS, VALUE_DIM, BLOCK_V
                )  # fmt: skip
                is_done = False
                if is_last(arrivals + seq * tl.num_programs(1) + tl.program_id(1), own):
                    found = _merge_partials(
                        partials, logs, sink, is_query, place * NUM_HEADS + head, own, parts, num_splits,
                        queries * NUM_HEADS, VALUE_DIM, BLOCK_M, BLOCK_V, MAX_SLOTS,
                    )  # fmt: skip
                    is_done = True
            elif HAS_SINKS:
                found = tl.where(log > float("-inf"), 1.0 / (1.0 + tl.exp2(sink - log)), 0.0)[:, None] * found
        if is_done:
            d = tl.arange(0, BLOCK_V)
            mask = is_query[:, None] & (d[None, :] < VALUE_DIM)
            tl.store(out + o_offset[:, None] + d[None, :], found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _merge_partials(  # type: ignore[no-untyped-def]
    partials, logs, sink, is_query, place, own, parts, num_splits, stride_slot,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, MAX_SLOTS: tl.constexpr,
):  # fmt: skip
    """Return the rows [BLOCK_M, BLOCK_V] of all parts: slots 0 to own - 1, and the prefix's from num_splits on.

    Each partial is weighted by its part of the softmax's denominator, whose log2 is in `logs`. The loads bypass the L1
    cache, because other multiprocessors have written the values.
    """
    STEP: tl.constexpr = max(1, 8192 // (BLOCK_M * BLOCK_V))  # partials loaded at once
    index = tl.arange(0, MAX_SLOTS)
    slot = place[None, :] + (tl.where(index < own, index, index - own + num_splits) * stride_slot)[:, None]
    used = (index < parts)[:, None] & is_query[None, :]
    log = tl.load(logs + slot, mask=used, other=float("-inf"), cache_modifier=".cg")
    top = tl.maximum(tl.max(log, 0), sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(log - top[None, :]), 0) + tl.exp2(sink - top)
    total = tl.where(total == 0.0, 1.0, total)

    d = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    for done in range(0, parts, STEP):
        i = done + tl.arange(0, STEP)
        at = place[None, :] + (tl.where(i < own, i, i - own + num_splits) * stride_slot)[:, None]
        mask = (i < parts)[:, None] & is_query[None, :]
        weight = tl.exp2(tl.load(logs + at, mask=mask, other=float("-inf"), cache_modifier=".cg") - top[None, :])
        values = partials + (at * VALUE_DIM)[:, :, None] + d[None, None, :]
        found = tl.load(
            values, mask=mask[:, :, None] & (d < VALUE_DIM)[None, None, :], other=0.0, cache_modifier=".cg"
        )  # fmt: skip
        acc += tl.sum(found * weight[:, :, None], 0)
    return acc / total[:, None]


@triton.jit
def _store_partial(  # type: ignore[no-untyped-def]
    partials, logs, found, log, is_query, place, head,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store into partials [num_seqs, slots, queries, NUM_HEADS, VALUE_DIM] and logs, which lack the last dimension."""
    d = tl.arange(0, BLOCK_V)
    place = place * NUM_HEADS + head
    tl.store(
        partials + place[:, None] * VALUE_DIM + d[None, :], found, mask=is_query[:, None] & (d[None, :] < VALUE_DIM)
    )  # fmt: skip
    tl.store(logs + place, log, mask=is_query)


@triton.jit(
    # Arguments that change between steps or layers: specializing on them would trigger compilation while serving.
    do_not_specialize=[
        *("num_seqs", "large_tiles", "num_splits", "prefix_splits", "slots", "queries", "window", "stride_table"),
    ],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_starts", "shared_lens", "sinks"],
)
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    out, partials, logs, arrivals, query, key_cache, value_cache, key_scales, value_scales,
    block_tables, context_lens, query_starts, shared_lens, sinks,
    num_seqs, large_tiles, num_splits, prefix_splits, slots, queries, window, scale, softcap,
    stride_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
    # Strides of the cache, which never change; knowing their exact divisors (72 = 8 * 9) allows vector loads.
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, SHARED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SMALL_M: tl.constexpr, SMALL_N: tl.constexpr, SMALL_STAGES: tl.constexpr,
    LARGE_M: tl.constexpr, LARGE_N: tl.constexpr, LARGE_STAGES: tl.constexpr,
    PARTIAL: tl.constexpr, MIN_SPLIT: tl.constexpr, PREFIX_N: tl.constexpr,
    MAX_SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of a mixed batch. Grid: (large_tiles + num_splits * num_seqs, KV heads * tiles of a group).

    The large tiles process the sequences with more queries than a small tile holds, the longest work first. Every
    other program processes one split of a sequence. `arrivals` counts the finished splits of each sequence; it is zero
    before and after the launch. Scores are scaled by log2(e), so that exp is exp2. FORMAT as in `layer_cache`: the
    scales are folded into scores and weights, so no tile is dequantized.
    """
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    SMALL_Q: tl.constexpr = SMALL_M // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    first_head = tl.program_id(1) % HEAD_TILES * HEADS
    item = tl.program_id(0)
    if LARGE_M > 0 and item < large_tiles:
        LARGE_Q: tl.constexpr = LARGE_M // HEADS
        tile = large_tiles - 1 - item
        seq = find_sequence(query_starts, num_seqs, tile, LARGE_Q)
        query_start = tl.load(query_starts + seq)
        query_len = tl.load(query_starts + seq + 1) - query_start
        q_first = (tile - (query_start // LARGE_Q + seq)) * LARGE_Q
        if (query_len > SMALL_Q) & (q_first < query_len):
            _attend_tile(
                out, partials, logs, arrivals, query, key_cache, value_cache, key_scales, value_scales,
                block_tables, context_lens, query_starts, shared_lens, sinks,
                seq, q_first, query_start, query_len, kv_head, first_head, 0, 1, 0, slots, queries, window,
                scale, softcap,
                stride_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
                STRIDE_K_BLOCK, STRIDE_K_HEAD, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_HEAD, STRIDE_V_SLOT,
                STRIDE_S_BLOCK, STRIDE_S_HEAD, FORMAT, GROUP, NUM_HEADS, HEADS,
                HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_R, BLOCK_V, SHARED,
                HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, LARGE_M, LARGE_N, LARGE_STAGES,
                False, False, MIN_SPLIT, PREFIX_N, MAX_SLOTS, PRECISION,
            )  # fmt: skip
    else:
        item -= large_tiles
        split = item // num_seqs  # split-major order: the last splits may be empty, so they are scheduled last
        seq = item % num_seqs
        query_start = tl.load(query_starts + seq)
        query_len = tl.load(query_starts + seq + 1) - query_start
        if (query_len > 0) & (query_len <= SMALL_Q):
            _attend_tile(
                out, partials, logs, arrivals, query, key_cache, value_cache, key_scales, value_scales,
                block_tables, context_lens, query_starts, shared_lens, sinks,
                seq, 0, query_start, query_len, kv_head, first_head, split, num_splits, prefix_splits,
                slots, queries, window, scale, softcap,
                stride_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
                STRIDE_K_BLOCK, STRIDE_K_HEAD, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_HEAD, STRIDE_V_SLOT,
                STRIDE_S_BLOCK, STRIDE_S_HEAD, FORMAT, GROUP, NUM_HEADS, HEADS,
                HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_R, BLOCK_V, SHARED,
                HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, SMALL_M, SMALL_N, SMALL_STAGES,
                True, PARTIAL, MIN_SPLIT, PREFIX_N, MAX_SLOTS, PRECISION,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_groups", "num_splits", "first_slot", "slots", "queries", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "shared_lens", "members", "group_starts"],
)
def prefix_attention_kernel(  # type: ignore[no-untyped-def]
    partials, logs, query, key_cache, value_cache, key_scales, value_scales,
    block_tables, query_starts, shared_lens, members, group_starts,
    num_groups, num_splits, first_slot, slots, queries, scale, softcap,
    stride_table, stride_q_token, stride_q_head,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, SHARED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    MIN_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the shared-prefix part of decode rows.

    Grid: (num_seqs // (BLOCK_M // HEADS) + num_groups, KV heads * tiles of a group, num_splits). A tile holds the
    decode rows of BLOCK_M // HEADS members of a prefix group: row r is member r // HEADS, head r % HEADS. The result
    for one split of the shared keys goes to slot first_slot + split of each member's partials.
    """
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    BLOCK_S: tl.constexpr = BLOCK_M // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    first_head = tl.program_id(1) % HEAD_TILES * HEADS
    split = tl.program_id(2)
    tile = tl.program_id(0)
    group = find_sequence(group_starts, num_groups, tile, BLOCK_S)
    group_start = tl.load(group_starts + group)
    group_len = tl.load(group_starts + group + 1) - group_start
    first_member = (tile - (group_start // BLOCK_S + group)) * BLOCK_S
    if first_member < group_len:
        leader = tl.load(members + group_start)
        shared_len = tl.load(shared_lens + leader)
        split_len = split_len_of(0, shared_len, num_splits, MIN_SPLIT, BLOCK_N)
        begin = split * split_len
        end = tl.minimum(begin + split_len, shared_len)
        if begin < end:
            row = tl.arange(0, BLOCK_M)
            index = first_member + row // HEADS
            head_of_group = first_head + row % HEADS
            head = kv_head * GROUP + head_of_group
            is_query = (row < BLOCK_S * HEADS) & (index < group_len) & (head_of_group < GROUP)
            seq = tl.load(members + group_start + index, mask=is_query, other=0)
            token = tl.load(query_starts + seq, mask=is_query, other=0).to(tl.int64)
            q_offset = token * stride_q_token + head * stride_q_head
            q, q_rest = load_query(query, q_offset, is_query, HEAD_DIM, BLOCK_D, BLOCK_R)
            row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
            found, log = attend_keys(
                q, q_rest, row_max, row_sum, tl.full([BLOCK_M], 0, tl.int32) + end, begin, begin, begin, end, end, 0,
                scale, softcap, block_tables + stride_table.to(tl.int64) * leader, kv_head,
                key_cache, value_cache, key_scales, value_scales,
                STRIDE_K_BLOCK, STRIDE_K_HEAD, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_HEAD, STRIDE_V_SLOT,
                STRIDE_S_BLOCK, STRIDE_S_HEAD, FORMAT, False, HAS_SOFTCAP,
                HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_R, BLOCK_V, SHARED,
                BLOCK_M, BLOCK_N, STAGES, True, False, PRECISION,
            )  # fmt: skip
            _store_partial(
                partials, logs, found, log, is_query, (seq.to(tl.int64) * slots + first_slot + split) * queries, head,
                NUM_HEADS, VALUE_DIM, BLOCK_V,
            )  # fmt: skip
