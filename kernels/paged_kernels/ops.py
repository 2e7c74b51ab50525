"""The operations of a step, dispatched by the device of their tensors. Triton is imported only for a GPU."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from paged_kernels.block_pair import BlockPair
from paged_kernels.cpu import native, pytorch
from paged_kernels.layer_cache import LayerCache
from paged_kernels.paging import Paging
from paged_kernels.sampling_metadata import SamplingMetadata


@cache
def _implementation(module: str, function: str, on_cpu: bool) -> Callable[..., Any]:
    """Return the implementation: Triton on a GPU; on a CPU, C++ if it was compiled, else PyTorch or numpy."""
    name = f"paged_kernels.cpu.{module}" if on_cpu else f"paged_kernels.{module}"
    if on_cpu and hasattr(native, function) and native.levels():
        name = native.__name__
    elif on_cpu and hasattr(pytorch, function):
        name = pytorch.__name__
    found: Callable[..., Any] = getattr(import_module(name), function)
    return found


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
    attend = _dispatch(query, "paged_attention")
    out: Tensor = attend(
        query, cache, paging, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
    )  # fmt: skip
    return out


def kv_write(key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
    """Write new keys and values into their slots; see `paged_kernels.kv_write.kv_write`."""
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
    write = _dispatch(query, "latent_kv_write", "kv_write")
    rotated: Tensor = write(
        query, latents, weight, eps, cos, sin, cache, slots, from_pairs=from_pairs, to_pairs=to_pairs
    )  # fmt: skip
    return rotated


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized sum, and the sum; see `paged_kernels.layer_ops.add_rms_norm`."""
    normed, total = _dispatch(x, "add_rms_norm", "layer_ops")(x, residual, weight, eps)
    return normed, total


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up; see `paged_kernels.layer_ops.swiglu`."""
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
    """Compute a linear layer with what surrounds it; see `paged_kernels.linear.few_rows_linear`."""
    multiply = _dispatch(x, "few_rows_linear", "linear")
    y, total = multiply(x, weight, bias, residual=residual, norm=norm, eps=eps, swiglu=swiglu)
    return y, total


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer, each row by itself; see `paged_kernels.linear.invariant_linear`."""
    out: Tensor = _dispatch(x, "invariant_linear", "linear")(x, weight, bias)
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


def block_copy(pair: BlockPair, moves: Tensor, *, programs: int | None = None) -> None:
    """Copy whole blocks between two caches; see `paged_kernels.block_copy.block_copy`."""
    _dispatch(pair.table, "block_copy")(pair, moves, programs=programs)
