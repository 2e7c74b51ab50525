"""The writes of a step's new keys and values into their slots of the block pool, each in one launch.

`kv_write` writes them as they are, or quantized. `rope_kv_write` rotates queries and keys first, `latent_kv_write`
normalizes latents and rotates shared keys and the queries' last elements. The constant CACHE is a `CacheLayout`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels import layer_cache
from paged_kernels.dependent_launch import wait_for_previous
from paged_kernels.launch import Device, Launch, device_of
from paged_kernels.launch_table import power_of_two, row_tile
from paged_kernels.layer_cache import LayerCache, as_bytes, quantize, scale_keys

MIN_ROW_MAX = tl.constexpr(layer_cache.MIN_ROW_MAX)


@triton.jit
def _quantize_rows(x, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return codes and scales of the rows x, bit for bit those of `paged_kernels.layer_cache.quantize`."""
    x = x.to(tl.float32)
    magnitude = tl.abs(x)
    top = tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 1)  # infinity replaces NaN
    scale = tl.where(top < float("inf"), tl.div_rn(tl.maximum(top, MIN_ROW_MAX), CACHE.MAX_CODE), float("nan"))
    y = tl.where(top[:, None] < float("inf"), tl.div_rn(x, scale[:, None]), 0.0)
    if CACHE.FORMAT == "int8":  # rounds to an integer by adding 1.5 * 2**23
        return ((y + 12582912.0) - 12582912.0).to(tl.int8), scale
    # Round to e4m3 with integer arithmetic: at bit 20, and with an exponent bias of 7 in place of 127. Values below
    # 2**-6 are subnormal, in steps of 2**-9: adding 2**14 rounds them, and leaves them in the lowest bits.
    bits = tl.abs(y).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(tl.abs(y) < 0.015625, small, normal)
    return tl.where(y.to(tl.int32, bitcast=True) < 0, code - 128, code).to(tl.int8), scale


@triton.jit
def _store_rows(x, pool, scales, place, scale_place, mask, is_row, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store rows x [rows, columns] at offset `place` of a pool.

    In a quantized pool, x is quantized and its scales are stored at `scale_place` [rows, 1]. Masked elements of x must
    be 0.
    """
    if CACHE.FORMAT is not None:
        x, scale = _quantize_rows(x, CACHE)
        tl.store(scales + scale_place, scale[:, None], mask=is_row)
    tl.store(pool + place, x, mask=mask)


@triton.jit
def _scale_keys(  # type: ignore[no-untyped-def]
    k, channels, head, d, mask, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Return rows of keys as they are quantized, bit for bit like `paged_kernels.layer_cache.scale_keys`."""
    if CACHE.HAS_CHANNELS:
        channel = channels + head * HEAD_DIM + d
        center = tl.load(channel, mask=mask, other=0.0)
        k = (k.to(tl.float32) - center) * tl.load(channel + NUM_KV_HEADS * HEAD_DIM, mask=mask, other=0.0)
    return k


def _cache_arguments(cache: LayerCache) -> dict[str, Any]:
    """Return the arguments of a cache for the kernels that write into it."""
    return dict(
        key_cache=as_bytes(cache.keys), value_cache=as_bytes(cache.values),
        key_scales=cache.key_scales, value_scales=cache.value_scales, key_channels=cache.key_channels,
        CACHE=cache.layout,
    )  # fmt: skip


def _head_tile(device: Device, kind: str, *, num_heads: int, block_d: int, num_tokens: int) -> tuple[int, int]:
    """Return how many heads of one token a program processes, and its number of warps.

    block_d: elements of a padded head.
    """
    padded = power_of_two(num_heads)
    tile = row_tile(device.chip, kind, width=padded * block_d, rows=num_tokens)
    return min(padded, max(1, tile.elements // block_d)), tile.num_warps


# --- keys and values as they are --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=["slots"])
def kv_write_kernel(  # type: ignore[no-untyped-def]
    key, value, key_cache, value_cache, key_scales, value_scales, key_channels, slots,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    CACHE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write a tile of one token's heads. Grid: (num_tokens, tiles of heads).

    value is None if the values are part of the keys.
    """
    wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, offset = slot // CACHE.BLOCK_SIZE, slot % CACHE.BLOCK_SIZE
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    is_head = head < NUM_KV_HEADS
    mask = is_head & (d < HEAD_DIM)
    k = tl.load(key + token * stride_key_token + head * stride_key_head + d, mask=mask, other=0.0)
    k = _scale_keys(k, key_channels, head, d, mask, NUM_KV_HEADS, HEAD_DIM, CACHE)
    k_place = block * CACHE.K_BLOCK + head * CACHE.K_HEAD + offset * CACHE.K_SLOT + d
    s_place = block * CACHE.S_BLOCK + head * CACHE.S_HEAD + offset
    _store_rows(k, key_cache, key_scales, k_place, s_place, mask, is_head, CACHE)
    if value is not None:
        e = tl.arange(0, BLOCK_V)[None, :]
        mask = is_head & (e < VALUE_DIM)
        v = tl.load(value + token * stride_value_token + head * stride_value_head + e, mask=mask, other=0.0)
        v_place = block * CACHE.V_BLOCK + head * CACHE.V_HEAD + offset * CACHE.V_SLOT + e
        _store_rows(v, value_cache, value_scales, v_place, s_place, mask, is_head, CACHE)


def plan_kv_write(
    key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, *, device: Device
) -> Launch:  # fmt: skip
    """Return the launch of `kv_write`."""
    num_tokens, num_kv_heads, head_dim = key.shape
    block_d, block_v = power_of_two(head_dim), power_of_two(cache.value_dim)
    widest = block_d if value is None else max(block_d, block_v)
    block_h, num_warps = _head_tile(
        device, "kv_write", num_heads=num_kv_heads, block_d=widest, num_tokens=num_tokens
    )  # fmt: skip
    value_strides = (0, 0) if value is None else value.stride()[:2]
    arguments = dict(
        key=key, value=value, slots=slots,
        stride_key_token=key.stride(0), stride_key_head=key.stride(1),
        stride_value_token=value_strides[0], stride_value_head=value_strides[1],
        **_cache_arguments(cache), NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, VALUE_DIM=cache.value_dim,
        BLOCK_H=block_h, BLOCK_D=block_d, BLOCK_V=block_v, num_warps=num_warps, **device.dependence,
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
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value is None or value.stride(2) == 1 else value.contiguous()
    plan_kv_write(key, value, cache, slots, device=device_of(key.device)).run()


def kv_write_reference(key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
    """Write one token at a time. The definition of `kv_write` for tests; slow."""
    if cache.key_channels is not None:
        key = scale_keys(key, cache.key_channels)
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


# --- rotary position embedding (RoFormer, arXiv:2104.09864) -----------------------------------------------------------
#
# Elements d and d + head_dim / 2 of a head are rotated together, so a tile holds a head as two halves:
#
#     tile [BLOCK_H, 2, BLOCK_HALF]     x = [first half, second half]     y = [second half, first half]
#     rotated                           x * cos + [-1, +1] * y * sin


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    heads, weight, cos, sin, eps, stride_head, first_head, num_heads,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Return a rotated tile of one token's heads [BLOCK_H, 2 * BLOCK_HALF], normalized first if there is a weight."""
    head = (first_head + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None, None]
    half = tl.arange(0, 2)[None, :, None]
    i = tl.arange(0, BLOCK_HALF)[None, None, :]
    own, other = half * HALF + i, (1 - half) * HALF + i
    mask = (head < num_heads) & (i < HALF)
    x = tl.load(heads + head * stride_head + own, mask=mask, other=0.0)
    y = tl.load(heads + head * stride_head + other, mask=mask, other=0.0)
    if weight is not None:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(wide * wide, 2), 1) / (2 * HALF) + eps)[:, None, None]
        x = (wide * scale).to(x.dtype) * tl.load(weight + own, mask=i < HALF, other=0.0)
        y = (y.to(tl.float32) * scale).to(y.dtype) * tl.load(weight + other, mask=i < HALF, other=0.0)
    c = tl.load(cos + own, mask=i < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + own, mask=i < HALF, other=0.0).to(tl.float32)
    product = y.to(tl.float32) * s
    rotated = x.to(tl.float32) * c + tl.where(half == 0, -product, product)
    return tl.reshape(rotated.to(x.dtype), (BLOCK_H, 2 * BLOCK_HALF))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rope_kv_write_kernel(  # type: ignore[no-untyped-def]
    out, query, key, value, query_weight, key_weight, cos, sin, eps,
    key_cache, value_cache, key_scales, value_scales, key_channels, slots,
    stride_query_token, stride_query_head, stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    stride_cos_token, stride_sin_token,
    CACHE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of one token's heads; if they are KV heads, write keys and values.

    Grid: (num_tokens, tiles of query heads followed by tiles of KV heads).
    """
    wait_for_previous(DEPENDENT)
    QUERY_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    within = column % BLOCK_HALF < HALF
    d = column // BLOCK_HALF * HALF + column % BLOCK_HALF
    cos_row, sin_row = cos + token * stride_cos_token, sin + token * stride_sin_token
    if tile < QUERY_TILES:
        first_head = tile * BLOCK_H
        heads = query + token * stride_query_token
        rotated = _rotate(
            heads, query_weight, cos_row, sin_row, eps, stride_query_head, first_head, NUM_HEADS,
            HALF, BLOCK_H, BLOCK_HALF,
        )  # fmt: skip
        head = (first_head + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        tl.store(out + (token * NUM_HEADS + head) * HEAD_DIM + d, rotated, mask=(head < NUM_HEADS) & within)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, offset = slot // CACHE.BLOCK_SIZE, slot % CACHE.BLOCK_SIZE
    first_head = (tile - QUERY_TILES) * BLOCK_H
    k = _rotate(
        key + token * stride_key_token, key_weight, cos_row, sin_row, eps, stride_key_head, first_head, NUM_KV_HEADS,
        HALF, BLOCK_H, BLOCK_HALF,
    )  # fmt: skip
    head = (first_head + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    is_head = head < NUM_KV_HEADS
    k = _scale_keys(k, key_channels, head, d, is_head & within, NUM_KV_HEADS, HEAD_DIM, CACHE)
    v = tl.load(value + token * stride_value_token + head * stride_value_head + d, mask=is_head & within, other=0.0)
    k_place = block * CACHE.K_BLOCK + head * CACHE.K_HEAD + offset * CACHE.K_SLOT + d
    v_place = block * CACHE.V_BLOCK + head * CACHE.V_HEAD + offset * CACHE.V_SLOT + d
    s_place = block * CACHE.S_BLOCK + head * CACHE.S_HEAD + offset
    _store_rows(k, key_cache, key_scales, k_place, s_place, is_head & within, is_head, CACHE)
    _store_rows(v, value_cache, value_scales, v_place, s_place, is_head & within, is_head, CACHE)


def plan_rope_kv_write(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    *,
    device: Device,
) -> Launch:
    """Return the launch of `rope_kv_write` that writes the rotated queries to `out`."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    block_half = power_of_two(head_dim // 2)
    block_h, num_warps = _head_tile(
        device, "rope_kv_write" if query_weight is None else "norm_rope_kv_write",
        num_heads=num_heads, block_d=2 * block_half, num_tokens=num_tokens,
    )  # fmt: skip
    arguments = dict(
        out=out, query=query, key=key, value=value, query_weight=query_weight, key_weight=key_weight,
        cos=cos, sin=sin, eps=eps, slots=slots,
        stride_query_token=query.stride(0), stride_query_head=query.stride(1),
        stride_key_token=key.stride(0), stride_key_head=key.stride(1),
        stride_value_token=value.stride(0), stride_value_head=value.stride(1),
        stride_cos_token=cos.stride(0), stride_sin_token=sin.stride(0),
        **_cache_arguments(cache), NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_H=block_h, BLOCK_HALF=block_half, num_warps=num_warps, **device.dependence,
        enable_fp_fusion=False,  # blocks must be bit-identical for all implementations
    )  # fmt: skip
    tiles = triton.cdiv(num_heads, block_h) + triton.cdiv(num_kv_heads, block_h)
    return Launch(rope_kv_write_kernel, (num_tokens, tiles), arguments)


def rope_kv_write(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # shape and type of key
    cos: Tensor,  # [num_tokens, head_dim], as returned by the rotary modules of transformers
    sin: Tensor,  # shape and type of cos
    cache: LayerCache,  # type of key, or quantized
    slots: Tensor,  # [num_tokens] int64: block * block_size + offset; -1: write nothing
    *,
    query_weight: Tensor | None = None,  # [head_dim]: RMSNorm of each head before the rotation
    key_weight: Tensor | None = None,
    eps: float = 0.0,  # epsilon of these norms
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Rotate queries and keys, write keys and values as `kv_write` does, and return the rotated queries.

    The rotation is computed in fp32 and rounded once; the norms round like `add_rms_norm`. `head_dim`
    is even.
    """
    query, key, value, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, cos, sin))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    plan_rope_kv_write(
        out, query, key, value, cos, sin, cache, slots, query_weight, key_weight, eps, device=device_of(query.device)
    ).run()
    return out


def rope_kv_write_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    *,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Compute `rope_kv_write` in plain PyTorch. The definition for tests."""

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        wide = x.float()
        return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
        return (x.float() * cos.float()[:, None] + swapped * sin.float()[:, None]).to(x.dtype)

    kv_write_reference(rotate(norm(key, key_weight)), value, cache, slots)
    return rotate(norm(query, query_weight))


# --- latents (multi-head latent attention, arXiv:2405.04434) ----------------------------------------------------------
#
#     latents [rank + rope] of a token     latent                  | shared key
#     key in its slot                      normalized, * weight    | rotated
#
# Elements 2i and 2i + 1 are rotated together ("pairs"), or elements i and i + rope / 2 ("halves"). The result may have
# the other order than what is rotated.


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    row, j, mask, cos, sin, HALF: tl.constexpr, FROM_PAIRS: tl.constexpr, TO_PAIRS: tl.constexpr,
):  # fmt: skip
    """Return the elements j of rotated rows, in fp32."""
    if TO_PAIRS:
        side, i = j % 2, j // 2
    else:
        side, i = j // HALF, j % HALF
    if FROM_PAIRS:
        own, other = 2 * i + side, 2 * i + 1 - side
    else:
        own, other = side * HALF + i, (1 - side) * HALF + i
    x = tl.load(row + own, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(row + other, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + i, mask=(i >= 0) & (i < HALF), other=0.0).to(tl.float32)
    product = y * tl.load(sin + i, mask=(i >= 0) & (i < HALF), other=0.0).to(tl.float32)
    return x * c + tl.where(side == 0, -product, product)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def latent_kv_write_kernel(  # type: ignore[no-untyped-def]
    out, query, latents, weight, eps, cos, sin, key_cache, value_cache, key_scales, value_scales, key_channels, slots,
    stride_query_token, stride_query_head, stride_latents, stride_cos, stride_sin,
    CACHE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    FROM_PAIRS: tl.constexpr, TO_PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of one token's query heads, or write the key of a token.

    Grid: (num_tokens, tiles of query heads, and one more).
    """
    wait_for_previous(DEPENDENT)
    QUERY_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos_row, sin_row = cos + token * stride_cos, sin + token * stride_sin
    if tile < QUERY_TILES:
        head = (tile * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        j = tl.arange(0, BLOCK_ROPE)[None, :]
        mask = (head < NUM_HEADS) & (j < ROPE)
        rows = query + token * stride_query_token + head * stride_query_head + HEAD_DIM - ROPE
        turned = _rotated(rows, j, mask, cos_row, sin_row, ROPE // 2, FROM_PAIRS, TO_PAIRS)
        tl.store(out + (token * NUM_HEADS + head) * ROPE + j, turned.to(out.dtype.element_ty), mask=mask)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    d = tl.arange(0, BLOCK_D)[None, :]
    row = latents + token * stride_latents
    wide = tl.load(row + d, mask=d < RANK, other=0.0).to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / RANK + eps)
    stored = latents.dtype.element_ty
    normed = scaled.to(stored) * tl.load(weight + d, mask=d < RANK, other=0.0)
    is_shared = (d >= RANK) & (d < RANK + ROPE)
    turned = _rotated(row + RANK, d - RANK, is_shared, cos_row, sin_row, ROPE // 2, FROM_PAIRS, TO_PAIRS)
    key = tl.where(is_shared, turned.to(stored), normed)
    place = slot // CACHE.BLOCK_SIZE * CACHE.K_BLOCK + slot % CACHE.BLOCK_SIZE * CACHE.K_SLOT + d
    scale_place = slot // CACHE.BLOCK_SIZE * CACHE.S_BLOCK + slot % CACHE.BLOCK_SIZE + tl.zeros((1, 1), tl.int64)
    is_row = scale_place >= 0
    _store_rows(
        key, key_cache, key_scales, place, scale_place, d < RANK + ROPE, is_row, CACHE
    )  # fmt: skip


def plan_latent_kv_write(
    out: Tensor,
    query: Tensor,
    latents: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    *,
    from_pairs: bool,
    to_pairs: bool,
    device: Device,
) -> Launch:
    """Return the launch of `latent_kv_write` that writes the rotated elements of queries to `out`."""
    (num_tokens, num_heads, head_dim), rope = query.shape, out.shape[2]
    block_rope = power_of_two(rope)
    block_h, num_warps = _head_tile(
        device, "rope_kv_write", num_heads=num_heads, block_d=block_rope, num_tokens=num_tokens
    )  # fmt: skip
    arguments = dict(
        out=out, query=query, latents=latents, weight=weight, eps=eps, cos=cos, sin=sin, slots=slots,
        stride_query_token=query.stride(0), stride_query_head=query.stride(1), stride_latents=latents.stride(0),
        stride_cos=cos.stride(0), stride_sin=sin.stride(0), **_cache_arguments(cache),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, RANK=len(weight), ROPE=rope, FROM_PAIRS=from_pairs, TO_PAIRS=to_pairs,
        BLOCK_H=block_h, BLOCK_ROPE=block_rope, BLOCK_D=power_of_two(latents.shape[1]), num_warps=num_warps,
        **device.dependence,
        enable_fp_fusion=False,  # blocks must be bit-identical for all implementations
    )  # fmt: skip
    return Launch(latent_kv_write_kernel, (num_tokens, triton.cdiv(num_heads, block_h) + 1), arguments)


def latent_kv_write(
    query: Tensor,  # [num_tokens, num_heads, head_dim], of which the last rope elements are rotated
    latents: Tensor,  # [num_tokens, rank + rope]: latents, then shared keys
    weight: Tensor,  # [rank], type of latents: RMSNorm of latents
    eps: float,
    cos: Tensor,  # [num_tokens, rope], the same in both halves
    sin: Tensor,  # shape and type of cos
    cache: LayerCache,  # of latents, type of latents, or quantized
    slots: Tensor,  # [num_tokens] int64: block * block_size + offset; -1: write nothing
    *,
    from_pairs: bool,
    to_pairs: bool,
) -> Tensor:  # [num_tokens, num_heads, rope]
    """Normalize latents, rotate shared keys, write both as `kv_write` does, and return the rotated part of queries.

    The rotation is computed in fp32 and rounded once; the norm rounds like `add_rms_norm`. `rope` is
    even.

    Args:
        from_pairs: whether elements 2i and 2i + 1 are rotated together, rather than i and i + rope / 2.
        to_pairs: the same for the order of the result.
    """
    query, latents, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, latents, cos, sin))
    out = query.new_empty(*query.shape[:2], cos.shape[1])
    plan_latent_kv_write(
        out, query, latents, weight, eps, cos, sin, cache, slots, from_pairs=from_pairs, to_pairs=to_pairs,
        device=device_of(query.device),
    ).run()  # fmt: skip
    return out


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, *, from_pairs: bool, to_pairs: bool) -> Tensor:
    """Rotate x [num_tokens, heads, rope] by angles [num_tokens, rope] in fp32, rounded once."""
    half = x.shape[2] // 2
    first, second = x.float().unflatten(2, (half, 2)).unbind(3) if from_pairs else x.float().split(half, dim=2)
    c, s = cos.float()[:, None, :half], sin.float()[:, None, :half]
    turned = first * c - second * s, second * c + first * s
    return (torch.stack(turned, 3).flatten(2) if to_pairs else torch.cat(turned, 2)).to(x.dtype)


def latent_kv_write_reference(
    query: Tensor,
    latents: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    *,
    from_pairs: bool,
    to_pairs: bool,
) -> Tensor:
    """Compute `latent_kv_write` in plain PyTorch. The definition for tests."""
    latent, shared = latents.split((len(weight), cos.shape[1]), dim=1)
    wide = latent.float()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(latent.dtype) * weight
    turned = rotate_reference(shared[:, None], cos, sin, from_pairs=from_pairs, to_pairs=to_pairs)
    kv_write_reference(torch.cat((normed[:, None], turned), dim=2), None, cache, slots)
    return rotate_reference(query[..., -cos.shape[1] :], cos, sin, from_pairs=from_pairs, to_pairs=to_pairs)
