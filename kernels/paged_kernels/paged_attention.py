"""Paged attention on a GPU, for any mixture of prefill chunks and decode rows: launch plan, wrapper and reference.

The kernels are in `attention_kernels`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from paged_kernels import invariant_attention, launch
from paged_kernels.arguments import check_paged_attention
from paged_kernels.attention_arguments import flags_of, layer_arguments, layout_of, partial_results, step_arguments
from paged_kernels.attention_kernels import paged_attention_kernel, prefix_attention_kernel
from paged_kernels.launch import Device, Launch, LaunchShape, LaunchTemplate, device_of, launch_shape
from paged_kernels.launch_table import Tile
from paged_kernels.layer_cache import LayerCache
from paged_kernels.paging import Paging
from paged_kernels.splits import zeros


@dataclass(frozen=True)
class LaunchPlan:
    """Grids, tiles and splits of a step's launches; the same for all of its layers with the same shapes."""

    shape: LaunchShape
    grid: tuple[int, int]
    num_splits: int
    prefix: Tile | None  # tile of the pass over shared prefixes; None: no such pass
    prefix_grid: tuple[int, int, int]
    queries: int  # maximum number of queries of a sequence that is split

    @property
    def prefix_splits(self) -> int:
        """Splits of a shared prefix; 0 without one."""
        return self.prefix_grid[2] if self.prefix else 0

    @property
    def slots(self) -> int:
        """Partial results per query row."""
        return self.num_splits + self.prefix_splits

    @property
    def partial(self) -> bool:
        """Whether a row has several partial results, which are merged."""
        return self.slots > 1


def _plan(query: Tensor, cache: LayerCache, paging: Paging, device: Device, *, windowed: bool) -> LaunchPlan:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = cache.keys.shape[1]
    group = num_heads // num_kv_heads
    properties: dict[str, Any] = dict(
        chip=device.chip, head_dim=max(head_dim, cache.value_dim), itemsize=query.element_size(), group=group,
        quantized=cache.format is not None,
    )  # fmt: skip
    shape = launch_shape(
        **properties, num_kv_heads=num_kv_heads, multiprocessors=device.multiprocessors, num_tokens=num_tokens,
        max_query_len=paging.max_query_len,
    )  # fmt: skip
    head_programs = num_kv_heads * triton.cdiv(group, shape.HEADS)
    small = paging.num_seqs - (shape.LARGE_M > 0)  # maximum sequences with small tiles
    splits = launch.count_splits(small * head_programs, paging.max_context_len, device.multiprocessors)
    large_tiles = num_tokens // (shape.LARGE_M // shape.HEADS) + paging.num_seqs if shape.LARGE_M else 0
    prefix, prefix_grid = None, (0, 0, 0)
    if paging.shared is not None and not windowed:
        prefix = launch.prefix_tile(**properties, num_seqs=paging.num_seqs)
        members = prefix.block_m // shape.HEADS
        tiles = triton.cdiv(paging.num_seqs, members)
        prefix_grid = (
            paging.num_seqs // members + paging.shared.num_groups,
            head_programs,
            launch.count_splits(tiles * head_programs, paging.shared.max_len, device.multiprocessors),
        )
    return LaunchPlan(
        shape,
        (large_tiles + splits * paging.num_seqs, head_programs),
        splits,
        prefix,
        prefix_grid,
        min(paging.max_query_len, shape.SMALL_M // shape.HEADS),
    )


def _templates(
    out: Tensor, query: Tensor, cache: LayerCache, paging: Paging, plan: LaunchPlan, flags: dict[str, bool]
) -> list[LaunchTemplate]:
    """Return the launches of a call in order; the same for all layers whose tensors have the same layout."""
    shape, shared = plan.shape, paging.shared if plan.prefix else None
    named = dict(
        **step_arguments(out, query, cache, paging),
        shared_lens=shared.lens if shared else None,
        large_tiles=plan.grid[0] - plan.num_splits * paging.num_seqs, num_splits=plan.num_splits,
        prefix_splits=plan.prefix_splits, slots=plan.slots, queries=plan.queries,
        PARTIAL=plan.partial, MIN_SPLIT=launch.MIN_SPLIT, PREFIX_N=plan.prefix.block_n if plan.prefix else 1,
        MAX_SLOTS=launch.MAX_SPLITS * (2 if plan.prefix else 1), **flags, **vars(shape),
    )  # fmt: skip
    made = [LaunchTemplate.of(paged_attention_kernel, plan.grid, named)]
    if plan.prefix and shared:
        tile = plan.prefix
        prefix = dict(
            members=shared.members, group_starts=shared.group_starts, num_groups=shared.num_groups,
            first_slot=plan.num_splits, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.num_stages,
            num_splits=plan.prefix_splits, num_warps=tile.num_warps,
        )  # fmt: skip
        made.insert(0, LaunchTemplate.of(prefix_attention_kernel, plan.prefix_grid, {**named, **prefix}))
    return made


def plan_launch(
    out: Tensor, query: Tensor, cache: LayerCache, paging: Paging, *,
    scale: float, sliding_window: int | None, softcap: float | None, sinks: Tensor | None, device: Device,
) -> list[Launch]:  # fmt: skip
    """Return the launches of one call in order. The parts that the layers of a step share are computed for the first
    layer."""
    settings: dict[str, Any] = dict(scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks)
    if cache.batch_invariant:
        return invariant_attention.plan_launch(out, query, cache, paging, **settings, device=device)
    flags = flags_of(sliding_window, softcap, sinks)
    key = ("triton", *layout_of(query, cache), *flags.values(), device)
    if key not in paging.derived:
        plan = _plan(query, cache, paging, device, windowed=flags["HAS_WINDOW"])
        paging.derived[key] = plan, _templates(out, query, cache, paging, plan, flags)
    plan, templates = paging.derived[key]
    partials = logs = arrivals = None
    if plan.partial:
        arrivals = zeros(paging.num_seqs * plan.grid[1], query.device)
        rows = paging.num_seqs * plan.slots * plan.queries * query.shape[1]
        partials, logs = partial_results(rows, cache.value_dim, query.device)
    layer = dict(
        **layer_arguments(out, query, cache, **settings), partials=partials, logs=logs, arrivals=arrivals
    )  # fmt: skip
    return [template.launch(layer) for template in templates]


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim] fp32, fp16 or bf16
    cache: LayerCache,  # type of query, or quantized
    paging: Paging,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [num_heads]
) -> Tensor:
    """Return the causal attention of every packed query over its own sequence's pages: [num_tokens, num_heads,
    value_dim] of query's type.

    Query i of a sequence is at position context_len - query_len + i and sees the positions up to its own, or the
    newest `sliding_window` of them. A softcap c replaces a score s by c * tanh(s / c) (Gemma 2, arXiv:2408.00118). A
    sink is a logit per head that is only part of the softmax's denominator (arXiv:2309.17453). The softmax is computed
    in fp32. Raises ValueError for a setting out of range.
    """
    check_paged_attention(query, cache, sliding_window, softcap, sinks)
    query = query if query.stride(2) == 1 else query.contiguous()
    out = torch.empty((*query.shape[:2], cache.value_dim), dtype=query.dtype, device=query.device)
    for planned in plan_launch(
        out, query, cache, paging,
        scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks, device=device_of(query.device),
    ):  # fmt: skip
        planned.run()
    return out


def paged_attention_reference(
    query: Tensor,
    cache: LayerCache,
    paging: Paging,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `paged_attention` in fp32, one sequence at a time. The definition for tests; slow."""
    check_paged_attention(query, cache, sliding_window, softcap, sinks)
    num_kv_heads, block_size = cache.keys.shape[1:3]
    group = query.shape[1] // num_kv_heads
    out = query.new_zeros(*query.shape[:2], cache.value_dim)
    starts = paging.query_starts.tolist()
    for seq, context_len in enumerate(paging.context_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        query_len = rows.stop - rows.start
        if context_len == 0 or query_len == 0:
            continue
        positions = torch.arange(context_len, device=query.device)
        blocks = paging.block_tables[seq].long()[positions // block_size]
        place = blocks, slice(None), positions % block_size
        keys, values = (
            pool[place].float() * (1 if scales is None else scales[place][..., None]) for pool, scales in cache.pools
        )
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        age = positions[context_len - query_len :, None] - positions  # [query_len, context_len]
        hidden = (age < 0) if sliding_window is None else (age < 0) | (age >= sliding_window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, query_len, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :context_len]
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out
