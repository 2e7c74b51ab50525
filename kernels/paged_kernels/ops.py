"""The operations of a step: they check their arguments, and call an implementation for the device of their tensors.

Triton is imported only for a GPU. Settings out of range raise a ValueError. Shapes and types are asserted, because the
caller guarantees them. Implementations check neither.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from paged_kernels.cpu import native, pytorch
from paged_kernels.layer_cache import BlockPair, LayerCache
from paged_kernels.paging import Paging
from paged_kernels.sampling_metadata import SamplingMetadata

MAX_HEAD_DIM = 576  # elements of a key or value: the latent and the shared key of DeepSeek's attention


@cache
def _implementation(module: str, function: str, on_cpu: bool) -> Callable[..., Any]:
    """Return the implementation: Triton on a GPU; on a CPU, C++ if it was compiled, else PyTorch or numpy."""
    name = f"paged_kernels.cpu.{module}" if on_cpu else f"paged_kernels.{module}"
    if on_cpu and hasattr(native, function) and native.levels():
        name = native.__name__
    elif on_cpu and hasattr(pytorch, function):
        name = pytorch.__name__
    implementation: Callable[..., Any] = getattr(import_module(name), function)
    return implementation


def _dispatch(tensor: Tensor, function: str, module: str | None = None) -> Callable[..., Any]:
    return _implementation(module or function, function, tensor.device.type == "cpu")


def paged_attention(
    query: Tensor,
    cache: LayerCache,
    paging: Paging,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention over the cached keys and values; see `paged_kernels.paged_attention.paged_attention`."""
    _check_paged_attention(query, cache, sliding_window, softcap, sinks)
    attend = _dispatch(query, "paged_attention")
    out: Tensor = attend(
        query, cache, paging, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
    )  # fmt: skip
    return out


def kv_write(key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
    """Write new keys and values into their slots; see `paged_kernels.kv_write.kv_write`."""
    _check_kv_write(key, value, cache, slots)
    _dispatch(key, "kv_write")(key, value, cache, slots)


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
    """Rotate queries and keys, and write keys and values; see `paged_kernels.kv_write.rope_kv_write`."""
    _check_rope_kv_write(query, key, value, cos, sin, cache, slots, query_weight, key_weight)
    rotate = _dispatch(query, "rope_kv_write", "kv_write")
    rotated: Tensor = rotate(
        query, key, value, cos, sin, cache, slots, query_weight=query_weight, key_weight=key_weight, eps=eps
    )  # fmt: skip
    return rotated


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
    """Normalize and write latents, rotate shared keys and queries; see
    `paged_kernels.kv_write.latent_kv_write`."""
    _check_latent_kv_write(query, latents, weight, cos, sin, cache, slots)
    write = _dispatch(query, "latent_kv_write", "kv_write")
    rotated: Tensor = write(
        query, latents, weight, eps, cos, sin, cache, slots, from_pairs=from_pairs, to_pairs=to_pairs
    )  # fmt: skip
    return rotated


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized sum, and the sum; see `paged_kernels.layer_ops.add_rms_norm`."""
    _check_add_rms_norm(x, residual, weight)
    normed, total = _dispatch(x, "add_rms_norm", "layer_ops")(x, residual, weight, eps)
    return normed, total


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up; see `paged_kernels.layer_ops.swiglu`."""
    _check_swiglu(gate_up)
    out: Tensor = _dispatch(gate_up, "swiglu", "layer_ops")(gate_up)
    return out


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
    """Compute a linear layer with what surrounds it; see `paged_kernels.layer_ops.few_rows_linear`."""
    _check_few_rows_linear(x, weight, bias, residual, norm, swiglu=swiglu)
    multiply = _dispatch(x, "few_rows_linear", "layer_ops")
    y, total = multiply(x, weight, bias, residual=residual, norm=norm, eps=eps, swiglu=swiglu)
    return y, total


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer, each row by itself; see `paged_kernels.layer_ops.invariant_linear`."""
    _check_invariant_linear(x, weight, bias)
    out: Tensor = _dispatch(x, "invariant_linear", "layer_ops")(x, weight, bias)
    return out


def sample(logits: Tensor, metadata: SamplingMetadata | None, *, out: Tensor | None = None) -> Tensor:
    """Sample one token per row; see `paged_kernels.sampling.sample`."""
    tokens: Tensor = _dispatch(logits, "sample", "sampling")(logits, metadata, out=out)
    return tokens


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
    """Complete the inputs of a captured step; see `paged_kernels.step_inputs.step_inputs`."""
    complete = _dispatch(tokens, "step_inputs")
    resolved: Tensor = complete(
        tokens, previous, tables, packed_tables, table_width, context_lens, block_size=block_size
    )  # fmt: skip
    return resolved


def embed(ids: Tensor, positions: Tensor, weight: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return embeddings of tokens and angles of positions; see `paged_kernels.step_inputs.embed`."""
    _check_embed(ids, positions, weight, table)
    rows, angles = _dispatch(ids, "embed", "step_inputs")(ids, positions, weight, table)
    return rows, angles


def block_copy(pair: BlockPair, moves: Tensor, *, programs: int | None = None) -> None:
    """Copy whole blocks between two caches; see `paged_kernels.block_copy.block_copy`."""
    _dispatch(pair.table, "block_copy")(pair, moves, programs=programs)


# --- checks of arguments ----------------------------------------------------------------------------------------------


def _check_paged_attention(
    query: Tensor, cache: LayerCache, sliding_window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:  # fmt: skip
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


def _check_kv_write(key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
    num_kv_heads, head_dim = cache.keys.shape[1], cache.keys.shape[3]
    assert key.shape == (slots.shape[0], num_kv_heads, head_dim), (key.shape, cache.keys.shape)
    assert (value is None) == cache.shares_memory, "no values for a cache that stores them, or values for one without"
    assert value is None or value.shape == (*key.shape[:2], cache.value_dim), (value.shape, cache.values.shape)
    assert value is None or key.dtype == value.dtype, (key.dtype, value.dtype)
    assert cache.format or key.dtype == cache.keys.dtype, (key.dtype, cache.keys.dtype)


def _check_rope_kv_write(
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
    _check_kv_write(key, value, cache, slots)
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


def _check_latent_kv_write(
    query: Tensor, latents: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, slots: Tensor
) -> None:
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


def _check_add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    assert x.dim() == 2 and weight.shape == x.shape[1:], (x.shape, weight.shape)
    assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype), (residual, x.shape)


def _check_swiglu(gate_up: Tensor) -> None:
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, gate_up.shape


def _check_few_rows_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None, *, swiglu: bool
) -> None:
    assert x.dim() == weight.dim() == 2 and weight.shape[1] == x.shape[1], (x.shape, weight.shape)
    assert weight.dtype == x.dtype and weight.stride(1) == 1, (weight.dtype, x.dtype, weight.stride())
    assert not swiglu or len(weight) % 2 == 0, weight.shape
    assert bias is None or bias.shape == weight.shape[:1], (bias, weight.shape)
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype), (residual, x.shape)
    assert norm is None or norm.shape == x.shape[1:], (norm, x.shape)


def _check_embed(ids: Tensor, positions: Tensor, weight: Tensor, table: Tensor) -> None:
    assert ids.shape == positions.shape and ids.dim() == 1, (ids.shape, positions.shape)
    assert ids.dtype == positions.dtype == torch.int64, (ids.dtype, positions.dtype)
    assert ids.stride() == positions.stride() == (1,) or len(ids) < 2, (ids.stride(), positions.stride())
    assert weight.stride(1) == table.stride(1) == 1, (weight.stride(), table.stride())


def _check_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    assert x.dim() == weight.dim() == 2 and weight.shape[1] == x.shape[1], (x.shape, weight.shape)
    assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
    assert bias is None or bias.shape == weight.shape[:1], (bias, weight.shape)
