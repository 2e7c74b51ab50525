"""Rotary position embedding (RoFormer, arXiv:2104.09864) of a step's queries and keys, and the write of its keys and
values into their slots, in one launch.

Elements d and d + head_dim / 2 of a head are rotated together, so a tile holds a head as two halves:

    tile [BLOCK_H, 2, BLOCK_HALF]     x = [first half, second half]     y = [second half, first half]
    rotated                           x * cos + [-1, +1] * y * sin
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.arguments import check_rope_kv_write
from paged_kernels.kv_write import cache_arguments, head_tile, kv_write_reference, store_rows
from paged_kernels.launch import Device, Launch, device_of
from paged_kernels.launch_table import power_of_two
from paged_kernels.layer_cache import LayerCache


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
    key_cache, value_cache, key_scales, value_scales, slots,
    stride_query_token, stride_query_head, stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    stride_cos_token, stride_sin_token,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr,
    FORMAT: tl.constexpr, MAX_CODE: tl.constexpr, MIN_ROW_MAX: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of one token's heads; if they are KV heads, write keys and values.

    Grid: (num_tokens, tiles of query heads followed by tiles of KV heads). FORMAT as in `layer_cache`.
    """
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
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    first_head = (tile - QUERY_TILES) * BLOCK_H
    k = _rotate(
        key + token * stride_key_token, key_weight, cos_row, sin_row, eps, stride_key_head, first_head, NUM_KV_HEADS,
        HALF, BLOCK_H, BLOCK_HALF,
    )  # fmt: skip
    head = (first_head + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    is_head = head < NUM_KV_HEADS
    v = tl.load(value + token * stride_value_token + head * stride_value_head + d, mask=is_head & within, other=0.0)
    k_place = block * STRIDE_K_BLOCK + head * STRIDE_K_HEAD + offset * STRIDE_K_SLOT + d
    v_place = block * STRIDE_V_BLOCK + head * STRIDE_V_HEAD + offset * STRIDE_V_SLOT + d
    s_place = block * STRIDE_S_BLOCK + head * STRIDE_S_HEAD + offset
    store_rows(k, key_cache, key_scales, k_place, s_place, is_head & within, is_head, FORMAT, MAX_CODE, MIN_ROW_MAX)
    store_rows(v, value_cache, value_scales, v_place, s_place, is_head & within, is_head, FORMAT, MAX_CODE, MIN_ROW_MAX)


def plan_launch(
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
    block_h, num_warps = head_tile(
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
        **cache_arguments(cache), NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_H=block_h, BLOCK_HALF=block_half, num_warps=num_warps,
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

    The rotation is computed in fp32 and rounded once; the norms round like `add_rms_norm`. Raises ValueError if
    `head_dim` is odd.
    """
    check_rope_kv_write(query, key, value, cos, sin, cache, slots, query_weight, key_weight)
    query, key, value, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, cos, sin))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    plan_launch(
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
