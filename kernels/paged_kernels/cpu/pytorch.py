"""The operations on a CPU in plain PyTorch, except attention and sampling."""

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.cpu import native
from paged_kernels.layer_cache import BlockPair, LayerCache, quantize, scale_keys


def kv_write(key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
    """Compute `paged_kernels.kv_write.kv_write`."""
    if len(slots) and int(slots.min()) < 0:
        written = slots >= 0
        key, value, slots = key[written], None if value is None else value[written], slots[written]
    if cache.key_channels is not None:
        key = scale_keys(key, cache.key_channels)
    block_size = cache.keys.shape[2]
    block, offset = slots // block_size, slots % block_size
    for new, (pool, scales) in zip((key, value), cache.pools, strict=True):
        if new is None:
            continue
        if scales is not None:
            new, scales[block, :, offset] = quantize(new, pool.dtype)
        pool[block, :, offset] = new


def rope_kv_write(
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
    """Compute `paged_kernels.kv_write.rope_kv_write`."""
    if query_weight is not None and key_weight is not None:
        query, key = rms_norm(query, query_weight, eps), rms_norm(key, key_weight, eps)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    kv_write(_rotate(key, cos, sin), value, cache, slots)
    return _rotate(query, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [num_tokens, heads, head_dim] by angles [num_tokens, 1, head_dim] fp32, in fp32, rounded once."""
    half = x.shape[2] // 2
    product = x.roll(half, dims=2).float() * sin
    product[..., :half].neg_()
    return torch.addcmul(product, x.float(), cos).to(x.dtype)


def latent_kv_write(
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
    """Compute `paged_kernels.kv_write.latent_kv_write`. The norm and the write are C++ if it was compiled."""
    compiled = bool(native.levels())
    norm, write = (native.add_rms_norm, native.kv_write) if compiled else (add_rms_norm, kv_write)
    rank, rope = len(weight), cos.shape[1]
    turning = torch.cat((query[..., -rope:], latents[:, None, rank:]), dim=1).float()
    cos, sin = cos.float()[:, None, : rope // 2], sin.float()[:, None, : rope // 2]
    first, second = turning.unflatten(2, (rope // 2, 2)).unbind(3) if from_pairs else turning.chunk(2, dim=2)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    rotated = (torch.stack(turned, 3).flatten(2) if to_pairs else torch.cat(turned, 2)).to(query.dtype)
    normed, _ = norm(latents[:, :rank], None, weight, eps)
    write(torch.cat((normed, rotated[:, -1]), dim=1)[:, None], None, cache, slots)
    return rotated[:, :-1]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rows normalized over the last dimension in fp32, rounded to x's type, then multiplied by the weight."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `paged_kernels.layer_ops.add_rms_norm`."""
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute `paged_kernels.layer_ops.swiglu`."""
    return _gate(gate_up)


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `paged_kernels.layer_ops.few_rows_linear`."""
    total = x if residual is None else x + residual
    y = F.linear(total if norm is None else rms_norm(total, norm, eps), weight, bias)
    return _gate(y) if swiglu else y, total


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `paged_kernels.layer_ops.invariant_linear`, one row at a time."""
    out = x.new_empty(len(x), len(weight))
    for row, result in zip(x, out, strict=True):
        result.copy_(F.linear(row, weight, bias))
    return out


def block_copy(pair: BlockPair, moves: Tensor, *, programs: int | None = None) -> None:
    """Compute `paged_kernels.block_copy.block_copy`; `programs` has no effect."""
    sources, targets = moves.unbind(1)
    for source, target in zip(pair.sources, pair.targets, strict=True):
        target.index_copy_(0, targets, source.index_select(0, sources))


def embed(ids: Tensor, positions: Tensor, weight: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `paged_kernels.step_inputs.embed`."""
    return F.embedding(ids, weight), F.embedding(positions, table)


def step_inputs(
    tokens: Tensor,
    previous: Tensor,
    tables: Tensor,
    packed_tables: Tensor,
    table_width: Tensor,
    context_lens: Tensor,
    *,
    block_size: int,
) -> Tensor:
    """Compute `paged_kernels.step_inputs.step_inputs`, for tests that replay steps without CUDA graphs."""
    width = int(table_width)
    for seq, context_len in enumerate(context_lens.tolist()):
        used = -(-context_len // block_size)
        tables[seq, :used] = packed_tables[seq * width : seq * width + used]
    return tokens.where(tokens >= 0, previous[(-1 - tokens).clamp(min=0)].clamp(min=0))
