"""Paged attention on a GPU, for any mixture of prefill chunks and decode rows: launch plan, wrapper and reference.

The kernels are in `attention_kernels`.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from paged_kernels import attention_plan, invariant_attention
from paged_kernels.attention_kernels import paged_attention_kernel, prefix_attention_kernel
from paged_kernels.attention_plan import (
    MAX_WORKSPACE,
    AttentionPlan,
    LaunchTemplate,
    Layer,
    LayerKey,
    count_splits,
    min_split_of,
)
from paged_kernels.block_packing import pack_template
from paged_kernels.launch import PRODUCERS, Device, Launch, device_of
from paged_kernels.layer_cache import LayerCache, pack_full_blocks
from paged_kernels.packed_blocks import is_packed
from paged_kernels.paging import Paging


def _plan(key: LayerKey, paging: Paging) -> AttentionPlan:
    num_kv_heads, num_seqs, device = key.num_kv_heads, paging.num_seqs, key.device
    properties: dict[str, Any] = dict(
        chip=device.chip, head_dim=max(key.head_dim, key.value_dim), itemsize=key.dtype.itemsize, group=key.group,
        quantized=key.quantized,
    )  # fmt: skip
    shape = attention_plan.launch_shape(
        **properties, num_kv_heads=num_kv_heads, multiprocessors=device.multiprocessors, num_tokens=key.num_tokens,
        max_query_len=paging.max_query_len, producer=key.can_have_producer,
        always=PRODUCERS in device.features,
    )  # fmt: skip
    layer = Layer.of(key, shape.heads)
    head_programs = num_kv_heads * layer.HEAD_TILES
    small, large = key.within_blocks(shape.small), shape.large and key.within_blocks(shape.large)
    most_small = num_seqs - 1 if large else num_seqs
    copying = None
    if large and large.producer:
        from paged_kernels import hopper_attention

        copying, large = hopper_attention.plan(key, layer, paging, large, small), None
        if num_seqs == 1:
            return copying
    large_tiles, large_splits, num_warps = 0, 1, small.num_warps
    if large:
        queries = large.block_m // shape.heads
        large_tiles, num_warps = key.num_tokens // queries + num_seqs, large.num_warps
        if key.cache.PACKED is None:
            rows = key.num_tokens * key.num_heads
            programs = (key.num_tokens // queries + 1) * head_programs  # of tiles that are full
            large_splits = count_splits(programs, paging.max_context_len, device.multiprocessors)
            large_splits = min(large_splits, max(1, MAX_WORKSPACE // (4 * rows * (key.value_dim + 1))))
    splits = count_splits(most_small * head_programs, paging.max_context_len, device.multiprocessors)

    shared = None if layer.HAS_WINDOW else paging.shared
    prefix, prefix_grid, prefix_splits = None, (0, 0, 0), 0
    if shared is not None:
        prefix = key.within_blocks(attention_plan.prefix_tile(**properties, num_seqs=num_seqs))
        members = prefix.block_m // shape.heads
        tiles = triton.cdiv(num_seqs, members)
        prefix_splits = count_splits(tiles * head_programs, shared.max_len, device.multiprocessors)
        prefix_grid = num_seqs // members + shared.num_groups, head_programs, prefix_splits
    slots = splits + prefix_splits
    partial = slots > 1 or large_splits > 1
    queries = min(paging.max_query_len, small.block_m // shape.heads)  # most queries of a sequence that is split

    named = dict(
        **key.step_arguments(paging), LAYER=layer, SMALL=small, LARGE=large,
        shared_lens=shared.lens if shared else None, num_tokens=key.num_tokens, large_tiles=large_tiles,
        large_splits=large_splits, num_splits=splits, prefix_splits=prefix_splits, slots=slots, queries=queries,
        min_split=min_split_of((most_small + large_tiles) * head_programs, device.multiprocessors), num_warps=num_warps,
        PARTIAL=partial, PREFIX_N=prefix.block_n if prefix else 1,
        MAX_SLOTS=attention_plan.MAX_SPLITS * (2 if prefix else 1), **device.dependence,
    )  # fmt: skip
    grid = large_tiles * large_splits + splits * num_seqs, head_programs
    templates = [LaunchTemplate.of(paged_attention_kernel, grid, named)]
    if shared and prefix:
        named |= dict(
            members=shared.members, group_starts=shared.group_starts, num_groups=shared.num_groups,
            first_slot=splits, num_splits=prefix_splits, TILE=prefix, num_warps=prefix.num_warps,
        )  # fmt: skip
        templates.insert(0, LaunchTemplate.of(prefix_attention_kernel, prefix_grid, named))
    if key.cache.PACKED is not None:
        templates.insert(0, pack_template(key, paging))
    rows = counters = 0
    if partial:
        rows = num_seqs * slots * queries + (large_splits * key.num_tokens if large_splits > 1 else 0)
        counters = (num_seqs + large_tiles) * head_programs
    plan = AttentionPlan(templates, rows * key.num_heads, counters)
    if copying:
        plan = replace(plan, templates=[*copying.templates, *templates], describe=copying.describe)
    return plan


def plan_launch(
    out: Tensor, query: Tensor, cache: LayerCache, paging: Paging, *,
    scale: float, sliding_window: int | None, softcap: float | None, sinks: Tensor | None, device: Device,
) -> list[Launch]:  # fmt: skip
    """Return the launches of one call in order. `out` is contiguous."""
    num_tokens, num_heads, head_dim = query.shape
    key = LayerKey(
        invariant_attention.plan if cache.batch_invariant else _plan,
        device, num_tokens, num_heads, head_dim, cache.value_dim, cache.keys.shape[1], query.dtype,
        query.stride()[:2], cache.layout, cache.shares_memory, sliding_window, softcap is not None, sinks is not None,
    )  # fmt: skip
    return paging.plan(key).launches(out, query, cache, scale, sliding_window, softcap, sinks)


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
    in fp32.
    """
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
    num_kv_heads, block_size = cache.keys.shape[1:3]
    group = query.shape[1] // num_kv_heads
    if cache.packed is not None:
        assert paging.packed is not None
        pack_full_blocks(cache, paging.slots, paging.packed.slots)
    out = query.new_zeros(*query.shape[:2], cache.value_dim)
    starts = paging.query_starts.tolist()
    for seq, context_len in enumerate(paging.context_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        query_len = rows.stop - rows.start
        if context_len == 0 or query_len == 0:
            continue
        positions = torch.arange(context_len, device=query.device)
        at = positions[context_len - query_len :, None]  # of the queries
        age = at - positions  # [query_len, context_len]
        hidden = (age < 0) if sliding_window is None else (age < 0) | (age >= sliding_window)
        blocks = paging.block_tables[seq].long()[positions // block_size]
        place = blocks, slice(None), positions % block_size
        keys, values = (
            pool[place].float() * (1 if scales is None else scales[place][..., None]) for pool, scales in cache.pools
        )
        if cache.packed is not None:  # every key twice, once hidden from each query
            assert paging.packed is not None
            packed = is_packed(positions, at)
            hidden = torch.cat((hidden | packed, hidden | ~packed), dim=1)
            of_packed = cache.packed.read(paging.packed.block_tables[seq].long()[: -(-context_len // block_size)])
            keys, values = (
                torch.cat((new, old.transpose(1, 2).flatten(0, 1)[:context_len]))
                for new, old in zip((keys, values), of_packed, strict=True)
            )
        unseen = hidden.all(dim=0)[:, None, None]
        keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
        if cache.key_channels is not None:  # the center changes all scores of a query alike
            keys = keys * cache.key_channels[2]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, query_len, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)]
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out
