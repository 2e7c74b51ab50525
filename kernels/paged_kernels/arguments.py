"""Argument checks, shared by all implementations of an operation. Imports no triton."""

from torch import Tensor

from paged_kernels.layer_cache import LayerCache

MAX_HEAD_DIM = 576  # elements of a key or value: the latent and the shared key of DeepSeek's attention


def check_paged_attention(
    query: Tensor, cache: LayerCache, sliding_window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:  # fmt: skip
    """Raise ValueError for a setting out of range. Shapes and types are asserted: the caller guarantees them."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = cache.keys.shape[1:3]
    assert cache.keys.shape[3] == head_dim, (query.shape, cache.keys.shape)
    assert cache.format or query.dtype == cache.keys.dtype, (query.dtype, cache.keys.dtype)
    assert sinks is None or sinks.shape == (num_heads,), sinks
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads}: must be a multiple of num_kv_heads={num_kv_heads}")
    if block_size & (block_size - 1) or not 1 <= block_size <= 256:
        raise ValueError(f"block_size={block_size}: must be a power of two in 1..256")
    for name, size in (("head_dim", head_dim), ("value_dim", cache.value_dim)):
        if size > MAX_HEAD_DIM:
            raise ValueError(f"{name}={size}: must be 1..{MAX_HEAD_DIM}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window}: must be at least 1, or None for no window")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap}: must be above 0, or None for no cap")


def check_kv_write(key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
    """Assert that the shapes and types match."""
    num_kv_heads, head_dim = cache.keys.shape[1], cache.keys.shape[3]
    assert key.shape == (slots.shape[0], num_kv_heads, head_dim), (key.shape, cache.keys.shape)
    assert (value is None) == cache.shares_memory, "no values for a cache that stores them, or values for one without"
    assert value is None or value.shape == (*key.shape[:2], cache.value_dim), (value.shape, cache.values.shape)
    assert value is None or key.dtype == value.dtype, (key.dtype, value.dtype)
    assert cache.format or key.dtype == cache.keys.dtype, (key.dtype, cache.keys.dtype)


def check_rope_kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
) -> None:
    """Raise ValueError for an odd head_dim. Shapes and types are asserted: the caller guarantees them."""
    check_kv_write(key, value, cache, slots)
    num_tokens, _, head_dim = query.shape
    assert num_tokens == key.shape[0] and head_dim == key.shape[2], (query.shape, key.shape)
    assert query.dtype == key.dtype, (query.dtype, key.dtype)
    assert cache.value_dim == head_dim, (cache.value_dim, head_dim)
    assert cos.shape == sin.shape == (num_tokens, head_dim), (cos.shape, sin.shape, query.shape)
    assert (query_weight is None) == (key_weight is None)
    for weight in (query_weight, key_weight):
        assert weight is None or weight.shape == (head_dim,), (weight.shape, head_dim)
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: must be even, so that a head has two halves to rotate")


def check_latent_kv_write(
    query: Tensor, latents: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, slots: Tensor
) -> None:
    """Raise ValueError for an odd number of rotated elements. Shapes and types are asserted: the caller guarantees
    them."""
    num_tokens, rope = cos.shape
    assert cache.shares_memory and cache.keys.shape[1] == 1, cache.keys.shape
    assert cache.value_dim == len(weight), (cache.value_dim, weight.shape)
    assert latents.shape == (num_tokens, len(weight) + rope) and slots.shape == (num_tokens,), (
        latents.shape,
        cos.shape,
    )
    assert latents.shape[1] == cache.keys.shape[3], (latents.shape, cache.keys.shape)
    assert cache.format or latents.dtype == cache.keys.dtype, (latents.dtype, cache.keys.dtype)
    assert len(query) == num_tokens and query.shape[2] >= rope, (query.shape, cos.shape)
    assert cos.shape == sin.shape, (cos.shape, sin.shape)
    assert query.dtype == latents.dtype == weight.dtype, (query.dtype, latents.dtype, weight.dtype)
    if rope % 2:
        raise ValueError(f"rope={rope}: must be even, so that elements are rotated in pairs")


def check_add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    """Assert that the shapes and types match."""
    assert x.dim() == 2 and weight.shape == x.shape[1:], (x.shape, weight.shape)
    assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype), (residual, x.shape)


def check_swiglu(gate_up: Tensor) -> None:
    """Assert that a row has two halves."""
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, gate_up.shape


def check_few_rows_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None, *, swiglu: bool
) -> None:
    """Assert that the shapes and types match."""
    assert x.dim() == weight.dim() == 2 and weight.shape[1] == x.shape[1], (x.shape, weight.shape)
    assert weight.dtype == x.dtype and weight.stride(1) == 1, (weight.dtype, x.dtype, weight.stride())
    assert not swiglu or len(weight) % 2 == 0, weight.shape
    assert bias is None or bias.shape == weight.shape[:1], (bias, weight.shape)
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype), (residual, x.shape)
    assert norm is None or norm.shape == x.shape[1:], (norm, x.shape)


def check_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Assert that the shapes and types match."""
    assert x.dim() == weight.dim() == 2 and weight.shape[1] == x.shape[1], (x.shape, weight.shape)
    assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
    assert bias is None or bias.shape == weight.shape[:1], (bias, weight.shape)
