"""Blocks in four bits on a GPU: the kernel that packs full blocks, and what attention loads of them.

The format is defined in `packed_blocks`. The constants CACHE and LAYER are a `CacheLayout` and a `Layer`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from paged_kernels import packed_blocks
from paged_kernels.attention_plan import LaunchTemplate, LayerKey, padded_head_dim
from paged_kernels.paging import Paging

EXPONENT_BIAS = tl.constexpr(packed_blocks.EXPONENT_BIAS)
NAN_SCALE = tl.constexpr(packed_blocks.NAN_SCALE)
CHANNELS = tl.constexpr(packed_blocks.GROUP)  # channels of a value that share a scale
PART = tl.constexpr(packed_blocks.GROUP // 2)  # channels that are in one half of a value, and share a scale


class Packed(NamedTuple):
    """The packed keys and values of one KV head."""

    key_codes: Any
    key_scales: Any
    key_zeros: Any
    value_codes: Any
    value_scales: Any


@triton.jit
def packed_of_head(packed, kv_head, CACHE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the packed keys and values of a KV head."""
    return Packed(
        packed.key_codes + kv_head * (CACHE.BLOCK_SIZE * HEAD_DIM // 2),
        packed.key_scales + kv_head * HEAD_DIM,
        packed.key_zeros + kv_head * HEAD_DIM,
        packed.value_codes + kv_head * (CACHE.BLOCK_SIZE * VALUE_DIM // 2),
        packed.value_scales + kv_head * (CACHE.BLOCK_SIZE * VALUE_DIM // CHANNELS),
    )


@triton.jit
def _scales_of_bytes(codes):  # type: ignore[no-untyped-def]
    """Return scales in fp32."""
    scales = ((codes.to(tl.int32) + EXPONENT_BIAS) << 20).to(tl.float32, bitcast=True)
    return tl.where(codes == NAN_SCALE, float("nan"), scales)


# --- loads of attention -----------------------------------------------------------------------------------------------


@triton.jit
def _widen(codes, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert codes to `dtype`.

    In 16 bits, a code is written into the last bits of 128 (bf16) or 1024 (fp16), which is subtracted. The compiler
    does this for two numbers at a time, which is faster than the conversion of integers.
    """
    if dtype == tl.float32:
        wide = codes.to(dtype)
    else:
        BITS: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        wide = (codes.to(tl.int16) | BITS).to(dtype, bitcast=True) - (128.0 if dtype == tl.bfloat16 else 1024.0)
    return wide


@triton.jit
def load_packed_keys(  # type: ignore[no-untyped-def]
    packed, block, offset, dtype: tl.constexpr, CACHE: tl.constexpr, LAYER: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Load BLOCK_N keys of a block from `offset` on, as two halves [BLOCK_D, BLOCK_N] of their elements."""
    HALF: tl.constexpr = LAYER.HEAD_DIM // 2
    d = tl.arange(0, LAYER.BLOCK_D)
    n = offset + tl.arange(0, BLOCK_N)
    row = packed.key_codes + block * CACHE.PACKED.KEY_CODES + n * HALF
    codes = tl.load(row[None, :] + d[:, None], mask=d[:, None] < HALF, other=0)
    scales = packed.key_scales + block * CACHE.PACKED.KEY_SCALES + d
    zeros = packed.key_zeros + block * CACHE.PACKED.KEY_ZEROS + d
    low_scale = _scales_of_bytes(tl.load(scales, mask=d < HALF, other=0))[:, None]
    high_scale = _scales_of_bytes(tl.load(scales + HALF, mask=d < HALF, other=0))[:, None]
    low_zero = tl.load(zeros, mask=d < HALF, other=0.0).to(tl.float32)[:, None]
    high_zero = tl.load(zeros + HALF, mask=d < HALF, other=0.0).to(tl.float32)[:, None]
    low = _widen(codes & 15, dtype) * low_scale.to(dtype) + low_zero.to(dtype)
    high = _widen(codes >> 4, dtype) * high_scale.to(dtype) + high_zero.to(dtype)
    return low, high


@triton.jit
def load_packed_values(  # type: ignore[no-untyped-def]
    packed, block, offset, dtype: tl.constexpr, CACHE: tl.constexpr, LAYER: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Load BLOCK_N values of a block from `offset` on: [BLOCK_N, BLOCK_V], multiplied by 0.5.

    The first half of the columns has the first half of the elements. The product of a code and a scale has up to 8
    bits, so that fp16 and bf16 hold it exactly. 0.5 keeps the largest one within the range of fp16.
    """
    HALF: tl.constexpr = LAYER.VALUE_DIM // 2
    BLOCK_HALF: tl.constexpr = LAYER.BLOCK_V // 2
    e = tl.arange(0, BLOCK_HALF)
    n = offset + tl.arange(0, BLOCK_N)
    row = packed.value_codes + block * CACHE.PACKED.VALUE_CODES + n * HALF
    codes = tl.load(row[:, None] + e[None, :], mask=e[None, :] < HALF, other=0)
    part = tl.arange(0, LAYER.BLOCK_V // PART)
    first = part % (BLOCK_HALF // PART) * PART  # first channel of the part in its half
    group = (part // (BLOCK_HALF // PART) * HALF + first) // CHANNELS
    row = packed.value_scales + block * CACHE.PACKED.VALUE_SCALES + n * (LAYER.VALUE_DIM // CHANNELS)
    scales = _scales_of_bytes(tl.load(row[:, None] + group[None, :], mask=first[None, :] < HALF, other=0))
    both = tl.join(_widen(codes & 15, dtype), _widen(codes >> 4, dtype)) - 7.5
    parts = tl.reshape(tl.permute(both, (0, 2, 1)), (BLOCK_N, LAYER.BLOCK_V // PART, PART))
    return tl.reshape(parts * (scales * 0.5).to(dtype)[:, :, None], (BLOCK_N, LAYER.BLOCK_V))


# --- the kernel that packs --------------------------------------------------------------------------------------------


@triton.jit
def _bytes_of_scales(scales):  # type: ignore[no-untyped-def]
    """Return the bytes of scales, bit for bit those of `packed_blocks`."""
    bits = scales.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(tl.maximum((((bits >> 19) + 1) >> 1) - EXPONENT_BIAS, 0), NAN_SCALE)


@triton.jit
def _nearest(x):  # type: ignore[no-untyped-def]
    """Return the nearest codes, ties to even; 0 for NaN. A sum with 1.5 * 2**23 has no bits after the point."""
    x = tl.where(x > 0.0, tl.where(x < 15.0, x, 15.0), 0.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.uint8)


@triton.jit
def _pack_channels(  # type: ignore[no-untyped-def]
    keys, key_scales, scales, zeros, d, is_channel, CACHE: tl.constexpr
):  # fmt: skip
    """Store the scales and zeros of channels d of a block's keys, and return their codes [BLOCK_SIZE, channels]."""
    n = tl.arange(0, CACHE.BLOCK_SIZE)[:, None]
    codes = tl.load(keys + n * CACHE.K_SLOT + d[None, :], mask=is_channel[None, :], other=0)
    x = codes.to(tl.float32) * tl.load(key_scales + n)
    has_nan = tl.max((x != x).to(tl.int32), 0) > 0
    low, high = tl.where(has_nan, float("nan"), tl.min(x, 0)), tl.max(x, 0)
    zero = low.to(tl.float16)
    scale = _bytes_of_scales(tl.div_rn(high - low, tl.full(low.shape, 15.0, tl.float32)))
    scale = tl.where(tl.abs(zero.to(tl.float32)) < float("inf"), scale, NAN_SCALE)
    tl.store(scales + d, scale.to(tl.uint8), mask=is_channel)
    tl.store(zeros + d, zero, mask=is_channel)
    divisor = tl.broadcast_to(_scales_of_bytes(scale)[None, :], x.shape)
    return _nearest(tl.div_rn(x - zero.to(tl.float32)[None, :], divisor))


@triton.jit
def _pack_parts(  # type: ignore[no-untyped-def]
    values, value_scales, scales, first, is_part, CACHE: tl.constexpr, VALUE_DIM: tl.constexpr
):  # fmt: skip
    """Store the scales of parts of a block's values, and return their codes [BLOCK_SIZE, parts, PART].

    first: first channels of the parts.
    """
    n = tl.arange(0, CACHE.BLOCK_SIZE)[:, None, None]
    group = first // CHANNELS
    row_scale = tl.load(value_scales + n)
    rows, is_part = values + n * CACHE.V_SLOT, is_part[None, :, None]
    e = (group * CHANNELS)[None, :, None] + tl.arange(0, CHANNELS)[None, None, :]
    x = tl.load(rows + e, mask=is_part, other=0).to(tl.float32) * row_scale
    top = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf")), 2)  # infinity replaces NaN
    scale = _bytes_of_scales(tl.div_rn(top, tl.full(top.shape, 7.5, tl.float32)))[:, :, None]
    place = scales + n * (VALUE_DIM // CHANNELS) + group[None, :, None]
    tl.store(place, scale.to(tl.uint8), mask=is_part)  # the two parts of a group store the same scale
    e = first[None, :, None] + tl.arange(0, PART)[None, None, :]
    x = tl.load(rows + e, mask=is_part, other=0).to(tl.float32) * row_scale
    return _nearest(tl.div_rn(x, tl.broadcast_to(_scales_of_bytes(scale), x.shape)) + 7.5)


@triton.jit(do_not_specialize_on_alignment=["new_slots", "new_packed_slots"])
def pack_blocks_kernel(  # type: ignore[no-untyped-def]
    key_cache, value_cache, key_scales, value_scales,
    packed_key_codes, packed_key_scales, packed_key_zeros, packed_value_codes, packed_value_scales,
    new_slots, new_packed_slots,
    CACHE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Pack one KV head of a block if a new token is the last one of the block. Grid: (num_tokens, num_kv_heads)."""
    slot = tl.load(new_slots + tl.program_id(0))
    if (slot < 0) | (slot % CACHE.BLOCK_SIZE != CACHE.BLOCK_SIZE - 1):
        return
    block = slot // CACHE.BLOCK_SIZE
    target = tl.load(new_packed_slots + tl.program_id(0)) // CACHE.BLOCK_SIZE
    kv_head = tl.program_id(1).to(tl.int64)
    packed = packed_of_head(
        Packed(packed_key_codes, packed_key_scales, packed_key_zeros, packed_value_codes, packed_value_scales),
        kv_head, CACHE, HEAD_DIM, VALUE_DIM,
    )  # fmt: skip
    n = tl.arange(0, CACHE.BLOCK_SIZE)
    scales_at = block * CACHE.S_BLOCK + kv_head * CACHE.S_HEAD

    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK_D)
    keys = key_cache + block * CACHE.K_BLOCK + kv_head * CACHE.K_HEAD
    scales = packed.key_scales + target * CACHE.PACKED.KEY_SCALES
    zeros = packed.key_zeros + target * CACHE.PACKED.KEY_ZEROS
    low = _pack_channels(keys, key_scales + scales_at, scales, zeros, d, d < HALF, CACHE)
    high = _pack_channels(keys, key_scales + scales_at, scales, zeros, HALF + d, d < HALF, CACHE)
    place = packed.key_codes + target * CACHE.PACKED.KEY_CODES + n[:, None] * HALF + d[None, :]
    tl.store(place, low | high << 4, mask=d[None, :] < HALF)

    VALUE_HALF: tl.constexpr = VALUE_DIM // 2
    first = tl.arange(0, PARTS) * PART
    values = value_cache + block * CACHE.V_BLOCK + kv_head * CACHE.V_HEAD
    scales = packed.value_scales + target * CACHE.PACKED.VALUE_SCALES
    is_part = first < VALUE_HALF
    low = _pack_parts(values, value_scales + scales_at, scales, first, is_part, CACHE, VALUE_DIM)
    high = _pack_parts(values, value_scales + scales_at, scales, VALUE_HALF + first, is_part, CACHE, VALUE_DIM)
    e = first[None, :, None] + tl.arange(0, PART)[None, None, :]
    place = packed.value_codes + target * CACHE.PACKED.VALUE_CODES + n[:, None, None] * VALUE_HALF + e
    tl.store(place, low | high << 4, mask=is_part[None, :, None])


def pack_template(key: LayerKey, paging: Paging) -> LaunchTemplate:
    """Return the launch that packs the blocks whose last tokens a step has written, for a layer with packed blocks."""
    assert paging.packed is not None
    half = padded_head_dim(key.value_dim // 2)
    named = dict(
        new_slots=paging.slots, new_packed_slots=paging.packed.slots, CACHE=key.cache,
        HEAD_DIM=key.head_dim, VALUE_DIM=key.value_dim, BLOCK_D=padded_head_dim(key.head_dim // 2),
        PARTS=half // PART.value, num_warps=4, enable_fp_fusion=False,  # blocks have the same bits everywhere
    )  # fmt: skip
    return LaunchTemplate.of(pack_blocks_kernel, (key.num_tokens, key.num_kv_heads), named)
