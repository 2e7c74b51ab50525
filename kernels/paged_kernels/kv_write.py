"""The write of a step's new keys and values into their slots of the block pool."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.arguments import check_kv_write
from paged_kernels.launch import Device, Launch, device_of
from paged_kernels.launch_table import power_of_two, row_tile
from paged_kernels.layer_cache import MAX_CODE, MIN_ROW_MAX, LayerCache, as_bytes, quantize


@triton.jit
def quantize_rows(x, FORMAT: tl.constexpr, MAX_CODE: tl.constexpr, MIN_ROW_MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return codes and scales of the rows x, bit for bit those of `paged_kernels.layer_cache.quantize`."""
    x = x.to(tl.float32)
    magnitude = tl.abs(x)
    top = tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 1)  # infinity replaces NaN
    scale = tl.where(top < float("inf"), tl.div_rn(tl.maximum(top, MIN_ROW_MAX), MAX_CODE), float("nan"))
    y = tl.where(top[:, None] < float("inf"), tl.div_rn(x, scale[:, None]), 0.0)
    if FORMAT == "int8":  # rounds to an integer by adding 1.5 * 2**23
        return ((y + 12582912.0) - 12582912.0).to(tl.int8), scale
    # Round to e4m3 with integer arithmetic: at bit 20, and with an exponent bias of 7 in place of 127. Values below
    # 2**-6 are subnormal, in steps of 2**-9: adding 2**14 rounds them, and leaves them in the lowest bits.
    bits = tl.abs(y).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(tl.abs(y) < 0.015625, small, normal)
    return tl.where(y.to(tl.int32, bitcast=True) < 0, code - 128, code).to(tl.int8), scale


@triton.jit
def store_rows(  # type: ignore[no-untyped-def]
    x, pool, scales, place, scale_place, mask, is_row,
    FORMAT: tl.constexpr, MAX_CODE: tl.constexpr, MIN_ROW_MAX: tl.constexpr,
):  # fmt: skip
    """Store rows x [rows, columns] at offset `place` of a pool.

    In a quantized pool, x is quantized and its scales are stored at `scale_place` [rows, 1]. Masked elements of x must
    be 0.
    """
    if FORMAT is not None:
        x, scale = quantize_rows(x, FORMAT, MAX_CODE, MIN_ROW_MAX)
        tl.store(scales + scale_place, scale[:, None], mask=is_row)
    tl.store(pool + place, x, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def kv_write_kernel(  # type: ignore[no-untyped-def]
    key, value, key_cache, value_cache, key_scales, value_scales, slots,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr,
    FORMAT: tl.constexpr, MAX_CODE: tl.constexpr, MIN_ROW_MAX: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write a tile of one token's heads. Grid: (num_tokens, tiles of heads). FORMAT as in `layer_cache`.

    value is None if the values are part of the keys.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    is_head = head < NUM_KV_HEADS
    mask = is_head & (d < HEAD_DIM)
    k = tl.load(key + token * stride_key_token + head * stride_key_head + d, mask=mask, other=0.0)
    k_place = block * STRIDE_K_BLOCK + head * STRIDE_K_HEAD + offset * STRIDE_K_SLOT + d
    s_place = block * STRIDE_S_BLOCK + head * STRIDE_S_HEAD + offset
    store_rows(k, key_cache, key_scales, k_place, s_place, mask, is_head, FORMAT, MAX_CODE, MIN_ROW_MAX)
    if value is not None:
        e = tl.arange(0, BLOCK_V)[None, :]
        mask = is_head & (e < VALUE_DIM)
        v = tl.load(value + token * stride_value_token + head * stride_value_head + e, mask=mask, other=0.0)
        v_place = block * STRIDE_V_BLOCK + head * STRIDE_V_HEAD + offset * STRIDE_V_SLOT + e
        store_rows(v, value_cache, value_scales, v_place, s_place, mask, is_head, FORMAT, MAX_CODE, MIN_ROW_MAX)


def cache_arguments(cache: LayerCache) -> dict[str, Any]:
    """Return the arguments that describe a cache to the kernels that write into it."""
    keys, values = cache.keys, cache.values
    return dict(
        key_cache=as_bytes(keys), value_cache=as_bytes(values),
        key_scales=cache.key_scales, value_scales=cache.value_scales,
        STRIDE_K_BLOCK=keys.stride(0), STRIDE_K_HEAD=keys.stride(1), STRIDE_K_SLOT=keys.stride(2),
        STRIDE_V_BLOCK=values.stride(0), STRIDE_V_HEAD=values.stride(1), STRIDE_V_SLOT=values.stride(2),
        STRIDE_S_BLOCK=cache.scale_strides[0], STRIDE_S_HEAD=cache.scale_strides[1],
        FORMAT=cache.format, MAX_CODE=MAX_CODE.get(keys.dtype), MIN_ROW_MAX=MIN_ROW_MAX, BLOCK_SIZE=keys.shape[2],
    )  # fmt: skip


def head_tile(device: Device, kind: str, *, num_heads: int, block_d: int, num_tokens: int) -> tuple[int, int]:
    """Return how many heads of one token a program processes, and its number of warps.

    block_d: elements of a padded head.
    """
    padded = power_of_two(num_heads)
    tile = row_tile(device.chip, kind, width=padded * block_d, rows=num_tokens)
    return min(padded, max(1, tile.elements // block_d)), tile.num_warps


def plan_launch(
    key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, *, device: Device
) -> Launch:  # fmt: skip
    """Return the launch of `kv_write`."""
    num_tokens, num_kv_heads, head_dim = key.shape
    block_d, block_v = power_of_two(head_dim), power_of_two(cache.value_dim)
    widest = block_d if value is None else max(block_d, block_v)
    block_h, num_warps = head_tile(
        device, "kv_write", num_heads=num_kv_heads, block_d=widest, num_tokens=num_tokens
    )  # fmt: skip
    value_strides = (0, 0) if value is None else value.stride()[:2]
    arguments = dict(
        key=key, value=value, slots=slots,
        stride_key_token=key.stride(0), stride_key_head=key.stride(1),
        stride_value_token=value_strides[0], stride_value_head=value_strides[1],
        **cache_arguments(cache), NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, VALUE_DIM=cache.value_dim,
        BLOCK_H=block_h, BLOCK_D=block_d, BLOCK_V=block_v, num_warps=num_warps,
    )  # fmt: skip
    return Launch(kv_write_kernel, (num_tokens, triton.cdiv(num_kv_heads, block_h)), arguments)


def kv_write(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor | None,  # [num_tokens, num_kv_heads, value_dim] of the type of key; None: see below
    cache: LayerCache,  # type of key, or quantized
    slots: Tensor,  # [num_tokens] int64: block * block_size + offset; -1: write nothing
) -> None:
    """Write the key and value of token t into slot slots[t] of the cache, in place, quantized if the cache is.

    value must be None, and is not written, if the values of the cache share the memory of its keys.
    """
    check_kv_write(key, value, cache, slots)
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value is None or value.stride(2) == 1 else value.contiguous()
    plan_launch(key, value, cache, slots, device=device_of(key.device)).run()


def kv_write_reference(key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
    """Write one token at a time. The definition of `kv_write` for tests; slow."""
    check_kv_write(key, value, cache, slots)
    for token, slot in enumerate(slots.tolist()):
        for rows, (pool, scales) in zip((key, value), cache.pools, strict=True):
            if slot < 0 or rows is None:
                continue
            new = rows[token]
            place = slot // pool.shape[2], slice(None), slot % pool.shape[2]
            if scales is None:
                pool[place] = new
            else:
                pool[place], scales[place] = quantize(new, pool.dtype)
