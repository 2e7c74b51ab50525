"""What every implementation of an operation demands of its arguments. Imports no triton."""

from torch import Tensor

from kernels.layer_cache import LayerCache


def check_paged_attention(
    query: Tensor, cache: LayerCache, sliding_window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:  # fmt: skip
    """Raises ValueError for a setting out of range; asserts the shapes, which are the caller's code."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = cache.keys.shape[1:3]
    assert cache.keys.shape[3] == head_dim, (query.shape, cache.keys.shape)
    assert cache.format or query.dtype == cache.keys.dtype, (query.dtype, cache.keys.dtype)
    assert sinks is None or sinks.shape == (num_heads,), sinks
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads}: must be a multiple of num_kv_heads={num_kv_heads}")
    if block_size & (block_size - 1) or not 1 <= block_size <= 256:
        raise ValueError(f"block_size={block_size}: must be a power of two in 1..256")
    if head_dim > 256:
        raise ValueError(f"head_dim={head_dim}: must be 1..256")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window}: must be at least 1, or None for no window")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap}: must be above 0, or None for no cap")


def check_kv_write(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Asserts that the shapes and types fit together."""
    num_kv_heads, head_dim = cache.keys.shape[1], cache.keys.shape[3]
    assert key.shape == value.shape == (slots.shape[0], num_kv_heads, head_dim), (key.shape, cache.keys.shape)
    assert key.dtype == value.dtype, (key.dtype, value.dtype)
    assert cache.format or key.dtype == cache.keys.dtype, (key.dtype, cache.keys.dtype)
