"""The attention kernels: mixed prefill and decode with the merge of partial results, and shared prefixes.

A program processes a tile of query rows of one sequence and one KV head, and loops over the keys in the pages of its
block table (PagedAttention, arXiv:2309.06180), with a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867;
FlashAttention, arXiv:2205.14135):

    tile rows (GQA packed):  row r -> query r // HEADS, head r % HEADS of this KV head's group

             begin          low                         high           end
    keys    ...|=============|###########################|==============|.....
      before the window   window edge   all rows see all keys   causal edge   newer than the tile's last query
      or in the prefix

A tile of a chunk masks only the steps at both edges. A tile of decode rows masks every step, in one loop. If there are
too few of these to fill the device, several programs split a sequence's keys (Flash-Decoding, Dao et al. 2023), and the
last of them to finish merges their results. Keys that many sequences share are processed once for all of them
(Hydragen, arXiv:2402.05099), before the rest. The grids depend on the number of rows and sequences only, never on their
lengths, so that a CUDA graph can be captured.

The constants CACHE, LAYER and tiles are a `CacheLayout`, a `Layer` and `Tile`s.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from paged_kernels.block_packing import Packed, load_packed_keys, load_packed_values, packed_of_head
from paged_kernels.dependent_launch import wait_for_previous
from paged_kernels.layer_ops import is_last


class Rows(NamedTuple):
    """Packed rows of queries or of results."""

    start: Any
    stride_token: Any
    stride_head: Any


class Pools(NamedTuple):
    """The keys and values of one KV head, and their scales if they are quantized."""

    key: Any
    value: Any
    key_scale: Any
    value_scale: Any
    packed: Any  # `Packed`


class Tables(NamedTuple):
    """The blocks of a sequence in the cache, and its packed blocks."""

    cache: Any
    packed: Any


class Queries(NamedTuple):
    """The queries of a tile, in two parts as `_load_step` loads keys, and their positions."""

    first: Any  # [M, BLOCK_D]
    rest: Any  # [M, BLOCK_R]
    position: Any  # [M]


class OwnBlocks(NamedTuple):
    """Where the blocks of a tile's first and last query begin, of a layer with packed blocks.

    Each query reads the first block and its own one from the cache, and the blocks between them from the packed ones.
    """

    first: Any
    last: Any


class Scoring(NamedTuple):
    """How a score is computed from a product, in units of log2."""

    scale: Any
    softcap: Any
    window: Any


class Partials(NamedTuple):
    """Memory for the results of splits. Those of sequences in small tiles come first, then those of large tiles.

    A sequence in a small tile has a slot for each split, and from slot num_splits on, one for each split of its prefix.
    """

    results: Any  # [num_seqs, slots, queries, NUM_HEADS, VALUE_DIM]; [large_splits, num_tokens, NUM_HEADS, VALUE_DIM]
    logs: Any  # without VALUE_DIM: log2 of the softmax's denominators
    arrivals: Any  # [num_seqs + large tiles, programs of all heads]: splits that have finished
    slots: Any
    queries: Any
    num_splits: Any
    prefix_splits: Any
    large_splits: Any
    min_split: Any  # keys
    num_tokens: Any


# --- addresses --------------------------------------------------------------------------------------------------------


@triton.jit
def find_tile(starts, count, tile, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sequence s of a tile, its first packed row, its number of rows, and the first of them in the tile.

    s is the last sequence whose first tile, starts[s] // BLOCK + s, is not past `tile`.
    """
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(starts + low)
    length = tl.load(starts + low + 1) - start
    return low, start, length, (tile - (start // BLOCK + low)) * BLOCK


@triton.jit
def tile_rows(first, length, BLOCK_M: tl.constexpr, LAYER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the query, from `first` on, and the head of each row of a tile, and whether the row is used."""
    BLOCK_Q: tl.constexpr = BLOCK_M // LAYER.HEADS
    row = tl.arange(0, BLOCK_M)
    index = first + row // LAYER.HEADS
    head_of_group = tl.program_id(1) % LAYER.HEAD_TILES * LAYER.HEADS + row % LAYER.HEADS
    head = tl.program_id(1) // LAYER.HEAD_TILES * LAYER.GROUP + head_of_group
    return index, head, (row < BLOCK_Q * LAYER.HEADS) & (index < length) & (head_of_group < LAYER.GROUP)


@triton.jit
def pools_of_head(  # type: ignore[no-untyped-def]
    keys, values, key_scales, value_scales, packed, CACHE: tl.constexpr, LAYER: tl.constexpr
):  # fmt: skip
    """Return the pools of the program's KV head."""
    kv_head = (tl.program_id(1) // LAYER.HEAD_TILES).to(tl.int64)
    key, value = keys + kv_head * CACHE.K_HEAD, values + kv_head * CACHE.V_HEAD
    # What a layer does not have is a pointer that is not used: before 3.7, Triton cannot return None in a tuple.
    key_scale, value_scale, of_head = key, value, Packed(key, key, key, value, value)
    if CACHE.FORMAT is not None:
        key_scale, value_scale = key_scales + kv_head * CACHE.S_HEAD, value_scales + kv_head * CACHE.S_HEAD
    if CACHE.PACKED is not None:
        of_head = packed_of_head(packed, kv_head, CACHE, LAYER.HEAD_DIM, LAYER.VALUE_DIM)
    return Pools(key, value, key_scale, value_scale, of_head)


@triton.jit
def tables_of(block_tables, stride_table, packed_tables, stride_packed_table, seq):  # type: ignore[no-untyped-def]
    """Return the tables of a sequence."""
    cache = block_tables + stride_table.to(tl.int64) * seq
    packed = cache
    if packed_tables is not None:
        packed = packed_tables + stride_packed_table.to(tl.int64) * seq
    return Tables(cache, packed)


@triton.jit
def load_queries(  # type: ignore[no-untyped-def]
    rows, token, head, is_row, position, channels, CACHE: tl.constexpr, LAYER: tl.constexpr
):  # fmt: skip
    """Load the queries of a tile, scaled for the keys of the cache."""
    row = rows.start + (token * rows.stride_token + head * rows.stride_head)[:, None]
    d = tl.arange(0, LAYER.BLOCK_D)
    q = tl.load(row + d[None, :], mask=is_row[:, None] & (d[None, :] < LAYER.FIRST_DIM), other=0.0)
    q_rest = q
    if LAYER.BLOCK_R > 0:
        r = LAYER.FIRST_DIM + tl.arange(0, LAYER.BLOCK_R)
        q_rest = tl.load(row + r[None, :], mask=is_row[:, None] & (r[None, :] < LAYER.HEAD_DIM), other=0.0)
    if CACHE.HAS_CHANNELS:
        kv_head = tl.program_id(1) // LAYER.HEAD_TILES
        factors = channels + (2 * (LAYER.NUM_HEADS // LAYER.GROUP) + kv_head) * LAYER.HEAD_DIM
        q *= tl.load(factors + d, mask=d < LAYER.FIRST_DIM, other=0.0).to(q.dtype)[None, :]
        if LAYER.BLOCK_R > 0:
            q_rest *= tl.load(factors + r, mask=r < LAYER.HEAD_DIM, other=0.0).to(q.dtype)[None, :]
    return Queries(q, q_rest, position)


@triton.jit
def value_elements(LAYER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the element of a value in each column of a tile, and whether there is one.

    With HALVES, each half of the columns has one half of the elements.
    """
    column = tl.arange(0, LAYER.BLOCK_V)
    element = column
    is_element = column < LAYER.VALUE_DIM
    if LAYER.HALVES:
        within = column % (LAYER.BLOCK_V // 2)
        element = column // (LAYER.BLOCK_V // 2) * (LAYER.VALUE_DIM // 2) + within
        is_element = within < LAYER.VALUE_DIM // 2
    return element, is_element


@triton.jit
def store_result(rows, token, head, is_row, found, LAYER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the results [M, BLOCK_V] of a tile."""
    row = rows.start + (token * rows.stride_token + head * rows.stride_head)[:, None]
    e, is_element = value_elements(LAYER)
    mask = is_row[:, None] & is_element[None, :]
    tl.store(row + e[None, :], found.to(rows.start.dtype.element_ty), mask=mask)


@triton.jit
def load_sink(sinks, head, is_row, BLOCK_M: tl.constexpr, LAYER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the sink of each row: a key with this logit and value 0. -infinity in a layer without sinks."""
    sink = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if LAYER.HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
    return sink


@triton.jit
def own_blocks(first_position, end, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the blocks of queries from a position up to `end`, which is 0 for padding."""
    SIZE: tl.constexpr = CACHE.BLOCK_SIZE
    return OwnBlocks(tl.maximum(first_position, 0) // SIZE * SIZE, tl.maximum(end - 1, 0) // SIZE * SIZE)


@triton.jit
def first_step(first, CACHE: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the start of the first step over keys from `first` on. A step begins with a block, or is within one."""
    UNIT: tl.constexpr = min(CACHE.BLOCK_SIZE, BLOCK_N)
    return first // UNIT * UNIT


@triton.jit
def steps_without_mask(begin, seen, end, window, LAYER: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first key of the steps that need no mask, and of the next one. Steps start at `begin`.

    All rows see the keys before `seen`, but for those that a window excludes. end: after the last row's position.
    """
    high = begin + tl.maximum(seen - begin, 0) // BLOCK_N * BLOCK_N
    low = begin
    if LAYER.HAS_WINDOW:
        low = tl.minimum(begin + tl.cdiv(tl.maximum(end - window - begin, 0), BLOCK_N) * BLOCK_N, high)
    return low, high


@triton.jit
def split_len_of(begin, end, num_splits, min_split, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the length of every split of [begin, end) but the last: whole steps, at least min_split keys."""
    share = tl.maximum((end - begin + num_splits - 1) // num_splits, min_split)
    return (share + BLOCK_N - 1) // BLOCK_N * BLOCK_N


# --- the loop over keys -----------------------------------------------------------------------------------------------


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    return 1 - 2 / (1 + tl.exp2(x * 2.8853900817779268))  # 2 * log2(e); saturates at +-1, never NaN


@triton.jit
def _widen(codes, CACHE: tl.constexpr, LAYER: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert codes to `dtype` exactly. The result for fp8 is CODE_UNIT times too small.

    Without an instruction for it: an e4m3 that is widened to 16 bits and shifted by 7 is a float16 with another
    exponent bias, once the copy of the sign in bit 14 is cleared. This holds for subnormal numbers too.
    """
    if CACHE.FORMAT == "fp8" and LAYER.CODE_UNIT == 1.0:
        codes = codes.to(tl.float8e4nv, bitcast=True)
    elif CACHE.FORMAT == "fp8":
        codes = ((codes.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True)
    return codes.to(dtype)


@triton.jit
def _load_blocks(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the blocks of positions start to start + BLOCK_N: one per position, or a scalar if a step is in one block.

    Positions from `end` on get block 0.
    """
    first = table + start // BLOCK_SIZE
    if BLOCK_SIZE >= BLOCK_N:
        block = tl.load(first, mask=start < end, other=0)
    else:
        n = tl.arange(0, BLOCK_N)
        block = tl.load(first + n // BLOCK_SIZE, mask=start + n < end, other=0)
    return block


@triton.jit
def _load_step(  # type: ignore[no-untyped-def]
    pools, block, start, begin, end,
    MASKED: tl.constexpr, CACHE: tl.constexpr, LAYER: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load keys in two parts [BLOCK_D, BLOCK_N] and [BLOCK_R, BLOCK_N], values [BLOCK_N, BLOCK_V] and their scales for
    positions from start on.

    With BLOCK_R = 0 the second part is not used. With SHARED, the values are the first part of the keys. Keys are
    loaded as values are, and transposed in shared memory, so that a thread uses a block number for both.
    """
    d = tl.arange(0, LAYER.BLOCK_D)
    e, is_element = value_elements(LAYER)
    n = start + tl.arange(0, BLOCK_N)
    # Memory outside [begin, end) may hold another request's data, even NaN: it is not loaded at all. Only with a window
    # can a step begin before `begin`.
    in_context = n < end
    if LAYER.HAS_WINDOW:
        in_context = in_context & (n >= begin)
    block = block.to(tl.int64)
    slot = tl.arange(0, BLOCK_N) % CACHE.BLOCK_SIZE  # the same in every step, if a step begins with a block
    if CACHE.BLOCK_SIZE > BLOCK_N:
        slot += start % CACHE.BLOCK_SIZE
    k_row = pools.key + block * CACHE.K_BLOCK + slot * CACHE.K_SLOT
    v_row = pools.value + block * CACHE.V_BLOCK + slot * CACHE.V_SLOT
    k_scale = 1.0
    v_scale = 1.0
    if MASKED:
        k_mask = (d[None, :] < LAYER.FIRST_DIM) & in_context[:, None]
        k = tl.load(k_row[:, None] + d[None, :], mask=k_mask, other=0.0)
    elif LAYER.BLOCK_D > LAYER.FIRST_DIM:
        k = tl.load(k_row[:, None] + d[None, :], mask=d[None, :] < LAYER.FIRST_DIM, other=0.0)
    else:
        k = tl.load(k_row[:, None] + d[None, :])
    if LAYER.SHARED:
        v = k
    elif MASKED:
        v_mask = is_element[None, :] & in_context[:, None]
        v = tl.load(v_row[:, None] + e[None, :], mask=v_mask, other=0.0)
    elif LAYER.BLOCK_V > LAYER.VALUE_DIM:
        v = tl.load(v_row[:, None] + e[None, :], mask=is_element[None, :], other=0.0)
    else:
        v = tl.load(v_row[:, None] + e[None, :])
    k_rest = k
    if LAYER.BLOCK_R > 0:
        r = LAYER.FIRST_DIM + tl.arange(0, LAYER.BLOCK_R)
        r_mask = (r[None, :] < LAYER.HEAD_DIM) & (in_context[:, None] if MASKED else True)
        k_rest = tl.load(k_row[:, None] + r[None, :], mask=r_mask, other=0.0)
    if CACHE.FORMAT is not None:
        s_row = block * CACHE.S_BLOCK + slot
        if MASKED:
            k_scale = tl.load(pools.key_scale + s_row, mask=in_context, other=0.0)
            v_scale = tl.load(pools.value_scale + s_row, mask=in_context, other=0.0)
        else:
            k_scale = tl.load(pools.key_scale + s_row)
            v_scale = tl.load(pools.value_scale + s_row)
    return tl.trans(k), tl.trans(k_rest), v, k_scale, v_scale


@triton.jit
def _softmax_step(  # type: ignore[no-untyped-def]
    row_max, row_sum, acc, unit, queries, pools, block, start, begin, end, scoring,
    MASKED: tl.constexpr, ROW_UNITS: tl.constexpr, PACKED: tl.constexpr,
    CACHE: tl.constexpr, LAYER: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one step of the running softmax, over the BLOCK_N keys from position `start` on.

    PACKED: whether they are in packed blocks.
    """
    dtype: tl.constexpr = queries.first.dtype
    HAS_SCALES: tl.constexpr = CACHE.FORMAT is not None and not PACKED
    if PACKED:
        offset = start % CACHE.BLOCK_SIZE
        k, k_rest = load_packed_keys(pools.packed, block.to(tl.int64), offset, dtype, CACHE, LAYER, BLOCK_N)
        v = load_packed_values(pools.packed, block.to(tl.int64), offset, dtype, CACHE, LAYER, BLOCK_N)
    else:
        k, k_rest, v, k_scale, v_scale = _load_step(pools, block, start, begin, end, MASKED, CACHE, LAYER, BLOCK_N)
    if HAS_SCALES:
        k = _widen(k, CACHE, LAYER, dtype)
        k_rest = _widen(k_rest, CACHE, LAYER, dtype)
        v = _widen(v, CACHE, LAYER, dtype)

    scores = tl.dot(queries.first, k, input_precision=LAYER.PRECISION)
    if LAYER.BLOCK_R > 0:
        scores = tl.dot(queries.rest, k_rest, scores, input_precision=LAYER.PRECISION)
    factor = scoring.scale  # of scores; multiplied together with the subtraction of their maximum
    if HAS_SCALES:
        scores = scores * (k_scale * (LAYER.CODE_UNIT * factor))[None, :]
        factor = 1.0
    if LAYER.HAS_SOFTCAP:
        scores = scoring.softcap * tanh(scores * factor)
        factor = 1.0
    if MASKED:
        n = start + tl.arange(0, BLOCK_N)
        visible = (n < end)[None, :] & (n[None, :] <= queries.position[:, None])
        if CACHE.PACKED is not None:  # a query reads the blocks between the first and its own one packed
            own = queries.position // CACHE.BLOCK_SIZE * CACHE.BLOCK_SIZE
            packed_end = tl.where(start < CACHE.BLOCK_SIZE, 0, own)
            visible = visible & ((n[None, :] < packed_end[:, None]) == PACKED)
        if LAYER.HAS_WINDOW:
            visible = visible & (n[None, :] > queries.position[:, None] - scoring.window)
        scores = tl.where(visible, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    # Rows that have seen no key yet: -inf - -inf would be NaN, but -inf - 0 gives the weight 0.
    base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores * factor - base[:, None])
    shrink = tl.exp2(row_max - base)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    if PACKED:
        weights = weights * 16384.0  # 2 / unit
    if HAS_SCALES:
        # The unit of acc is the largest value scale so far * 2**-14, so that a weight times its value's scale is at
        # most 2**14, within the range of float16.
        if ROW_UNITS:
            largest = tl.max(tl.where(visible, v_scale[None, :], 0.0), 1)
            new_unit = tl.maximum(unit, largest * 0.00006103515625)
            weights = weights * (1.0 / new_unit)[:, None] * v_scale[None, :]
        else:
            new_unit = tl.maximum(unit, tl.max(v_scale, 0) * 0.00006103515625)
            weights = weights * (v_scale / new_unit)[None, :]
        shrink = shrink * (unit / new_unit)
        unit = new_unit
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=LAYER.PRECISION)
    return new_max, row_sum, acc, unit


@triton.jit
def _empty_sums(CACHE: tl.constexpr, TILE: tl.constexpr, LAYER: tl.constexpr, ROW_UNITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sums of a tile's values, and their unit, which is below the smallest scale times 2**-14.

    Packed values, which have been halved, count as codes with the scale 2.
    """
    LEAST: tl.constexpr = 1e-37 if CACHE.PACKED is None else 0.0001220703125
    unit = LEAST
    if ROW_UNITS:
        unit = tl.full([TILE.block_m], LEAST, dtype=tl.float32)
    return tl.full([TILE.block_m, LAYER.BLOCK_V], 0.0, dtype=tl.float32), unit


@triton.jit
def _position(step, gap, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where a step begins if `gap` positions after the first block are left out."""
    return step + tl.where(step < CACHE.BLOCK_SIZE, 0, gap)


@triton.jit
def _add_steps(  # type: ignore[no-untyped-def]
    row_max, row_sum, acc, unit, queries, pools, tables, first, begin, end, gap, scoring,
    MASKED: tl.constexpr, ROW_UNITS: tl.constexpr, PACKED: tl.constexpr,
    CACHE: tl.constexpr, LAYER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the keys from `first` on in steps [begin, end), but for `gap` keys after the first block.

    Blocks are loaded one step ahead: if keys depended on a load of the same step, the pipeline would be one shorter.
    """
    table = tables.packed if PACKED else tables.cache
    start = _position(begin, gap, CACHE)
    block = _load_blocks(table, start, end, CACHE.BLOCK_SIZE, TILE.block_n)
    for step in tl.range(begin, end - gap, TILE.block_n, num_stages=TILE.num_stages):
        start = _position(step, gap, CACHE)
        next_start = _position(step + TILE.block_n, gap, CACHE)
        next_block = _load_blocks(table, next_start, end, CACHE.BLOCK_SIZE, TILE.block_n)
        row_max, row_sum, acc, unit = _softmax_step(
            row_max, row_sum, acc, unit, queries, pools, block, start, first, end, scoring,
            MASKED, ROW_UNITS, PACKED, CACHE, LAYER, TILE.block_n,
        )  # fmt: skip
        block = next_block
    return row_max, row_sum, acc, unit


@triton.jit
def _gap(begin, end, own, CACHE: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how many keys of [begin, end) are between the first block and the blocks of a tile's queries.

    They are whole steps. Rounding tells the compiler so, and saves instructions in the loop.
    """
    gap = tl.maximum(tl.minimum(own.first, end) - tl.maximum(begin, CACHE.BLOCK_SIZE), 0)
    return gap // BLOCK_N * BLOCK_N


@triton.jit
def _normalize(row_max, row_sum, acc, unit, CACHE: tl.constexpr, LAYER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the results of the sums, and the log2 of the softmax's denominator: -infinity for a row without keys."""
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    norm = 1.0 / total
    if CACHE.FORMAT is not None:
        norm = norm * unit * LAYER.CODE_UNIT
    return acc * norm[:, None], row_max + tl.log2(total)


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    queries, row_max, row_sum, pools, tables, first, begin, end, own, scoring,
    CACHE: tl.constexpr, LAYER: tl.constexpr, TILE: tl.constexpr, ROW_UNITS: tl.constexpr = False,
):  # fmt: skip
    """Return the attention of a tile over the keys in steps [begin, end), and the log2 of the softmax's denominator.

    Every step is masked: for few rows that costs less than a second loop with its own pipeline start. With ROW_UNITS,
    the result of a row depends only on the keys that it sees. own: `OwnBlocks` of the queries.
    """
    acc, unit = _empty_sums(CACHE, TILE, LAYER, ROW_UNITS)
    gap = 0
    if CACHE.PACKED is not None:
        row_max, row_sum, acc, unit = _add_steps(
            row_max, row_sum, acc, unit, queries, pools, tables, first,
            tl.maximum(begin, CACHE.BLOCK_SIZE), tl.minimum(end, own.last), 0, scoring,
            True, ROW_UNITS, True, CACHE, LAYER, TILE,
        )  # fmt: skip
        gap = _gap(begin, end, own, CACHE, TILE.block_n)
    row_max, row_sum, acc, unit = _add_steps(
        row_max, row_sum, acc, unit, queries, pools, tables, first, begin, end, gap, scoring,
        True, ROW_UNITS, False, CACHE, LAYER, TILE,
    )  # fmt: skip
    return _normalize(row_max, row_sum, acc, unit, CACHE, LAYER)


# --- prefill ----------------------------------------------------------------------------------------------------------


@triton.jit
def _prefill_tile(  # type: ignore[no-untyped-def]
    out, partials, query, key_channels, pools, tables, context_len, start, length, first_query, split, first_row,
    counter, sinks, scoring,
    CACHE: tl.constexpr, LAYER: tl.constexpr, TILE: tl.constexpr,
    PARTIAL: tl.constexpr, MAX_SLOTS: tl.constexpr,
):  # fmt: skip
    """Compute the queries of a chunk from `first_query` on: first the steps that need no mask, then both edges.

    With PARTIAL, only the steps of one split of the keys. first_row: the row of the partials that token 0 has.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_Q: tl.constexpr = TILE.block_m // LAYER.HEADS
    index, head, is_row = tile_rows(first_query, length, TILE.block_m, LAYER)
    first_position = context_len - length + first_query
    end = first_position + tl.minimum(BLOCK_Q, length - first_query)
    first = tl.maximum(first_position - scoring.window + 1, 0) if LAYER.HAS_WINDOW else 0
    edge = first_step(first, CACHE, BLOCK_N)
    begin = edge
    seen = first_position + 1  # all rows see the keys from the window's edge up to here
    stop = end
    if CACHE.PACKED is not None:
        own = own_blocks(first_position, end, CACHE)
        begin, seen, stop = tl.maximum(edge, CACHE.BLOCK_SIZE), own.first, own.last
    low, high = steps_without_mask(begin, seen, end, scoring.window, LAYER, BLOCK_N)

    PACKED: tl.constexpr = CACHE.PACKED is not None
    parts = 1
    if PARTIAL and not PACKED:
        split_len = split_len_of(begin, end, partials.large_splits, partials.min_split, BLOCK_N)
        parts = tl.cdiv(tl.maximum(end - begin, 0), split_len)  # splits that have keys
        begin += split * split_len
        stop = tl.minimum(begin + split_len, end)
        low = tl.minimum(tl.maximum(low, begin), stop)
        high = tl.minimum(tl.maximum(high, begin), stop)

    token = (start + index).to(tl.int64)
    queries = load_queries(query, token, head, is_row, context_len - length + index, key_channels, CACHE, LAYER)
    sink = load_sink(sinks, head, is_row, TILE.block_m, LAYER)
    row_max = tl.full([TILE.block_m], float("-inf"), dtype=tl.float32) if PARTIAL else sink
    row_sum = tl.full([TILE.block_m], 1.0 if LAYER.HAS_SINKS and not PARTIAL else 0.0, dtype=tl.float32)
    acc, unit = _empty_sums(CACHE, TILE, LAYER, False)
    row_max, row_sum, acc, unit = _add_steps(
        row_max, row_sum, acc, unit, queries, pools, tables, first, low, high, 0, scoring,
        False, False, PACKED, CACHE, LAYER, TILE,
    )  # fmt: skip
    before = low - begin
    table = tables.packed if PACKED else tables.cache
    for done in tl.range(0, before + stop - high, BLOCK_N, num_stages=TILE.num_stages):
        step = tl.where(done < before, begin + done, high - before + done)
        block = _load_blocks(table, step, stop, CACHE.BLOCK_SIZE, BLOCK_N)
        row_max, row_sum, acc, unit = _softmax_step(
            row_max, row_sum, acc, unit, queries, pools, block, step, first, stop, scoring,
            True, False, PACKED, CACHE, LAYER, BLOCK_N,
        )  # fmt: skip
    if PACKED:
        row_max, row_sum, acc, unit = _add_steps(
            row_max, row_sum, acc, unit, queries, pools, tables, first,
            edge, end, _gap(edge, end, own, CACHE, BLOCK_N), scoring,
            True, False, False, CACHE, LAYER, TILE,
        )  # fmt: skip
    found, log = _normalize(row_max, row_sum, acc, unit, CACHE, LAYER)
    if not PARTIAL:
        store_result(out, token, head, is_row, found, LAYER)
    elif split < tl.maximum(parts, 1):  # without any keys the first split writes zeros
        _finish_split(
            out, partials, found, log, sink, token, head, is_row, first_row + token, partials.num_tokens, split, parts,
            parts, counter, TILE.block_m, LAYER, MAX_SLOTS,
        )  # fmt: skip


# --- decode -----------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_tile(  # type: ignore[no-untyped-def]
    out, query, key_channels, pools, tables, context_len, start, length, sinks, scoring,
    CACHE: tl.constexpr, LAYER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute all queries of a sequence, which fit the tile."""
    index, head, is_row = tile_rows(0, length, TILE.block_m, LAYER)
    token = (start + index).to(tl.int64)
    queries = load_queries(query, token, head, is_row, context_len - length + index, key_channels, CACHE, LAYER)
    row_max = load_sink(sinks, head, is_row, TILE.block_m, LAYER)
    row_sum = tl.full([TILE.block_m], 1.0 if LAYER.HAS_SINKS else 0.0, dtype=tl.float32)
    first = tl.maximum(context_len - length - scoring.window + 1, 0) if LAYER.HAS_WINDOW else 0
    begin = first_step(first, CACHE, TILE.block_n)
    found, _ = attend(
        queries, row_max, row_sum, pools, tables, first, begin, context_len,
        own_blocks(context_len - length, context_len, CACHE), scoring, CACHE, LAYER, TILE,
    )  # fmt: skip
    store_result(out, token, head, is_row, found, LAYER)


@triton.jit
def _decode_split(  # type: ignore[no-untyped-def]
    out, partials, query, key_channels, pools, tables, context_len, seq, start, length, split, shared_lens, sinks,
    scoring, CACHE: tl.constexpr, LAYER: tl.constexpr, TILE: tl.constexpr,
    PREFIX_N: tl.constexpr, MAX_SLOTS: tl.constexpr,
):  # fmt: skip
    """Compute all queries of a sequence, which fit the tile, over one split of the keys after its shared prefix.

    The last split of the sequence merges the results of all splits, and of those of the prefix.
    """
    prefix_len = 0
    if shared_lens is not None:
        prefix_len = tl.load(shared_lens + seq)
    first = tl.maximum(context_len - length - scoring.window + 1, 0) if LAYER.HAS_WINDOW else prefix_len
    begin = first_step(first, CACHE, TILE.block_n)
    split_len = split_len_of(begin, context_len, partials.num_splits, partials.min_split, TILE.block_n)
    own = tl.cdiv(tl.maximum(context_len - begin, 0), split_len)  # splits that have keys
    if split < tl.maximum(own, 1):  # without any keys the first program writes zeros
        index, head, is_row = tile_rows(0, length, TILE.block_m, LAYER)
        token = (start + index).to(tl.int64)
        queries = load_queries(query, token, head, is_row, context_len - length + index, key_channels, CACHE, LAYER)
        sink = load_sink(sinks, head, is_row, TILE.block_m, LAYER)  # added when the results are merged
        row_max = tl.full([TILE.block_m], float("-inf"), dtype=tl.float32)
        row_sum = tl.full([TILE.block_m], 0.0, dtype=tl.float32)
        split_begin = begin + split * split_len
        split_end = tl.minimum(split_begin + split_len, context_len)
        found, log = attend(
            queries, row_max, row_sum, pools, tables, first, split_begin, split_end,
            own_blocks(context_len - length, context_len, CACHE), scoring, CACHE, LAYER, TILE,
        )  # fmt: skip
        parts = own
        if shared_lens is not None:
            prefix_split = split_len_of(0, prefix_len, partials.prefix_splits, partials.min_split, PREFIX_N)
            parts += tl.cdiv(prefix_len, prefix_split)
        first_row = seq.to(tl.int64) * partials.slots * partials.queries
        _finish_split(
            out, partials, found, log, sink, token, head, is_row, first_row + index, partials.queries, split, own,
            parts, seq * tl.num_programs(1) + tl.program_id(1), TILE.block_m, LAYER, MAX_SLOTS,
        )  # fmt: skip


# --- splits -----------------------------------------------------------------------------------------------------------


@triton.jit
def _finish_split(  # type: ignore[no-untyped-def]
    out, partials, found, log, sink, token, head, is_row, row, stride_slot, split, own, parts, counter,
    BLOCK_M: tl.constexpr, LAYER: tl.constexpr, MAX_SLOTS: tl.constexpr,
):  # fmt: skip
    """Store the result of a split. If all `own` splits have finished, merge them and those of the prefix: `parts`.

    row: row of the partials in slot 0. stride_slot: rows from slot to slot. counter: counts the `own` splits.
    """
    is_done = True
    if parts > 1:
        _store_partial(partials, found, log, is_row, row + split * stride_slot, head, LAYER)
        is_done = is_last(partials.arrivals + counter, own)
        if is_done:
            found = _merge_partials(
                partials, sink, is_row, row * LAYER.NUM_HEADS + head, stride_slot * LAYER.NUM_HEADS, own, parts,
                BLOCK_M, LAYER, MAX_SLOTS,
            )  # fmt: skip
    elif LAYER.HAS_SINKS:
        found = tl.where(log > float("-inf"), 1.0 / (1.0 + tl.exp2(sink - log)), 0.0)[:, None] * found
    if is_done:
        store_result(out, token, head, is_row, found, LAYER)


@triton.jit
def _store_partial(partials, found, log, is_row, place, head, LAYER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the result of a split."""
    e, is_element = value_elements(LAYER)
    place = place * LAYER.NUM_HEADS + head
    mask = is_row[:, None] & is_element[None, :]
    tl.store(partials.results + place[:, None] * LAYER.VALUE_DIM + e[None, :], found, mask=mask)
    tl.store(partials.logs + place, log, mask=is_row)


@triton.jit
def _merge_partials(  # type: ignore[no-untyped-def]
    partials, sink, is_row, place, stride_slot, own, parts,
    BLOCK_M: tl.constexpr, LAYER: tl.constexpr, MAX_SLOTS: tl.constexpr,
):  # fmt: skip
    """Return the rows [BLOCK_M, BLOCK_V] of all parts: slots 0 to own - 1, and the prefix's from num_splits on.

    Each partial is weighted by its part of the softmax's denominator, whose log2 is in `logs`. The loads bypass the L1
    cache, because other multiprocessors have written the values.
    """
    STEP: tl.constexpr = max(1, 8192 // (BLOCK_M * LAYER.BLOCK_V))  # partials loaded at once
    index = tl.arange(0, MAX_SLOTS)
    slot = place[None, :] + (tl.where(index < own, index, index - own + partials.num_splits) * stride_slot)[:, None]
    used = (index < parts)[:, None] & is_row[None, :]
    log = tl.load(partials.logs + slot, mask=used, other=float("-inf"), cache_modifier=".cg")
    top = tl.maximum(tl.max(log, 0), sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(log - top[None, :]), 0) + tl.exp2(sink - top)
    total = tl.where(total == 0.0, 1.0, total)

    e, is_element = value_elements(LAYER)
    acc = tl.full([BLOCK_M, LAYER.BLOCK_V], 0.0, dtype=tl.float32)
    for done in range(0, parts, STEP):
        i = done + tl.arange(0, STEP)
        at = place[None, :] + (tl.where(i < own, i, i - own + partials.num_splits) * stride_slot)[:, None]
        mask = (i < parts)[:, None] & is_row[None, :]
        part_log = tl.load(partials.logs + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(part_log - top[None, :])
        values = partials.results + (at * LAYER.VALUE_DIM)[:, :, None] + e[None, None, :]
        mask = mask[:, :, None] & is_element[None, None, :]
        found = tl.load(values, mask=mask, other=0.0, cache_modifier=".cg")
        acc += tl.sum(found * weight[:, :, None], 0)
    return acc / total[:, None]


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(
    # Arguments that change between steps or layers: specializing on them would trigger compilation while serving.
    do_not_specialize=[
        *("num_seqs", "num_tokens", "large_tiles", "large_splits", "num_splits", "prefix_splits", "slots", "queries"),
        *("min_split", "window"),
        *("stride_table", "stride_packed_table"),
    ],
    do_not_specialize_on_alignment=[
        *("block_tables", "packed_tables", "context_lens", "query_starts", "shared_lens", "sinks"),
    ],
)
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    out, partials, logs, arrivals, query, key_cache, value_cache, key_scales, value_scales, key_channels,
    packed_key_codes, packed_key_scales, packed_key_zeros, packed_value_codes, packed_value_scales,
    block_tables, packed_tables, context_lens, query_starts, shared_lens, sinks,
    num_seqs, num_tokens, large_tiles, large_splits, num_splits, prefix_splits, min_split, slots, queries,
    window, scale, softcap,
    stride_table, stride_packed_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
    CACHE: tl.constexpr, LAYER: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr, PARTIAL: tl.constexpr,
    PREFIX_N: tl.constexpr, MAX_SLOTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute attention of a mixed batch.

    Grid: (large_tiles * large_splits + num_splits * num_seqs, KV heads * tiles of a group). The large tiles process the
    sequences with more queries than a small tile holds, the longest work first. Every other program processes a
    sequence. With PARTIAL, a program processes one of the splits of its tile or sequence. `arrivals` counts those that
    have finished; it is zero before and after the launch. Scores are scaled by log2(e), so that exp is exp2. The scales
    of a quantized cache are folded into scores and weights, so no tile is dequantized.
    """
    wait_for_previous(DEPENDENT)
    SMALL_Q: tl.constexpr = SMALL.block_m // LAYER.HEADS
    rows, results = Rows(query, stride_q_token, stride_q_head), Rows(out, stride_o_token, stride_o_head)
    packed = Packed(packed_key_codes, packed_key_scales, packed_key_zeros, packed_value_codes, packed_value_scales)
    pools = pools_of_head(key_cache, value_cache, key_scales, value_scales, packed, CACHE, LAYER)
    scoring = Scoring(scale, softcap, window)
    memory = Partials(
        partials, logs, arrivals, slots, queries, num_splits, prefix_splits, large_splits, min_split, num_tokens
    )  # fmt: skip
    item = tl.program_id(0)
    if LARGE is not None and item < large_tiles * large_splits:
        tile = large_tiles - 1 - item % large_tiles
        seq, start, length, first_query = find_tile(query_starts, num_seqs, tile, LARGE.block_m // LAYER.HEADS)
        if length > SMALL_Q:
            tables = tables_of(block_tables, stride_table, packed_tables, stride_packed_table, seq)
            context_len = tl.load(context_lens + seq)
            if first_query < length:
                _prefill_tile(
                    results, memory, rows, key_channels, pools, tables, context_len, start, length, first_query,
                    item // large_tiles, num_seqs.to(tl.int64) * slots * queries,
                    (num_seqs + tile) * tl.num_programs(1) + tl.program_id(1), sinks, scoring,
                    CACHE, LAYER, LARGE, PARTIAL, MAX_SLOTS,
                )  # fmt: skip
    else:
        item -= large_tiles * large_splits
        split = item // num_seqs  # split-major order: the last splits may be empty, so they are scheduled last
        seq = item % num_seqs
        start = tl.load(query_starts + seq)
        length = tl.load(query_starts + seq + 1) - start
        if (length > 0) & (length <= SMALL_Q):
            tables = tables_of(block_tables, stride_table, packed_tables, stride_packed_table, seq)
            context_len = tl.load(context_lens + seq)
            if PARTIAL:
                _decode_split(
                    results, memory, rows, key_channels, pools, tables, context_len, seq, start, length, split,
                    shared_lens, sinks, scoring, CACHE, LAYER, SMALL, PREFIX_N, MAX_SLOTS,
                )  # fmt: skip
            else:
                _decode_tile(
                    results, rows, key_channels, pools, tables, context_len, start, length, sinks, scoring,
                    CACHE, LAYER, SMALL,
                )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        *("num_groups", "num_splits", "min_split", "first_slot", "slots", "queries"),
        *("stride_table", "stride_packed_table"),
    ],
    do_not_specialize_on_alignment=[
        *("block_tables", "packed_tables", "query_starts", "shared_lens", "members", "group_starts"),
    ],
)
def prefix_attention_kernel(  # type: ignore[no-untyped-def]
    partials, logs, query, key_cache, value_cache, key_scales, value_scales, key_channels,
    packed_key_codes, packed_key_scales, packed_key_zeros, packed_value_codes, packed_value_scales,
    block_tables, packed_tables, query_starts, shared_lens, members, group_starts,
    num_groups, num_splits, min_split, first_slot, slots, queries, scale, softcap,
    stride_table, stride_packed_table, stride_q_token, stride_q_head,
    CACHE: tl.constexpr, LAYER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the shared-prefix part of decode rows.

    Grid: (num_seqs // (rows of the tile // HEADS) + num_groups, KV heads * tiles of a group, num_splits). A tile holds
    the decode rows of some members of a prefix group: row r is member r // HEADS, head r % HEADS. The result for one
    split of the shared keys goes to slot first_slot + split of each member's partials.
    """
    _, group_start, group_len, first_member = find_tile(
        group_starts, num_groups, tl.program_id(0), TILE.block_m // LAYER.HEADS
    )  # fmt: skip
    if first_member < group_len:
        split = tl.program_id(2)
        leader = tl.load(members + group_start)
        shared_len = tl.load(shared_lens + leader)
        split_len = split_len_of(0, shared_len, num_splits, min_split, TILE.block_n)
        begin = split * split_len
        end = tl.minimum(begin + split_len, shared_len)
        if begin < end:
            index, head, is_row = tile_rows(first_member, group_len, TILE.block_m, LAYER)
            seq = tl.load(members + group_start + index, mask=is_row, other=0)
            token = tl.load(query_starts + seq, mask=is_row, other=0).to(tl.int64)
            position = tl.full([TILE.block_m], 0x7FFFFFFF, tl.int32)  # after all shared keys
            rows = Rows(query, stride_q_token, stride_q_head)
            packed = Packed(
                packed_key_codes, packed_key_scales, packed_key_zeros, packed_value_codes, packed_value_scales
            )  # fmt: skip
            found, log = attend(
                load_queries(rows, token, head, is_row, position, key_channels, CACHE, LAYER),
                tl.full([TILE.block_m], float("-inf"), dtype=tl.float32),
                tl.full([TILE.block_m], 0.0, dtype=tl.float32),
                pools_of_head(key_cache, value_cache, key_scales, value_scales, packed, CACHE, LAYER),
                tables_of(block_tables, stride_table, packed_tables, stride_packed_table, leader),
                begin, begin, end, OwnBlocks(end, end), Scoring(scale, softcap, 0), CACHE, LAYER, TILE,
            )  # fmt: skip
            place = (seq.to(tl.int64) * slots + first_slot + split) * queries
            memory = Partials(partials, logs, None, slots, queries, num_splits, num_splits, 1, min_split, 0)
            _store_partial(memory, found, log, is_row, place, head, LAYER)
