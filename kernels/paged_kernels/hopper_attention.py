"""Prefill attention on Hopper: chunks that fill large tiles, in Gluon.

The kernel of `attention_kernels` leaves the division of work between warps to Triton. Its warps wait for each other
twice per step, so that softmax and products take turns. Here a program has three groups of warps, as FlashAttention-3
(Shah et al. 2024, arXiv:2407.08608):

    producer    1 warp     copies blocks of keys and values to shared memory with the tensor memory accelerator (TMA)
    consumers   2 x 4      each multiply 64 rows; one computes its softmax while the other's products run

Keys and values have a buffer of STAGES steps each. Barriers in shared memory say which stages are filled, and which are
free again. A step of a consumer multiplies queries by the keys of the step, and the weights of the previous step by its
values, so that there are products to run during its softmax. The consumers start their products in turn.

Programs are persistent: there is one per multiprocessor, and each computes a tile in every round. Keys are copied for
the next tile while the last results of this one are stored. The first step and those at both edges are masked.

Memory after the context may hold NaN, which a weight of 0 does not remove, so values after it are set to zero in shared
memory. Keys after it are masked. A sliding window begins within a block of the sequence, which holds its own values.
"""

from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_kernels.attention_kernels import find_tile, first_step, steps_without_mask, tanh
from paged_kernels.attention_plan import AttentionPlan, LaunchTemplate, Layer, LayerKey
from paged_kernels.launch_table import Tile
from paged_kernels.layer_cache import LayerCache
from paged_kernels.paging import Paging

ROWS = 64  # rows of a consumer, which its four warps multiply in one instruction


class Chunks(NamedTuple):
    """The sequences of a step, and the tiles of their chunks."""

    block_tables: Any
    context_lens: Any
    query_starts: Any
    stride_table: Any
    num_seqs: Any
    num_tiles: Any
    window: Any


class Work(NamedTuple):
    """A tile of queries and the steps over its keys, as `attention_kernels` has them.

    Steps in [low, high) need no mask and come first, then the steps before them, then those after them.
    """

    seq: Any
    start: Any
    first_query: Any
    length: Any
    context_len: Any
    head_program: Any
    begin: Any
    low: Any
    high: Any
    end: Any
    unmasked: Any  # steps
    steps: Any


class Buffers(NamedTuple):
    """Shared memory: stages of keys and values, and the barriers that say whether a stage is filled or free."""

    key_stages: Any
    value_stages: Any
    keys_filled: Any
    values_filled: Any
    keys_free: Any
    values_free: Any
    turns: Any  # whose products are next
    cleaned: Any  # whether values after the context are zero; two, since a consumer may be a tile ahead


@gluon.jit
def _tile_of(number, chunks, CACHE: gl.constexpr, LAYER: gl.constexpr, SMALL_Q: gl.constexpr, BLOCK_N: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the tile of this program in a round. It has no rows if it is empty, or if its sequence has few queries.

    A round is in the opposite order of the previous one, so that no program gets the longest tile of every round.
    """
    BLOCK_Q: gl.constexpr = 64 // LAYER.HEADS * 2
    HEAD_PROGRAMS: gl.constexpr = LAYER.NUM_HEADS // LAYER.GROUP * LAYER.HEAD_TILES
    place = gl.program_id(0)
    if number % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    item = number * gl.num_programs(0) + place
    tile = chunks.num_tiles - 1 - item // HEAD_PROGRAMS  # the longest work first
    head_program = item % HEAD_PROGRAMS
    seq, start, length, first_query = find_tile(chunks.query_starts, chunks.num_seqs, gl.maximum(tile, 0), BLOCK_Q)
    context_len = gl.load(chunks.context_lens + seq)
    first_position = context_len - length + first_query
    end = first_position + gl.minimum(BLOCK_Q, length - first_query)
    first = gl.maximum(first_position - chunks.window + 1, 0) if LAYER.HAS_WINDOW else 0
    begin = first_step(first, CACHE, BLOCK_N)
    low, high = steps_without_mask(begin, first_position + 1, end, chunks.window, LAYER, BLOCK_N)
    steps = gl.cdiv(gl.maximum(end - begin, 0), BLOCK_N)
    if (tile < 0) | (length <= SMALL_Q) | (first_query >= length):
        length = 0
        steps = 0
    unmasked = (high - low) // BLOCK_N
    return Work(seq, start, first_query, length, context_len, head_program, begin, low, high, end, unmasked, steps)


@gluon.jit
def _key_of(step, tile, BLOCK_N: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the position of the first key of a step."""
    key = tile.low + step * BLOCK_N
    if step >= tile.unmasked:
        key = tile.begin + (step - tile.unmasked) * BLOCK_N
        if key >= tile.low:
            key += tile.high - tile.low
    return key


# --- the producer -----------------------------------------------------------------------------------------------------


@gluon.jit
def _blocks_of(key, table, context_len, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the blocks of a step, and 0 for blocks after the context."""
    blocks = ()
    for i in gl.static_range(max(1, BLOCK_N // BLOCK_SIZE)):
        position = key + i * BLOCK_SIZE
        block = gl.load(table + position // BLOCK_SIZE, mask=position < context_len, other=0)
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit
def _copy(  # type: ignore[no-untyped-def]
    rows, first_row, blocks, key, count, stages, filled, free,
    BLOCK_ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start to copy the rows of a step, number `count` of all tiles, to its stage."""
    BLOCK_N: gl.constexpr = stages.shape[1]
    BOX: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    stage = count % STAGES
    mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)  # the first ones are free
    mbarrier.expect(filled.index(stage), BLOCK_N * stages.shape[2] * 2)
    for i in gl.static_range(BLOCK_N // BOX):
        row = blocks[i] * BLOCK_ROWS + first_row
        if BLOCK_SIZE > BLOCK_N:
            row += key % BLOCK_SIZE
        tma.async_copy_global_to_shared(
            rows, [row, 0], filled.index(stage), stages.index(stage).slice(i * BOX, BOX)
        )  # fmt: skip


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    key_rows, value_rows, chunks, buffers, num_rounds,
    CACHE: gl.constexpr, LAYER: gl.constexpr, SMALL_Q: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of all steps of all tiles. Values are needed a step later than keys."""
    SIZE: gl.constexpr = CACHE.BLOCK_SIZE
    K_ROWS: gl.constexpr = CACHE.K_BLOCK // CACHE.K_SLOT
    V_ROWS: gl.constexpr = CACHE.V_BLOCK // CACHE.V_SLOT
    count = 0  # steps of all tiles so far
    for number in range(num_rounds):
        tile = _tile_of(number, chunks, CACHE, LAYER, SMALL_Q, BLOCK_N)
        if tile.steps > 0:
            kv_head = tile.head_program // LAYER.HEAD_TILES
            first_k, first_v = kv_head * (CACHE.K_HEAD // CACHE.K_SLOT), kv_head * (CACHE.V_HEAD // CACHE.V_SLOT)
            table = chunks.block_tables + chunks.stride_table.to(gl.int64) * tile.seq
            key = _key_of(0, tile, BLOCK_N)
            blocks = _blocks_of(key, table, tile.context_len, SIZE, BLOCK_N)
            _copy(
                key_rows, first_k, blocks, key, count, buffers.key_stages, buffers.keys_filled, buffers.keys_free,
                K_ROWS, SIZE, STAGES,
            )  # fmt: skip
            for step in range(1, tile.steps):
                now = _key_of(step, tile, BLOCK_N)
                next_blocks = _blocks_of(now, table, tile.context_len, SIZE, BLOCK_N)
                _copy(
                    key_rows, first_k, next_blocks, now, count + step,
                    buffers.key_stages, buffers.keys_filled, buffers.keys_free, K_ROWS, SIZE, STAGES,
                )  # fmt: skip
                _copy(
                    value_rows, first_v, blocks, key, count + step - 1,
                    buffers.value_stages, buffers.values_filled, buffers.values_free, V_ROWS, SIZE, STAGES,
                )  # fmt: skip
                blocks = next_blocks
                key = now
            count += tile.steps
            _copy(
                value_rows, first_v, blocks, key, count - 1,
                buffers.value_stages, buffers.values_filled, buffers.values_free, V_ROWS, SIZE, STAGES,
            )  # fmt: skip


# --- a consumer -------------------------------------------------------------------------------------------------------


@gluon.jit
def _weights(  # type: ignore[no-untyped-def]
    scores, row_max, row_sum, position, key, tile, scale, softcap, window,
    MASKED: gl.constexpr, LAYER: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the weights of a step, by how much earlier sums shrink, and the maximum and sum of each row."""
    factor = scale
    if LAYER.HAS_SOFTCAP:
        scores = softcap * tanh(scores * scale)
        factor = 1.0
    if MASKED:
        n = key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
        visible = (n < tile.end) & (n <= position[:, None])
        if LAYER.HAS_WINDOW:
            visible = visible & (n > position[:, None] - window)
        scores = gl.where(visible, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    base = gl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = gl.exp2(scores * factor - base[:, None])
    shrink = gl.exp2(row_max - base)
    return weights, shrink, new_max, row_sum * shrink + gl.sum(weights, 1)


@gluon.jit
def _scores(queries, buffers, count, zero, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to multiply queries by the keys of a step."""
    stage = count % STAGES
    mbarrier.wait(buffers.keys_filled.index(stage), count // STAGES & 1)
    return warpgroup_mma(queries, buffers.key_stages.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _add_values(acc, weights, shrink, buffers, count, LAYOUT: gl.constexpr, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to add the values of a step."""
    stage = count % STAGES
    mbarrier.wait(buffers.values_filled.index(stage), count // STAGES & 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, LAYOUT))[:, None]
    return warpgroup_mma(weights, buffers.value_stages.index(stage), acc, is_async=True)


@gluon.jit
def _steps(  # type: ignore[no-untyped-def]
    weights, shrink, row_max, row_sum, acc, first, end, count, queries, buffers, position, tile, scale, softcap,
    window, zero,
    MASKED: gl.constexpr, WHICH: gl.constexpr, LAYER: gl.constexpr, QK: gl.constexpr, PV: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute steps [first, end) of a tile whose first step is number `count` of all tiles."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, PV, 2)
    dtype: gl.constexpr = queries.dtype
    for step in range(first, end):
        now = count + step
        mbarrier.wait(buffers.turns.index(WHICH), (now & 1) ^ (1 - WHICH))
        pending = _scores(queries, buffers, now, zero, STAGES)
        adding = _add_values(acc, weights, shrink, buffers, now - 1, PV, STAGES)
        mbarrier.arrive(buffers.turns.index(1 - WHICH), count=1)
        scores = warpgroup_mma_wait(1, deps=[pending])
        mbarrier.arrive(buffers.keys_free.index(now % STAGES), count=1)
        found, shrink, row_max, row_sum = _weights(
            scores, row_max, row_sum, position, _key_of(step, tile, BLOCK_N), tile, scale, softcap, window,
            MASKED, LAYER, QK,
        )  # fmt: skip
        narrow = found.to(dtype)
        acc, narrow = warpgroup_mma_wait(0, deps=[adding, narrow])
        mbarrier.arrive(buffers.values_free.index((now - 1) % STAGES), count=1)
        weights = gl.convert_layout(narrow, WEIGHTS)
    return weights, shrink, row_max, row_sum, acc


@gluon.jit
def _clean(values, used, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """Set the rows of a stage from `used` on to zero."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // values.shape[1], values.shape[1] // 8], [4, 1], [1, 0])
    STEP: gl.constexpr = 16
    for i in gl.static_range(values.shape[0] // STEP):
        part = values.slice(i * STEP, STEP)
        row = i * STEP + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
        kept = gl.where((row < used)[:, None], part.load(LAYOUT), gl.full(part.shape, 0.0, dtype, LAYOUT))
        part.store(kept)
    fence_async_shared()


@gluon.jit
def _rows(head_of_group, tile, M: gl.constexpr, WHICH: gl.constexpr, LAYER: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the query and the head of the group of each row, and whether the row is used."""
    HALF_Q: gl.constexpr = M // LAYER.HEADS
    row = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    index = tile.first_query + WHICH * HALF_Q + row // LAYER.HEADS
    head = head_of_group + row % LAYER.HEADS
    return index, head, (row < HALF_Q * LAYER.HEADS) & (index < tile.length) & (head < LAYER.GROUP)


@gluon.jit
def _store(  # type: ignore[no-untyped-def]
    out, found, first_head, head_of_group, tile, stride_token, stride_head,
    WHICH: gl.constexpr, LAYER: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store the results of a consumer's rows."""
    index, head, is_row = _rows(head_of_group, tile, found.shape[0], WHICH, LAYER, LAYOUT)
    d = gl.arange(0, found.shape[1], gl.SliceLayout(0, LAYOUT))
    place = (tile.start + index).to(gl.int64) * stride_token + (first_head + head) * stride_head
    gl.store(out + (place[:, None] + d[None, :]), found.to(out.dtype.element_ty), mask=is_row[:, None])


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    out, query, sinks, chunks, buffers, num_rounds, scale, softcap,
    stride_o_token, stride_o_head, stride_q_token, stride_q_head, queries,
    WHICH: gl.constexpr, CACHE: gl.constexpr, LAYER: gl.constexpr, SMALL_Q: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the rows of consumer WHICH of all tiles."""
    M: gl.constexpr = queries.shape[0]
    D: gl.constexpr = queries.shape[1]
    QK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    PV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = queries.dtype
    window = chunks.window
    zero = gl.zeros([M, BLOCK_N], gl.float32, QK)
    count = 0  # steps of all tiles so far
    cleaned = 0  # steps whose values were cleaned
    for number in range(num_rounds):
        tile = _tile_of(number, chunks, CACHE, LAYER, SMALL_Q, BLOCK_N)
        first_head = tile.head_program // LAYER.HEAD_TILES * LAYER.GROUP
        head_of_group = tile.head_program % LAYER.HEAD_TILES * LAYER.HEADS
        if tile.steps > 0:
            index, head, is_row = _rows(head_of_group, tile, M, WHICH, LAYER, BLOCKED)
            d = gl.arange(0, D, gl.SliceLayout(0, BLOCKED))
            place = (tile.start + index).to(gl.int64) * stride_q_token + (first_head + head) * stride_q_head
            found = gl.load(query + (place[:, None] + d[None, :]), mask=is_row[:, None], other=0.0)
            queries.store(found)
            fence_async_shared()

            index, head, is_row = _rows(head_of_group, tile, M, WHICH, LAYER, QK)
            position = tile.context_len - tile.length + index
            row_max = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, QK))
            row_sum = gl.full([M], 0.0, gl.float32, gl.SliceLayout(1, QK))
            if LAYER.HAS_SINKS:
                sink = gl.load(sinks + first_head + head, mask=is_row, other=0.0)
                row_max = sink.to(gl.float32) * 1.4426950408889634
                row_sum = gl.full([M], 1.0, gl.float32, gl.SliceLayout(1, QK))
            acc = gl.zeros([M, D], gl.float32, PV)

            mbarrier.wait(buffers.turns.index(WHICH), (count & 1) ^ (1 - WHICH))
            pending = _scores(queries, buffers, count, zero, STAGES)
            mbarrier.arrive(buffers.turns.index(1 - WHICH), count=1)
            scores = warpgroup_mma_wait(0, deps=[pending])
            mbarrier.arrive(buffers.keys_free.index(count % STAGES), count=1)
            wide, shrink, row_max, row_sum = _weights(
                scores, row_max, row_sum, position, _key_of(0, tile, BLOCK_N), tile, scale, softcap, window,
                True, LAYER, QK,
            )  # fmt: skip
            weights = gl.convert_layout(wide.to(dtype), gl.DotOperandLayout(0, PV, 2))
            middle = gl.maximum(tile.unmasked, 1)
            weights, shrink, row_max, row_sum, acc = _steps(
                weights, shrink, row_max, row_sum, acc, 1, middle, count, queries, buffers, position, tile, scale,
                softcap, window, zero, False, WHICH, LAYER, QK, PV, BLOCK_N, STAGES,
            )  # fmt: skip
            weights, shrink, row_max, row_sum, acc = _steps(
                weights, shrink, row_max, row_sum, acc, middle, tile.steps, count, queries, buffers, position, tile,
                scale, softcap, window, zero, True, WHICH, LAYER, QK, PV, BLOCK_N, STAGES,
            )  # fmt: skip

            count += tile.steps
            last = (count - 1) % STAGES
            used = tile.context_len - _key_of(tile.steps - 1, tile, BLOCK_N)
            if used < BLOCK_N:
                if WHICH == 0:
                    mbarrier.wait(buffers.values_filled.index(last), (count - 1) // STAGES & 1)
                    _clean(buffers.value_stages.index(last), used, dtype)
                    mbarrier.arrive(buffers.cleaned.index(cleaned & 1), count=1)
                else:
                    mbarrier.wait(buffers.cleaned.index(cleaned & 1), cleaned // 2 & 1)
                cleaned += 1
            adding = _add_values(acc, weights, shrink, buffers, count - 1, PV, STAGES)
            acc = warpgroup_mma_wait(0, deps=[adding])
            mbarrier.arrive(buffers.values_free.index(last), count=1)
            norm = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
            acc = acc * gl.convert_layout(norm, gl.SliceLayout(1, PV))[:, None]

            _store(out, acc, first_head, head_of_group, tile, stride_o_token, stride_o_head, WHICH, LAYER, PV)
        elif tile.length > 0:  # the rows of a sequence without context
            zeros = gl.zeros([M, D], gl.float32, PV)
            _store(out, zeros, first_head, head_of_group, tile, stride_o_token, stride_o_head, WHICH, LAYER, PV)


# --- kernel and launch ------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=["num_seqs", "num_tiles", "num_rounds", "window", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_starts", "sinks"],
)
def hopper_attention_kernel(  # type: ignore[no-untyped-def]
    out, query, key_rows, value_rows, block_tables, context_lens, query_starts, sinks,
    num_seqs, num_tiles, num_rounds, window, scale, softcap,
    stride_table, stride_o_token, stride_o_head, stride_q_token, stride_q_head,
    CACHE: gl.constexpr, LAYER: gl.constexpr, SMALL_Q: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the queries of sequences with more than SMALL_Q of them. Grid: (programs,), of 4 warps each at first.

    In each of num_rounds, a program computes one tile for one KV head and tile of its group; there are num_tiles of
    queries. key_rows and value_rows are the pools as matrices, whose rows are keys and values.
    """
    D: gl.constexpr = LAYER.HEAD_DIM
    dtype: gl.constexpr = query.dtype.element_ty
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [2, 64, D], SWIZZLED)
    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SWIZZLED)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SWIZZLED)
    keys_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    values_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    cleaned = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(keys_filled.index(i), count=1)
        mbarrier.init(values_filled.index(i), count=1)
        mbarrier.init(keys_free.index(i), count=2)
        mbarrier.init(values_free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
        mbarrier.init(cleaned.index(i), count=1)
    chunks = Chunks(block_tables, context_lens, query_starts, stride_table, num_seqs, num_tiles, window)
    buffers = Buffers(keys, values, keys_filled, values_filled, keys_free, values_free, turns, cleaned)
    gl.warp_specialize(
        [
            (_consume, (
                out, query, sinks, chunks, buffers, num_rounds, scale, softcap,
                stride_o_token, stride_o_head, stride_q_token, stride_q_head,
                queries.index(0), 0, CACHE, LAYER, SMALL_Q, BLOCK_N, STAGES,
            )),
            (_consume, (
                out, query, sinks, chunks, buffers, num_rounds, scale, softcap,
                stride_o_token, stride_o_head, stride_q_token, stride_q_head,
                queries.index(1), 1, CACHE, LAYER, SMALL_Q, BLOCK_N, STAGES,
            )),
            (_produce, (key_rows, value_rows, chunks, buffers, num_rounds, CACHE, LAYER, SMALL_Q, BLOCK_N, STAGES)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of their threads
    )  # fmt: skip


def plan(key: LayerKey, layer: Layer, paging: Paging, tile: Tile, small: Tile) -> AttentionPlan:
    """Return the plan of the chunks of a step that do not fit a small tile, with the keys per step of `tile`.

    A sequence that is alone in its step is computed here even if it fits.
    """
    queries = ROWS // layer.HEADS * 2
    num_tiles, head_programs = key.num_tokens // queries + paging.num_seqs, key.num_kv_heads * layer.HEAD_TILES
    programs = min(num_tiles * head_programs, key.device.multiprocessors)
    named = dict(
        **key.step_arguments(paging), LAYER=layer, SMALL_Q=small.block_m // layer.HEADS if paging.num_seqs > 1 else 0,
        BLOCK_N=tile.block_n, STAGES=tile.num_stages, num_tiles=num_tiles,
        num_rounds=triton.cdiv(num_tiles * head_programs, programs), num_warps=tile.num_warps,
    )  # fmt: skip
    template = LaunchTemplate.of(hopper_attention_kernel, (programs,), named)
    return AttentionPlan([template], describe=partial(describe, rows=min(key.cache.BLOCK_SIZE, tile.block_n)))


_described: WeakKeyDictionary[LayerCache, dict[int, dict[str, TensorDescriptor]]] = WeakKeyDictionary()


def describe(cache: LayerCache, rows: int) -> dict[str, TensorDescriptor]:
    """Return the pools of a layer as arguments of the kernel, which copies `rows` rows at a time."""
    by_rows = _described.setdefault(cache, {})
    if rows not in by_rows:
        by_rows[rows] = {"key_rows": _matrix(cache.keys, rows), "value_rows": _matrix(cache.values, rows)}
    return by_rows[rows]


def _matrix(pool: Tensor, rows: int) -> TensorDescriptor:
    block, head, slot = pool.stride()[:3]
    num_blocks, num_heads, block_size, head_dim = pool.shape
    height = ((num_blocks - 1) * block + (num_heads - 1) * head) // slot + block_size
    matrix = pool.as_strided((height, head_dim), (slot, 1))
    return TensorDescriptor.from_tensor(matrix, [rows, head_dim], gl.NVMMASharedLayout(128, 16, 2))
