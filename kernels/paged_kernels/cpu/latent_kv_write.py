"""The write of latents, with their norm and the rotation of shared keys and queries, with PyTorch on a CPU."""

import torch
from torch import Tensor

from paged_kernels.arguments import check_latent_kv_write
from paged_kernels.cpu import kv_write, layer_ops, native
from paged_kernels.layer_cache import LayerCache


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
    """Compute `paged_kernels.latent_kv_write.latent_kv_write`. The norm and the write are C++ if it was compiled."""
    check_latent_kv_write(query, latents, weight, cos, sin, cache, slots)
    compiled = bool(native.levels())
    norm, write = (native.add_rms_norm, native.kv_write) if compiled else (layer_ops.add_rms_norm, kv_write.kv_write)
    rank, rope = len(weight), cos.shape[1]
    turning = torch.cat((query[..., -rope:], latents[:, None, rank:]), dim=1).float()
    cos, sin = cos.float()[:, None, : rope // 2], sin.float()[:, None, : rope // 2]
    first, second = turning.unflatten(2, (rope // 2, 2)).unbind(3) if from_pairs else turning.chunk(2, dim=2)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    rotated = (torch.stack(turned, 3).flatten(2) if to_pairs else torch.cat(turned, 2)).to(query.dtype)
    normed, _ = norm(latents[:, :rank], None, weight, eps)
    write(torch.cat((normed, rotated[:, -1]), dim=1)[:, None], None, cache, slots)
    return rotated[:, :-1]
