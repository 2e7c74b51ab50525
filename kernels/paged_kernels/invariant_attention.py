"""Batch-invariant paged attention on a GPU: the bits of a row depend on its query and the keys that it sees only.

The keys of a sequence are divided into partitions at multiples of PARTITION, and a partition into steps at multiples of
BLOCK_N, wherever a chunk or a sliding window starts. Every row, of a prompt or of a decode step, is in a tile of one
shape, which attends to one partition after the other, and adds the results of its partitions in order:

    position     0          512         1024        1536
    partitions   |  first    |  second   |  third    |  fourth  ...
    a row        sum(sum(sum(first, second), third), fourth)

Steps and partitions whose keys a row does not see, which it computes for other rows of its tile, leave its sums as they
are. One program computes all partitions of a tile, or several programs some each; then a second launch adds them, by
the same function. It has no products of tiles and no sums within a tile, so its shape does not affect the bits. Without
fused multiply-add the arithmetic is what the code says, however the compiler arranges it.
"""

import triton
import triton.language as tl

from paged_kernels.attention_kernels import (
    Rows,
    Scoring,
    attend,
    find_tile,
    load_queries,
    own_blocks,
    pools_of_head,
    store_result,
    tables_of,
    tile_rows,
    value_elements,
)
from paged_kernels.attention_plan import (
    MAX_WORKSPACE,
    AttentionPlan,
    LaunchTemplate,
    Layer,
    LayerKey,
    count_splits,
    key_blocks,
)
from paged_kernels.block_packing import Packed, pack_template
from paged_kernels.launch_table import Tile, TuningKey, default_tile, power_of_two
from paged_kernels.paging import Paging

PARTITION = 512  # keys; a multiple of every BLOCK_N
SMALL_PRODUCTS = ("sm_8", "sm_12")  # chips whose instructions multiply 16 rows, of any tile
MERGED_ELEMENTS = 1024  # elements of the rows that one program adds
UNROLLED = 8  # partitions whose results are loaded at the same time


@triton.jit
def _add(acc, row_max, row_sum, found, log):  # type: ignore[no-untyped-def]
    """Add the normalized result of a partition, with the log2 of its denominator, to sums relative to row_max."""
    new_max = tl.maximum(row_max, log)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    shrink = tl.exp2(row_max - base)
    weight = tl.exp2(log - base)
    return acc * shrink[:, None] + found * weight[:, None], new_max, row_sum * shrink + weight


@triton.jit
def _finish(acc, row_max, row_sum, sinks, head, is_row, LAYER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the result of the sums: 0 for a row without keys, and never -0."""
    if LAYER.HAS_SINKS:  # a sink is a key with this logit and value 0
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        acc, row_max, row_sum = _add(acc, row_max, row_sum, tl.zeros_like(acc), sink)
    return acc * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None] + 0.0


@triton.jit(
    do_not_specialize=[
        *("num_seqs", "num_tokens", "num_tiles", "num_splits", "slots", "window", "stride_table"),
        "stride_packed_table",
    ],
    do_not_specialize_on_alignment=["block_tables", "packed_tables", "context_lens", "query_starts", "sinks"],
)
def invariant_attention_kernel(  # type: ignore[no-untyped-def]
    out, partials, logs, query, key_cache, value_cache, key_scales, value_scales, key_channels,
    packed_key_codes, packed_key_scales, packed_key_zeros, packed_value_codes, packed_value_scales,
    block_tables, packed_tables, context_lens, query_starts, sinks,
    num_seqs, num_tokens, num_tiles, num_splits, slots, window, scale, softcap,
    stride_table, stride_packed_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
    CACHE: tl.constexpr, LAYER: tl.constexpr, TILE: tl.constexpr, PARTITION: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Compute a tile of queries; with PARTIAL, every num_splits-th partition of its keys, which stay apart.

    Grid: (num_tiles, KV heads * tiles of a group, num_splits). The result of partition p goes to slot p % slots of
    partials [slots, num_tokens, NUM_HEADS, VALUE_DIM] and logs, which lack the last dimension.
    """
    BLOCK_Q: tl.constexpr = TILE.block_m // LAYER.HEADS
    tile = num_tiles - 1 - tl.program_id(0)  # the longest work first
    seq, start, length, first_query = find_tile(query_starts, num_seqs, tile, BLOCK_Q)
    if first_query < length:
        index, head, is_row = tile_rows(first_query, length, TILE.block_m, LAYER)
        token = (start + index).to(tl.int64)
        context_len = tl.load(context_lens + seq)
        position = context_len - length + index
        queries = load_queries(
            Rows(query, stride_q_token, stride_q_head), token, head, is_row, position, key_channels, CACHE, LAYER
        )
        packed = Packed(packed_key_codes, packed_key_scales, packed_key_zeros, packed_value_codes, packed_value_scales)
        pools = pools_of_head(key_cache, value_cache, key_scales, value_scales, packed, CACHE, LAYER)
        tables = tables_of(block_tables, stride_table, packed_tables, stride_packed_table, seq)
        first_position = context_len - length + first_query
        end = first_position + tl.minimum(BLOCK_Q, length - first_query)
        first = tl.maximum(first_position - window + 1, 0) if LAYER.HAS_WINDOW else 0
        own = own_blocks(first_position, end, CACHE)
        no_max = tl.full([TILE.block_m], float("-inf"), dtype=tl.float32)
        no_sum = tl.full([TILE.block_m], 0.0, dtype=tl.float32)
        acc = tl.full([TILE.block_m, LAYER.BLOCK_V], 0.0, dtype=tl.float32)
        row_max = no_max
        row_sum = no_sum
        for part in range(first // PARTITION + tl.program_id(2), tl.cdiv(end, PARTITION), num_splits):
            begin = tl.maximum(part * PARTITION, first // TILE.block_n * TILE.block_n)
            stop = tl.minimum((part + 1) * PARTITION, end)
            found, log = attend(
                queries, no_max, no_sum, pools, tables, first, begin, stop, own, Scoring(scale, softcap, window),
                CACHE, LAYER, TILE, ROW_UNITS=True,
            )  # fmt: skip
            if PARTIAL:
                e, is_element = value_elements(LAYER)
                place = (part % slots * num_tokens + token) * LAYER.NUM_HEADS + head
                values = partials + place[:, None] * LAYER.VALUE_DIM + e[None, :]
                tl.store(values, found, mask=is_row[:, None] & is_element[None, :])
                tl.store(logs + place, log, mask=is_row)
            else:
                acc, row_max, row_sum = _add(acc, row_max, row_sum, found, log)
        if not PARTIAL:
            result = _finish(acc, row_max, row_sum, sinks, head, is_row, LAYER)
            store_result(Rows(out, stride_o_token, stride_o_head), token, head, is_row, result, LAYER)


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "slots", "window"],
    do_not_specialize_on_alignment=["context_lens", "query_starts", "sinks"],
)
def add_partitions_kernel(  # type: ignore[no-untyped-def]
    out, partials, logs, context_lens, query_starts, sinks, num_seqs, num_tokens, slots, window,
    stride_o_token, stride_o_head,
    LAYER: tl.constexpr, PARTITION: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Add the results of a token's partitions for some heads. Grid: (num_tokens, tiles of ROWS heads)."""
    token = tl.program_id(0)
    low, high = 0, num_seqs
    while high - low > 1:  # the last sequence that does not start after the token
        middle = (low + high) // 2
        if tl.load(query_starts + middle) <= token:
            low = middle
        else:
            high = middle
    next_start = tl.load(query_starts + low + 1)
    if token < next_start:  # other tokens are padding
        position = tl.load(context_lens + low) - next_start + token
        head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        d = tl.arange(0, BLOCK_V)[None, :]
        is_row = head < LAYER.NUM_HEADS
        mask = is_row[:, None] & (d < LAYER.VALUE_DIM)
        first = tl.maximum(position - window + 1, 0) // PARTITION if LAYER.HAS_WINDOW else 0
        last = tl.cdiv(position + 1, PARTITION)
        acc = tl.zeros([ROWS, BLOCK_V], dtype=tl.float32)
        row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        for start in range(first, last, UNROLLED):
            for i in tl.static_range(UNROLLED):
                part = start + i
                place = ((part % slots).to(tl.int64) * num_tokens + token) * LAYER.NUM_HEADS + head
                found = tl.load(partials + place[:, None] * LAYER.VALUE_DIM + d, mask=mask & (part < last), other=0.0)
                log = tl.load(logs + place, mask=is_row & (part < last), other=float("-inf"))
                acc, row_max, row_sum = _add(acc, row_max, row_sum, found, log)
        result = _finish(acc, row_max, row_sum, sinks, head, is_row, LAYER).to(out.dtype.element_ty)
        o_offset = token.to(tl.int64) * stride_o_token + head * stride_o_head
        tl.store(out + o_offset[:, None] + d, result, mask=mask)


def tile_of(key: LayerKey) -> Tile:
    """Return the tile of a layer. Tables of tuned tiles do not affect it.

    It compiles with hardly any spilling although there are two accumulators, and fits into 99 KiB of shared memory.
    """
    block_d = key_blocks(max(key.head_dim, key.value_dim))[0]
    chip, itemsize = key.device.chip, key.dtype.itemsize
    if itemsize == 4 or block_d > 256 or chip.startswith("gfx"):
        tile = default_tile(chip, TuningKey(block_d, itemsize, 16, key.quantized, 1))
        return tile._replace(num_warps=4) if key.cache.PACKED else tile
    if key.cache.PACKED and block_d <= 128:
        return Tile(32, 32, 4, 2) if chip.startswith(SMALL_PRODUCTS) else Tile(64, 32, 8, 2)
    if block_d > 128:
        return Tile(32, 32, 8, 2)
    if chip.startswith(SMALL_PRODUCTS):
        return Tile(64, 32 if key.quantized else 64, 8, 2)
    return Tile(64, 32, 4, 3)


def plan(key: LayerKey, paging: Paging) -> AttentionPlan:
    """Return the plan of a step for layers with this key."""
    tile = key.within_blocks(tile_of(key))
    heads = min(key.group, tile.block_m)
    layer = Layer.of(key, heads)
    queries = tile.block_m // heads
    num_tiles, head_programs = key.num_tokens // queries + paging.num_seqs, key.num_kv_heads * layer.HEAD_TILES
    # A power of two, so that similar steps need the same memory, as the memory of each size is kept for later steps.
    slots = triton.cdiv(power_of_two(paging.max_context_len), PARTITION)
    if key.sliding_window is not None:
        slots = min(slots, (key.sliding_window + queries) // PARTITION + 2)
    rows = slots * key.num_tokens * key.num_heads
    splits = 1
    if 4 * rows * (key.value_dim + 1) <= MAX_WORKSPACE:
        splits = count_splits(num_tiles * head_programs, paging.max_context_len, key.device.multiprocessors)
    named = dict(
        **key.step_arguments(paging), LAYER=layer, TILE=tile, num_tokens=key.num_tokens,
        num_tiles=num_tiles, num_splits=splits, slots=slots, PARTITION=PARTITION, PARTIAL=splits > 1,
        num_warps=tile.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    templates = [LaunchTemplate.of(invariant_attention_kernel, (num_tiles, head_programs, splits), named)]
    if key.cache.PACKED is not None:
        templates.insert(0, pack_template(key, paging))
    if splits == 1:
        return AttentionPlan(templates)
    block_v = power_of_two(key.value_dim)
    block_rows = max(1, MERGED_ELEMENTS // block_v)
    named |= dict(BLOCK_V=block_v, ROWS=block_rows, UNROLLED=UNROLLED, num_warps=4)
    grid = key.num_tokens, triton.cdiv(key.num_heads, block_rows)
    return AttentionPlan([*templates, LaunchTemplate.of(add_partitions_kernel, grid, named)], rows)
