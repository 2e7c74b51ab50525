"""The write of a step's new keys and values into their slots of the block pool with PyTorch on a CPU."""

from torch import Tensor

from paged_kernels.arguments import check_kv_write
from paged_kernels.layer_cache import LayerCache, quantize


def kv_write(key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
    """Compute `paged_kernels.kv_write.kv_write`."""
    check_kv_write(key, value, cache, slots)
    if len(slots) and int(slots.min()) < 0:
        written = slots >= 0
        key, value, slots = key[written], None if value is None else value[written], slots[written]
    block_size = cache.keys.shape[2]
    block, offset = slots // block_size, slots % block_size
    for new, (pool, scales) in zip((key, value), cache.pools, strict=True):
        if new is None:
            continue
        if scales is not None:
            new, scales[block, :, offset] = quantize(new, pool.dtype)
        pool[block, :, offset] = new
