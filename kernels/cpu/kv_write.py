"""Writes a step's new keys and values into their slots of the block pool, with PyTorch on a CPU."""

from torch import Tensor

from kernels.arguments import check_kv_write


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """As `kernels.kv_write.kv_write`: copies token t's key and value into slot slots[t], in place."""
    check_kv_write(key, value, key_cache, value_cache, slots)
    if len(slots) and int(slots.min()) < 0:
        written = slots >= 0
        key, value, slots = key[written], value[written], slots[written]
    block_size = key_cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    key_cache[block, :, offset] = key
    value_cache[block, :, offset] = value
