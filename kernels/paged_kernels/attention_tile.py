"""Device functions of the attention kernels: the loop of a tile over keys in pages, with a running softmax.

    tile rows (GQA packed):  row r -> query r // HEADS, head r % HEADS of this KV head's group

             begin          low                         high           end
    keys    ...|=============|###########################|==============|.....
      before the window   window edge   all rows see all keys   causal edge   newer than the tile's last query
      or in the prefix

The running softmax is that of Milakov and Gimelshein 2018 (arXiv:1805.02867) and FlashAttention (arXiv:2205.14135), the
block tables those of PagedAttention (arXiv:2309.06180).
"""

import triton
import triton.language as tl


@triton.jit
def find_sequence(query_starts, num_seqs, tile, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the last sequence whose first tile, query_starts[s] // BLOCK_Q + s, is not past `tile`."""
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
def _tanh(x):  # type: ignore[no-untyped-def]
    return 1 - 2 / (1 + tl.exp2(x * 2.8853900817779268))  # 2 * log2(e); saturates at +-1, never NaN


@triton.jit
def _widen(codes, FORMAT: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert codes to `dtype` exactly. The result for fp8 is 256 times too small.

    An e4m3 that is widened to 16 bits and shifted by 7 is a float16 with another exponent bias, once the copy of the
    sign in bit 14 is cleared. This holds for subnormal numbers too.
    """
    if FORMAT == "fp8":
        codes = ((codes.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True)
    return codes.to(dtype)


@triton.jit
def _load_blocks(table, start, begin, end, MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the blocks of positions start to start + BLOCK_N: one per position, or a scalar if a step is in one block.

    With MASKED, positions outside [begin, end) get block 0.
    """
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
def _load_step(  # type: ignore[no-untyped-def]
    start, block, begin, end, key_head, value_head, key_scale_head, value_scale_head,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_SLOT: tl.constexpr, STRIDE_S_BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load keys in two parts [BLOCK_D, BLOCK_N] and [BLOCK_R, BLOCK_N], values [BLOCK_N, BLOCK_V] and their scales for
    positions from start on.

    With BLOCK_R = 0 the second part is not used. With SHARED, the values are the first part of the keys.
    """
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    n = start + tl.arange(0, BLOCK_N)
    # Memory outside [begin, end) may hold another request's data, even NaN: it is not loaded at all.
    in_context = (n >= begin) & (n < end)
    block = block.to(tl.int64)
    slot = start % BLOCK_SIZE + tl.arange(0, BLOCK_N) if BLOCK_SIZE >= BLOCK_N else n % BLOCK_SIZE
    k_row = key_head + block * STRIDE_K_BLOCK + slot * STRIDE_K_SLOT
    v_row = value_head + block * STRIDE_V_BLOCK + slot * STRIDE_V_SLOT
    k_scale = 1.0
    v_scale = 1.0
    if MASKED:
        k_mask = (d[:, None] < HEAD_DIM) & in_context[None, :]
        k = tl.load(k_row[None, :] + d[:, None], mask=k_mask, other=0.0)
    elif BLOCK_D > HEAD_DIM:
        k = tl.load(k_row[None, :] + d[:, None], mask=d[:, None] < HEAD_DIM, other=0.0)
    else:
        k = tl.load(k_row[None, :] + d[:, None])
    if SHARED:
        v = tl.trans(k)
    elif MASKED:
        v_mask = (e[None, :] < VALUE_DIM) & in_context[:, None]
        v = tl.load(v_row[:, None] + e[None, :], mask=v_mask, other=0.0)
    elif BLOCK_V > VALUE_DIM:
        v = tl.load(v_row[:, None] + e[None, :], mask=e[None, :] < VALUE_DIM, other=0.0)
    else:
        v = tl.load(v_row[:, None] + e[None, :])
    k_rest = k
    if BLOCK_R > 0:
        r = BLOCK_D + tl.arange(0, BLOCK_R)
        r_mask = (r[:, None] < HEAD_DIM) & (in_context[None, :] if MASKED else True)
        k_rest = tl.load(k_row[None, :] + r[:, None], mask=r_mask, other=0.0)
    if FORMAT is not None:
        s_row = block * STRIDE_S_BLOCK + slot
        if MASKED:
            k_scale = tl.load(key_scale_head + s_row, mask=in_context, other=0.0)
            v_scale = tl.load(value_scale_head + s_row, mask=in_context, other=0.0)
        else:
            k_scale = tl.load(key_scale_head + s_row)
            v_scale = tl.load(value_scale_head + s_row)
    return k, k_rest, v, k_scale, v_scale


@triton.jit
def _softmax_step(  # type: ignore[no-untyped-def]
    acc, row_max, row_sum, unit, q, q_rest, start, block, begin, end, position, window, scale, softcap,
    key_head, value_head, key_scale_head, value_scale_head,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_SLOT: tl.constexpr, STRIDE_S_BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr, ROW_UNITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one step of the running softmax, over the BLOCK_N keys from position `start` on."""
    k, k_rest, v, k_scale, v_scale = _load_step(
        start, block, begin, end, key_head, value_head, key_scale_head, value_scale_head,
        STRIDE_K_BLOCK, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_SLOT, STRIDE_S_BLOCK, FORMAT,
        MASKED, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_R, BLOCK_V, SHARED, BLOCK_N,
    )  # fmt: skip
    CODE_UNIT: tl.constexpr = 256.0 if FORMAT == "fp8" else 1.0  # factor code / _widen(code)
    if FORMAT is not None:
        k = _widen(k, FORMAT, q.dtype)
        k_rest = _widen(k_rest, FORMAT, q.dtype)
        v = _widen(v, FORMAT, q.dtype)

    scores = tl.dot(q, k, input_precision=PRECISION)
    if BLOCK_R > 0:
        scores = tl.dot(q_rest, k_rest, scores, input_precision=PRECISION)
    scores = scores * scale
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
    # Rows that have seen no key yet: -inf - -inf would be NaN, but -inf - 0 gives the weight 0.
    base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(row_max - base)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    if FORMAT is not None:
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
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum, unit


@triton.jit
def attend_keys(  # type: ignore[no-untyped-def]
    q, q_rest, row_max, row_sum, position, first, begin, low, high, end, window, scale, softcap,
    table, kv_head, key_cache, value_cache, key_scales, value_scales,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr, FORMAT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    ONE_LOOP: tl.constexpr, ROW_UNITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the attention of rows [BLOCK_M] over keys [begin, end), and the log2 of the softmax's denominator.

    low and high are a whole number of steps from begin. Steps in [low, high) need no mask, and come first. With
    ONE_LOOP every step is masked: for few rows that costs less than a second loop with its own pipeline start. With
    ROW_UNITS, which needs ONE_LOOP, the result of a row depends only on the keys that it sees.
    """
    if ONE_LOOP:
        low = begin
        high = end
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    unit = 1e-37  # unit of acc; below the smallest scale times 2**-14
    if ROW_UNITS:
        unit = tl.full([BLOCK_M], 1e-37, dtype=tl.float32)
    key_head = key_cache + kv_head.to(tl.int64) * STRIDE_K_HEAD
    value_head = value_cache + kv_head.to(tl.int64) * STRIDE_V_HEAD
    key_scale_head = key_scales
    value_scale_head = value_scales
    if FORMAT is not None:
        key_scale_head += kv_head.to(tl.int64) * STRIDE_S_HEAD
        value_scale_head += kv_head.to(tl.int64) * STRIDE_S_HEAD
    # Blocks are loaded one step ahead: if keys depended on a load of the same step, the pipeline would be one shorter.
    block = _load_blocks(table, low, low, high, True, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        next_block = _load_blocks(table, start + BLOCK_N, low, high, True, BLOCK_SIZE, BLOCK_N)
        acc, row_max, row_sum, unit = _softmax_step(
            acc, row_max, row_sum, unit, q, q_rest, start, block, first, end, position, window, scale, softcap,
            key_head, value_head, key_scale_head, value_scale_head,
            STRIDE_K_BLOCK, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_SLOT, STRIDE_S_BLOCK, FORMAT,
            ONE_LOOP, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_R, BLOCK_V, SHARED,
            BLOCK_N, ROW_UNITS, PRECISION,
        )  # fmt: skip
        block = next_block
    if not ONE_LOOP:
        masked_before = low - begin
        for done in tl.range(0, masked_before + end - high, BLOCK_N, num_stages=STAGES):
            start = tl.where(done < masked_before, begin + done, high - masked_before + done)
            acc, row_max, row_sum, unit = _softmax_step(
                acc, row_max, row_sum, unit, q, q_rest, start,
                _load_blocks(table, start, first, end, True, BLOCK_SIZE, BLOCK_N),
                first, end, position, window, scale, softcap, key_head, value_head, key_scale_head, value_scale_head,
                STRIDE_K_BLOCK, STRIDE_K_SLOT, STRIDE_V_BLOCK, STRIDE_V_SLOT, STRIDE_S_BLOCK, FORMAT,
                True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_R, BLOCK_V, SHARED,
                BLOCK_N, ROW_UNITS, PRECISION,
            )  # fmt: skip

    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    norm = 1.0 / total
    if FORMAT is not None:
        norm = norm * unit * (256.0 if FORMAT == "fp8" else 1.0)
    # Rows without any key have row_max and logarithm -inf.
    return acc * norm[:, None], row_max + tl.log2(total)


@triton.jit
def key_range(  # type: ignore[no-untyped-def]
    first_position, last_position, context_len, prefix_len, window,
    HAS_WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (first visible key, start of the first loop step, end of the keys) of a tile with these query positions.

    A step starts at the first visible key, unless steps have to lie within one block.
    """
    end = tl.minimum(last_position + 1, context_len)
    first = tl.maximum(first_position - window + 1, 0) if HAS_WINDOW else prefix_len
    begin = first // BLOCK_N * BLOCK_N if BLOCK_SIZE >= BLOCK_N else first
    return first, begin, end


@triton.jit
def split_len_of(begin, end, num_splits, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the length of every split of [begin, end) but the last: whole steps, at least MIN_SPLIT keys."""
    share = tl.maximum((end - begin + num_splits - 1) // num_splits, MIN_SPLIT)
    return (share + BLOCK_N - 1) // BLOCK_N * BLOCK_N


@triton.jit
def unmasked_range(  # type: ignore[no-untyped-def]
    first_position, last_position, begin, split_begin, split_end, window,
    HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the range of a split's keys in whole steps in which every row sees every key."""
    last_step = split_begin + tl.maximum(split_end - split_begin, 0) // BLOCK_N * BLOCK_N
    high = begin + tl.maximum(first_position + 1 - begin, 0) // BLOCK_N * BLOCK_N
    high = tl.minimum(tl.maximum(high, split_begin), last_step)
    low = begin
    if HAS_WINDOW:
        low += (tl.maximum(last_position - window + 1 - begin, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return tl.minimum(tl.maximum(low, split_begin), high), high
