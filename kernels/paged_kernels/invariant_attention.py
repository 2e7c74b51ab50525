"""Batch-invariant paged attention on a GPU: the bits of a row depend on its query and the keys that it sees only.

The keys of a sequence are divided into partitions at multiples of PARTITION, and a partition into steps at multiples of
BLOCK_N, wherever a chunk or a sliding window starts. Every row, of a prompt or of a decode step, runs the loop of
`attention_tile` over the steps of a partition in a tile of one shape, and adds the results of its partitions in order:

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
from torch import Tensor

from paged_kernels.attention_arguments import flags_of, layer_arguments, layout_of, partial_results, step_arguments
from paged_kernels.attention_kernels import load_query
from paged_kernels.attention_tile import attend_keys, find_sequence
from paged_kernels.launch import Device, Launch, LaunchTemplate, count_splits, key_blocks
from paged_kernels.launch_table import Tile, TuningKey, default_tile, power_of_two
from paged_kernels.layer_cache import LayerCache
from paged_kernels.paging import Paging

PARTITION = 512  # keys; a multiple of every BLOCK_N
MAX_WORKSPACE = 64 << 20  # maximum bytes of the results of partitions; a step that needs more runs in one launch
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
def _finish(acc, row_max, row_sum, sinks, head, is_row, HAS_SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the result of the sums: 0 for a row without keys, and never -0."""
    if HAS_SINKS:  # a sink is a key with this logit and value 0
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        acc, row_max, row_sum = _add(acc, row_max, row_sum, tl.zeros_like(acc), sink)
    return acc * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None] + 0.0


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "num_tiles", "num_splits", "slots", "window", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_starts", "sinks"],
)
def invariant_attention_kernel(  # type: ignore[no-untyped-def]
    out, partials, logs, query, key_cache, value_cache, key_scales, value_scales,
    block_tables, context_lens, query_starts, sinks,
    num_seqs, num_tokens, num_tiles, num_splits, slots, window, scale, softcap,
    stride_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, SHARED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PARTITION: tl.constexpr, PARTIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of queries; with PARTIAL, every num_splits-th partition of its keys, which stay apart.

    Grid: (num_tiles, KV heads * tiles of a group, num_splits). The result of partition p goes to slot p % slots of
    partials [slots, num_tokens, NUM_HEADS, VALUE_DIM] and logs, which lack the last dimension.
    """
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    tile = num_tiles - 1 - tl.program_id(0)  # the longest work first
    seq = find_sequence(query_starts, num_seqs, tile, BLOCK_Q)
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    q_first = (tile - (query_start // BLOCK_Q + seq)) * BLOCK_Q
    if q_first < query_len:
        row = tl.arange(0, BLOCK_M)
        q_index = q_first + row // HEADS
        head_of_group = tl.program_id(1) % HEAD_TILES * HEADS + row % HEADS
        head = kv_head * GROUP + head_of_group
        is_query = (row < BLOCK_Q * HEADS) & (q_index < query_len) & (head_of_group < GROUP)
        token = (query_start + q_index).to(tl.int64)
        first_position = tl.load(context_lens + seq) - query_len + q_first
        position = first_position + row // HEADS
        q, q_rest = load_query(
            query, token * stride_q_token + head * stride_q_head, is_query, HEAD_DIM, BLOCK_D, BLOCK_R
        )  # fmt: skip
        end = first_position + tl.minimum(BLOCK_Q, query_len - q_first)
        first = tl.maximum(first_position - window + 1, 0) if HAS_WINDOW else 0
        no_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        no_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
        row_max = no_max
        row_sum = no_sum
        d = tl.arange(0, BLOCK_V)[None, :]
        mask = is_query[:, None] & (d < VALUE_DIM)
        for part in range(first // PARTITION + tl.program_id(2), tl.cdiv(end, PARTITION), num_splits):
            begin = tl.maximum(part * PARTITION, first // BLOCK_N * BLOCK_N)
            stop = tl.minimum((part + 1) * PARTITION, end)
            found, log = attend_keys(
                q, q_rest, no_max, no_sum, position, first, begin, begin, stop, stop, window, scale, softcap,
                block_tables + stride_table.to(tl.int64) * seq, kv_head, key_cache, value_cache, key_scales,
                value_scales, STRIDE_K_BLOCK, STRIDE_K_HEAD, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_HEAD,
                STRIDE_V_SLOT, STRIDE_S_BLOCK, STRIDE_S_HEAD, FORMAT, HAS_WINDOW, HAS_SOFTCAP,
                HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_R, BLOCK_V, SHARED,
                BLOCK_M, BLOCK_N, STAGES, True, True, PRECISION,
            )  # fmt: skip
            if PARTIAL:
                place = (part % slots * num_tokens + token) * NUM_HEADS + head
                tl.store(partials + place[:, None] * VALUE_DIM + d, found, mask=mask)
                tl.store(logs + place, log, mask=is_query)
            else:
                acc, row_max, row_sum = _add(acc, row_max, row_sum, found, log)
        if not PARTIAL:
            result = _finish(acc, row_max, row_sum, sinks, head, is_query, HAS_SINKS).to(out.dtype.element_ty)
            o_offset = token * stride_o_token + head * stride_o_head
            tl.store(out + o_offset[:, None] + d, result, mask=mask)


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "slots", "window"],
    do_not_specialize_on_alignment=["context_lens", "query_starts", "sinks"],
)
def add_partitions_kernel(  # type: ignore[no-untyped-def]
    out, partials, logs, context_lens, query_starts, sinks, num_seqs, num_tokens, slots, window,
    stride_o_token, stride_o_head,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    PARTITION: tl.constexpr, ROWS: tl.constexpr, UNROLLED: tl.constexpr,
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
        is_row = head < NUM_HEADS
        mask = is_row[:, None] & (d < VALUE_DIM)
        first = tl.maximum(position - window + 1, 0) // PARTITION if HAS_WINDOW else 0
        last = tl.cdiv(position + 1, PARTITION)
        acc = tl.zeros([ROWS, BLOCK_V], dtype=tl.float32)
        row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        for start in range(first, last, UNROLLED):
            for i in tl.static_range(UNROLLED):
                part = start + i
                place = ((part % slots).to(tl.int64) * num_tokens + token) * NUM_HEADS + head
                found = tl.load(partials + place[:, None] * VALUE_DIM + d, mask=mask & (part < last), other=0.0)
                log = tl.load(logs + place, mask=is_row & (part < last), other=float("-inf"))
                acc, row_max, row_sum = _add(acc, row_max, row_sum, found, log)
        result = _finish(acc, row_max, row_sum, sinks, head, is_row, HAS_SINKS).to(out.dtype.element_ty)
        o_offset = token.to(tl.int64) * stride_o_token + head * stride_o_head
        tl.store(out + o_offset[:, None] + d, result, mask=mask)


def tile_of(query: Tensor, cache: LayerCache, device: Device) -> Tile:
    """Return the tile of a layer. Tables of tuned tiles do not affect it.

    It compiles with hardly any spilling although there are two accumulators, and fits into 99 KiB of shared memory.
    """
    block_d = key_blocks(max(query.shape[2], cache.value_dim))[0]
    quantized, itemsize = cache.format is not None, query.element_size()
    if itemsize == 4 or block_d > 256 or device.chip.startswith("gfx"):
        return default_tile(device.chip, TuningKey(block_d, itemsize, 16, quantized, 1))
    if block_d > 128:
        return Tile(32, 32, 8, 2)
    if device.chip.startswith(SMALL_PRODUCTS):
        return Tile(64, 32 if quantized else 64, 8, 2)
    return Tile(64, 32, 4, 3)


def _templates(
    out: Tensor, query: Tensor, cache: LayerCache, paging: Paging, device: Device,
    window: int | None, flags: dict[str, bool],
) -> tuple[int, list[LaunchTemplate]]:  # fmt: skip
    """Return the rows of partial results, and the launches of a call in order."""
    num_tokens, num_heads = query.shape[:2]
    num_kv_heads = cache.keys.shape[1]
    tile, group = tile_of(query, cache, device), num_heads // num_kv_heads
    heads = min(group, tile.block_m)
    queries = tile.block_m // heads
    num_tiles, head_programs = num_tokens // queries + paging.num_seqs, num_kv_heads * triton.cdiv(group, heads)
    # A power of two, so that similar steps need the same memory, as the memory of each size is kept for later steps.
    slots = triton.cdiv(power_of_two(paging.max_context_len), PARTITION)
    if window is not None:
        slots = min(slots, (window + queries) // PARTITION + 2)
    rows = slots * num_tokens * num_heads
    splits = 1
    if 4 * rows * (cache.value_dim + 1) <= MAX_WORKSPACE:
        splits = count_splits(num_tiles * head_programs, paging.max_context_len, device.multiprocessors)
    block_rows = max(1, MERGED_ELEMENTS // power_of_two(cache.value_dim))
    named = dict(
        **step_arguments(out, query, cache, paging), **flags, num_tokens=num_tokens, num_tiles=num_tiles,
        num_splits=splits, slots=slots, HEADS=heads, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        STAGES=tile.num_stages, PARTITION=PARTITION, PARTIAL=splits > 1, num_warps=tile.num_warps,
        ROWS=block_rows, UNROLLED=UNROLLED, enable_fp_fusion=False,
    )  # fmt: skip
    templates = [LaunchTemplate.of(invariant_attention_kernel, (num_tiles, head_programs, splits), named)]
    if splits > 1:
        merge = dict(BLOCK_V=power_of_two(cache.value_dim), num_warps=4)
        grid = (num_tokens, triton.cdiv(num_heads, block_rows))
        templates.append(LaunchTemplate.of(add_partitions_kernel, grid, {**named, **merge}))
    return rows, templates


def plan_launch(
    out: Tensor, query: Tensor, cache: LayerCache, paging: Paging, *,
    scale: float, sliding_window: int | None, softcap: float | None, sinks: Tensor | None, device: Device,
) -> list[Launch]:  # fmt: skip
    """Return the launches of one call in order; see `paged_attention.plan_launch`."""
    key = ("invariant", *layout_of(query, cache), sliding_window, softcap is not None, sinks is not None, device)
    if key not in paging.derived:
        flags = flags_of(sliding_window, softcap, sinks)
        paging.derived[key] = _templates(out, query, cache, paging, device, sliding_window, flags)
    rows, templates = paging.derived[key]
    partials = logs = None
    if len(templates) > 1:
        partials, logs = partial_results(rows, cache.value_dim, query.device)
    layer = layer_arguments(
        out, query, cache, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
    ) | dict(partials=partials, logs=logs)
    return [template.launch(layer) for template in templates]
