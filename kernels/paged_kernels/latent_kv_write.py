"""The write of a step's latents into their slots (multi-head latent attention, arXiv:2405.04434), with their RMSNorm
and the rotation of shared keys, and the rotation of the queries' last elements, in one launch.

    latents [rank + rope] of a token     latent                  | shared key
    key in its slot                      normalized, * weight    | rotated

Elements 2i and 2i + 1 are rotated together ("pairs"), or elements i and i + rope / 2 ("halves"). The result may have
the other order than what is rotated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.arguments import check_latent_kv_write
from paged_kernels.kv_write import cache_arguments, head_tile, kv_write_reference, store_rows
from paged_kernels.launch import Device, Launch, device_of
from paged_kernels.launch_table import power_of_two
from paged_kernels.layer_cache import LayerCache


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
    out, query, latents, weight, eps, cos, sin, key_cache, value_cache, key_scales, value_scales, slots,
    stride_query_token, stride_query_head, stride_latents, stride_cos, stride_sin,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    STRIDE_S_BLOCK: tl.constexpr, STRIDE_S_HEAD: tl.constexpr,
    FORMAT: tl.constexpr, MAX_CODE: tl.constexpr, MIN_ROW_MAX: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    FROM_PAIRS: tl.constexpr, TO_PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of one token's query heads, or write the key of a token.

    Grid: (num_tokens, tiles of query heads, and one more). FORMAT as in `layer_cache`.
    """
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
    place = slot // BLOCK_SIZE * STRIDE_K_BLOCK + slot % BLOCK_SIZE * STRIDE_K_SLOT + d
    scale_place = slot // BLOCK_SIZE * STRIDE_S_BLOCK + slot % BLOCK_SIZE + tl.zeros((1, 1), tl.int64)
    is_row = scale_place >= 0
    store_rows(
        key, key_cache, key_scales, place, scale_place, d < RANK + ROPE, is_row, FORMAT, MAX_CODE, MIN_ROW_MAX
    )  # fmt: skip


def plan_launch(
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
    block_h, num_warps = head_tile(
        device, "rope_kv_write", num_heads=num_heads, block_d=block_rope, num_tokens=num_tokens
    )  # fmt: skip
    arguments = dict(
        out=out, query=query, latents=latents, weight=weight, eps=eps, cos=cos, sin=sin, slots=slots,
        stride_query_token=query.stride(0), stride_query_head=query.stride(1), stride_latents=latents.stride(0),
        stride_cos=cos.stride(0), stride_sin=sin.stride(0), **cache_arguments(cache),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, RANK=len(weight), ROPE=rope, FROM_PAIRS=from_pairs, TO_PAIRS=to_pairs,
        BLOCK_H=block_h, BLOCK_ROPE=block_rope, BLOCK_D=power_of_two(latents.shape[1]), num_warps=num_warps,
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

    The rotation is computed in fp32 and rounded once; the norm rounds like `add_rms_norm`. Raises ValueError if `rope`
    is odd.

    Args:
        from_pairs: whether elements 2i and 2i + 1 are rotated together, rather than i and i + rope / 2.
        to_pairs: the same for the order of the result.
    """
    check_latent_kv_write(query, latents, weight, cos, sin, cache, slots)
    query, latents, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, latents, cos, sin))
    out = query.new_empty(*query.shape[:2], cos.shape[1])
    plan_launch(
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
