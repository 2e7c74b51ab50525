"""Arguments of the attention kernels by name, as their launches share them. Imports no triton."""

from typing import Any

import torch
from torch import Tensor

from paged_kernels.launch import key_blocks, padded_head_dim
from paged_kernels.layer_cache import LayerCache, as_bytes
from paged_kernels.paging import Paging

LOG2E = 1.4426950408889634
ALIGNED = 4  # floats in 16 bytes: Triton compiles another variant for a pointer without this alignment


def step_arguments(out: Tensor, query: Tensor, cache: LayerCache, paging: Paging) -> dict[str, Any]:
    """Return the arguments that the layers of a step share, if their tensors have the same layouts."""
    num_heads, head_dim = query.shape[1:]
    keys, values = cache.keys, cache.values
    block_d, block_r = key_blocks(head_dim)
    # Values that share the memory of the keys are taken from the first part of a tile of keys, if they are within it.
    shared_v = cache.shares_memory and cache.value_dim <= block_d
    return dict(
        block_tables=paging.block_tables, context_lens=paging.context_lens, query_starts=paging.query_starts,
        num_seqs=paging.num_seqs, stride_table=paging.block_tables.stride(0),
        stride_o_token=out.stride(0), stride_o_head=out.stride(1),
        stride_q_token=query.stride(0), stride_q_head=query.stride(1),
        STRIDE_K_BLOCK=keys.stride(0), STRIDE_K_HEAD=keys.stride(1), STRIDE_K_SLOT=keys.stride(2),
        STRIDE_V_BLOCK=values.stride(0), STRIDE_V_HEAD=values.stride(1), STRIDE_V_SLOT=values.stride(2),
        STRIDE_S_BLOCK=cache.scale_strides[0], STRIDE_S_HEAD=cache.scale_strides[1], FORMAT=cache.format,
        GROUP=num_heads // keys.shape[1], NUM_HEADS=num_heads, BLOCK_SIZE=keys.shape[2],
        HEAD_DIM=head_dim, VALUE_DIM=cache.value_dim, BLOCK_D=block_d, BLOCK_R=block_r, SHARED=shared_v,
        BLOCK_V=block_d if shared_v else padded_head_dim(cache.value_dim),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # tf32 would drop 13 bits of fp32
    )  # fmt: skip


def layout_of(query: Tensor, cache: LayerCache) -> tuple[Any, ...]:
    """Return what the launches of a step depend on in the tensors of a layer."""
    keys, values = cache.keys, cache.values
    return (
        query.shape, query.stride(), query.dtype, keys.shape, keys.dtype, keys.stride(), values.shape[3],
        values.stride(), cache.shares_memory,
    )  # fmt: skip


def flags_of(sliding_window: int | None, softcap: float | None, sinks: Tensor | None) -> dict[str, bool]:
    """Return which optional parts of attention a layer has."""
    return dict(HAS_WINDOW=sliding_window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None)


def layer_arguments(
    out: Tensor, query: Tensor, cache: LayerCache, *,
    scale: float, sliding_window: int | None, softcap: float | None, sinks: Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments that differ from layer to layer."""
    return dict(
        out=out, query=query, key_cache=as_bytes(cache.keys), value_cache=as_bytes(cache.values),
        key_scales=cache.key_scales, value_scales=cache.value_scales, sinks=sinks, window=sliding_window or 0,
        scale=scale / softcap if softcap else scale * LOG2E, softcap=(softcap or 0.0) * LOG2E,
    )  # fmt: skip


def partial_results(rows: int, value_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for partial results [rows, value_dim] in fp32, and for the logarithms of their denominators."""
    first_log = -(-rows * value_dim // ALIGNED) * ALIGNED
    workspace = torch.empty(first_log + rows, dtype=torch.float32, device=device)
    return workspace[:first_log], workspace[first_log:]
