"""Paged attention for any mixture of prefill chunks and decode rows, in one launch.

A program owns a tile of query rows of one sequence and one KV head, walks that sequence's block table, and
keeps a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; FlashAttention, arXiv:2205.14135) over
keys and values in pages (PagedAttention, arXiv:2309.06180). The grid depends on the number of rows and
sequences only, never on their lengths.

    tile rows (GQA packed):  row r -> query r // HEADS, head r % HEADS of this KV head's group

                 n_begin                    n_full           n_end
    keys    |......|=========================|################|.....
             older   every row sees all keys    causal edge     newer than the tile's last query
             than the window
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check_paged_attention
from kernels.layer_cache import LayerCache, as_bytes
from kernels.paging import Paging

LOG2E = 1.4426950408889634
HIP = torch.version.hip is not None


@dataclass(frozen=True)
class LaunchShape:
    """How the work is cut up: a function of static facts, so that nothing is tuned while serving."""

    HEADS: int  # query heads of a group in one tile
    BLOCK_M: int  # rows of a tile: queries times HEADS
    BLOCK_N: int  # keys per step of the loop
    ONE_TILE: bool  # a tile holds every query of a sequence: no search for the sequence
    num_warps: int
    num_stages: int


def launch_shape(
    *, head_dim: int, itemsize: int, group: int, max_query_len: int, quantized: bool, hip: bool
) -> LaunchShape:
    """Decode-sized tiles where they hold every query of a sequence, prefill-sized ones otherwise.

    The sizes compile without spilling on every chip of `kernels.aot`; none was tuned on hardware yet. Codes wait in
    registers on their way to a dot: a step takes fewer of them, or a loop fewer stages, than of keys as they are.
    """
    if itemsize == 4:  # no tensor cores: a program multiplies in its registers, so the tile stays small
        heads, block_n, warps = min(group, 16), 32 if head_dim <= 64 else 16, 4 if head_dim <= 128 else 8
        stages = 1 if quantized else 2
        return LaunchShape(heads, 16, block_n, max_query_len * heads <= 16, num_warps=warps, num_stages=stages)
    heads = min(group, 64)
    rows = max(16, triton.next_power_of_2(heads))  # a tensor core wants 16
    one_tile = max_query_len * heads <= rows
    block_n = 32 if quantized or head_dim > 128 else 64
    if one_tile and rows <= 32:
        return LaunchShape(heads, rows, block_n, True, num_warps=4, num_stages=2 if hip else 3)
    if hip:
        return LaunchShape(heads, 64, 32, one_tile, num_warps=4, num_stages=1)
    if head_dim > 128:
        return LaunchShape(heads, 64, block_n, one_tile, num_warps=8, num_stages=1 if quantized else 2)
    return LaunchShape(heads, 64, block_n, one_tile, num_warps=4 if head_dim <= 64 else 8, num_stages=2)


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
def _attend(
    acc, row_max, row_sum, unit, q, key_head, value_head, key_scale_head, value_scale_head, table, n,
    n_first, n_end, position, window, scale, softcap,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, FORMAT: tl.constexpr, CODE_UNIT: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax, with the keys at positions n [BLOCK_N]."""
    d = tl.arange(0, BLOCK_D)
    slot = n % BLOCK_SIZE
    # What lies outside [n_first, n_end) may be another request's, even NaN: it is not loaded at all.
    in_context = (n >= n_first) & (n < n_end)
    if MASKED:
        block = tl.load(table + n // BLOCK_SIZE, mask=in_context, other=0).to(tl.int64)
    else:
        block = tl.load(table + n // BLOCK_SIZE).to(tl.int64)
    k_row = key_head + block * STRIDE_K_BLOCK + slot * STRIDE_K_SLOT
    v_row = value_head + block * STRIDE_V_BLOCK + slot * STRIDE_V_SLOT
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
        k = _widen(k, FORMAT, q.dtype)
        v = _widen(v, FORMAT, q.dtype)
        s_row = block * STRIDE_S_BLOCK + slot
        if MASKED:
            k_scale = tl.load(key_scale_head + s_row, mask=in_context, other=0.0)
            v_scale = tl.load(value_scale_head + s_row, mask=in_context, other=0.0)
        else:
            k_scale = tl.load(key_scale_head + s_row)
            v_scale = tl.load(value_scale_head + s_row)

    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if FORMAT is not None:
        scores = scores * (k_scale * CODE_UNIT)[None, :]
    if HAS_SOFTCAP:
        scores = softcap * _tanh(scores)
    if MASKED:
        visible = in_context[None, :] & (n[None, :] <= position[:, None])
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


@triton.jit(
    # These change from step to step or layer to layer: specialising on them would compile while serving.
    do_not_specialize=["num_seqs", "window", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_starts", "sinks"],
)
def paged_attention_kernel(
    out, query, key_cache, value_cache, key_scales, value_scales,
    block_tables, context_lens, query_starts, sinks,
    num_seqs, window, scale, softcap, stride_table,
    stride_o_token, stride_o_head, stride_q_token, stride_q_head,
    # The cache's strides never change, and their exact divisors (72 = 8 * 9) let loads be vectors.
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (q tiles, num_kv_heads * tiles of a group's heads). Scores are times log2(e): exp is exp2. FORMAT as in
    `layer_cache`; scales are folded into the scores and the weights, so that no tile is dequantized."""
    tile = tl.program_id(0)
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    first_head = tl.program_id(1) % HEAD_TILES * HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    if ONE_TILE:
        seq = tile
        query_start = tl.load(query_starts + seq)
        q_first = 0
    else:
        seq = _find_sequence(query_starts, num_seqs, tile, BLOCK_Q)
        query_start = tl.load(query_starts + seq)
        q_first = (tile - (query_start // BLOCK_Q + seq)) * BLOCK_Q
    query_len = tl.load(query_starts + seq + 1) - query_start
    if q_first >= query_len:
        return
    context_len = tl.load(context_lens + seq)

    row = tl.arange(0, BLOCK_M)
    q_index = q_first + row // HEADS
    q_token = (query_start + q_index).to(tl.int64)
    head_of_group = first_head + row % HEADS
    head = kv_head * GROUP + head_of_group
    d = tl.arange(0, BLOCK_D)
    is_query = (row < BLOCK_Q * HEADS) & (q_index < query_len) & (head_of_group < GROUP)
    q_mask = is_query[:, None] & (d[None, :] < HEAD_DIM)
    q_offset = q_token * stride_q_token + head * stride_q_head
    q = tl.load(query + q_offset[:, None] + d[None, :], mask=q_mask, other=0.0)

    first_position = context_len - query_len + q_first
    position = context_len - query_len + q_index
    n_end = tl.minimum(first_position + BLOCK_Q, context_len)
    if HAS_WINDOW:
        n_first = tl.maximum(first_position - window + 1, 0)
        n_begin = n_first // BLOCK_N * BLOCK_N
        n_full = n_begin  # every tile takes the masked loop
    else:
        n_first = 0
        n_begin = 0
        n_full = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if HAS_SINKS:  # a sink is one more key with this logit and no value
        row_max = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * 1.4426950408889634
        row_sum = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    table = block_tables + stride_table.to(tl.int64) * seq
    key_head = key_cache + kv_head.to(tl.int64) * STRIDE_K_HEAD
    value_head = value_cache + kv_head.to(tl.int64) * STRIDE_V_HEAD
    unit = 1e-37  # of acc; below the smallest scale times 2**-14
    CODE_UNIT: tl.constexpr = 256.0 if FORMAT == "fp8" else 1.0  # a code over what _widen makes of it
    key_scale_head = key_scales
    value_scale_head = value_scales
    if FORMAT is not None:
        key_scale_head += kv_head.to(tl.int64) * STRIDE_S_HEAD
        value_scale_head += kv_head.to(tl.int64) * STRIDE_S_HEAD
    if not HAS_WINDOW:
        for start in range(n_begin, n_full, BLOCK_N):
            acc, row_max, row_sum, unit = _attend(
                acc, row_max, row_sum, unit, q, key_head, value_head, key_scale_head, value_scale_head,
                table, start + tl.arange(0, BLOCK_N), n_first, n_end, position, window, scale, softcap,
                STRIDE_K_BLOCK, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_SLOT, STRIDE_S_BLOCK, FORMAT, CODE_UNIT,
                False, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE, BLOCK_D, PRECISION,
            )  # fmt: skip
    for start in range(n_full, n_end, BLOCK_N):
        acc, row_max, row_sum, unit = _attend(
            acc, row_max, row_sum, unit, q, key_head, value_head, key_scale_head, value_scale_head,
            table, start + tl.arange(0, BLOCK_N), n_first, n_end, position, window, scale, softcap,
            STRIDE_K_BLOCK, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_SLOT, STRIDE_S_BLOCK, FORMAT, CODE_UNIT,
            True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE, BLOCK_D, PRECISION,
        )  # fmt: skip

    norm = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    if FORMAT is not None:
        norm = norm * unit * CODE_UNIT
    acc = acc * norm[:, None]
    o_offset = q_token * stride_o_token + head * stride_o_head
    tl.store(out + o_offset[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=q_mask)


def plan_launch(
    out: Tensor, query: Tensor, cache: LayerCache, paging: Paging, *,
    scale: float, sliding_window: int | None, softcap: float | None, sinks: Tensor | None, hip: bool,
) -> tuple[tuple[int, int], dict[str, Any]]:  # fmt: skip
    """The grid, and the kernel's arguments and options by name; to launch, and to compile ahead of time."""
    num_tokens, num_heads, head_dim = query.shape
    keys, values = cache.keys, cache.values
    num_kv_heads, block_size = keys.shape[1:3]
    group = num_heads // num_kv_heads
    shape = launch_shape(
        head_dim=head_dim,
        itemsize=query.element_size(),
        group=group,
        max_query_len=paging.max_query_len,
        quantized=cache.format is not None,
        hip=hip,
    )
    block_q = shape.BLOCK_M // shape.HEADS
    tiles = paging.num_seqs if shape.ONE_TILE else num_tokens // block_q + paging.num_seqs
    arguments = dict(
        out=out, query=query, key_cache=as_bytes(keys), value_cache=as_bytes(values),
        key_scales=cache.key_scales, value_scales=cache.value_scales, block_tables=paging.block_tables,
        context_lens=paging.context_lens, query_starts=paging.query_starts, sinks=sinks,
        num_seqs=paging.num_seqs, window=sliding_window or 0, stride_table=paging.block_tables.stride(0),
        scale=scale / softcap if softcap else scale * LOG2E, softcap=(softcap or 0.0) * LOG2E,
        stride_o_token=out.stride(0), stride_o_head=out.stride(1),
        stride_q_token=query.stride(0), stride_q_head=query.stride(1),
        STRIDE_K_BLOCK=keys.stride(0), STRIDE_K_HEAD=keys.stride(1), STRIDE_K_SLOT=keys.stride(2),
        STRIDE_V_BLOCK=values.stride(0), STRIDE_V_HEAD=values.stride(1), STRIDE_V_SLOT=values.stride(2),
        STRIDE_S_BLOCK=cache.scale_strides[0], STRIDE_S_HEAD=cache.scale_strides[1], FORMAT=cache.format,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        HAS_WINDOW=sliding_window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # tf32 drops 13 bits of fp32
        **vars(shape),
    )  # fmt: skip
    return (tiles, num_kv_heads * triton.cdiv(group, shape.HEADS)), arguments


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
    grid, arguments = plan_launch(
        out, query, cache, paging,
        scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks, hip=HIP,
    )  # fmt: skip
    paged_attention_kernel[grid](**arguments)
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
