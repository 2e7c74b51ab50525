"""Rotary position embedding and the write of keys and values with PyTorch on a CPU."""

import torch
from torch import Tensor

from paged_kernels.arguments import check_rope_kv_write
from paged_kernels.cpu.kv_write import kv_write
from paged_kernels.cpu.layer_ops import rms_norm
from paged_kernels.layer_cache import LayerCache


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
    """Compute `paged_kernels.rope_kv_write.rope_kv_write`."""
    check_rope_kv_write(query, key, value, cos, sin, cache, slots, query_weight, key_weight)
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
