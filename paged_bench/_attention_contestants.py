"""Implementations of attention that the kernel benchmark compares: our kernels, and others installed on this machine.

A contestant takes the inputs of a cell and returns a `Call`, which maps the number of a rotation to the output,
[num_tokens, num_heads, head_dim]. What a contestant prepares (a plan, a mask, keys and values in its own layout) is
not timed. It raises Unavailable if it is not installed or does not support the cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_bench._attention import AttentionInputs, Cell
from paged_bench._race import Call
from paged_kernels.cascade import read_ratio
from paged_kernels.cpu import native
from paged_kernels.cpu import paged_attention as in_pytorch
from paged_kernels.ops import paged_attention
from paged_kernels.paging import Paging

OURS = "paged"
UNQUANTIZED, NO_SHARED_PREFIX = "paged, pool as the query", "paged, prefix read by each"


class Unavailable(Exception):
    """The reason why a contestant does not compute a cell."""


def paged(prepared: AttentionInputs) -> Call:
    """Run our kernel. The first call prepares what the layers of a step share, as in the engine."""
    return _paged(prepared, [prepared.sharing(index) for index in range(prepared.count)])


def paged_by_each(prepared: AttentionInputs) -> Call:
    """Run our kernel without the shared prefix pass: every sequence reads the prefix separately."""
    return _paged(prepared, [prepared.paging(index) for index in range(prepared.count)])


def paged_wide(prepared: AttentionInputs) -> Call:
    """Run our kernel over an unquantized pool."""
    cell = prepared.cell
    wide = AttentionInputs(replace(cell, pool=cell.dtype), prepared.device, 0)
    return _paged(wide, [wide.paging(index) for index in range(wide.count)])


def paged_by(prepared: AttentionInputs, attend: Callable[..., Tensor]) -> Call:
    """Run another one of our implementations."""
    return _paged(prepared, [prepared.paging(index) for index in range(prepared.count)], attend)


def _paged(prepared: AttentionInputs, pagings: list[Paging], attend: Callable[..., Tensor] = paged_attention) -> Call:
    return lambda index: attend(prepared.query, prepared.cache, pagings[index % len(pagings)], scale=prepared.scale)


def sdpa(prepared: AttentionInputs) -> Call:
    """Run SDPA on contiguous keys and values: the cost without pages."""
    cell = prepared.cell
    if cell.pool != cell.dtype:
        raise Unavailable("keys and values of one byte")
    kept = [
        tuple(one[:, :, : cell.context].contiguous() for one in prepared.gathered(i)) for i in range(prepared.count)
    ]
    return lambda index: prepared.rows(_attend(prepared, *kept[index]))


def gather_sdpa(prepared: AttentionInputs) -> Call:
    """Copy the pages to contiguous memory, then run SDPA."""

    def call(index: int) -> Tensor:
        keys, values = (one[:, :, : prepared.cell.context] for one in prepared.gathered(index))
        return prepared.rows(_attend(prepared, keys, values))

    return call


def _attend(prepared: AttentionInputs, keys: Tensor, values: Tensor) -> Tensor:
    """Run SDPA. For decode, the heads of a group are rows, so that each key is read once."""
    cell, query = prepared.cell, prepared.batched_query
    if cell.query > 1:
        causal = prepared.mask is None
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=prepared.mask, is_causal=causal, scale=prepared.scale, enable_gqa=True
        )
    packed = query.view(cell.batch, cell.kv_heads, -1, cell.head_dim)
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=prepared.mask, scale=prepared.scale)
    return out.reshape(query.shape)


def flex(prepared: AttentionInputs) -> Call:
    """Run compiled flex_attention on contiguous keys and values, with a block mask of the lengths."""
    cell = prepared.cell
    if prepared.device.type != "cuda":
        raise Unavailable("no GPU")
    if cell.pool != cell.dtype:
        raise Unavailable("keys and values of one byte")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lens, query = prepared.lens, cell.query

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= lens[batch] - query + row

    mask = create_block_mask(visible, cell.batch, None, query, cell.context, device=str(prepared.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    kept = [
        tuple(one[:, :, : cell.context].contiguous() for one in prepared.gathered(i)) for i in range(prepared.count)
    ]
    return lambda index: prepared.rows(
        compiled(prepared.batched_query, *kept[index], block_mask=mask, scale=prepared.scale, enable_gqa=True)
    )


def flashinfer(prepared: AttentionInputs) -> Call:
    """Run FlashInfer's paged wrappers, planned once, on our pool: its layout is FlashInfer's HND.

    The arguments are those of `BatchDecodeWithPagedKVCacheWrapper` and `BatchPrefillWithPagedKVCacheWrapper` in
    FlashInfer 0.6 (docs.flashinfer.ai/api/attention.html). Its workspace is scratch memory of a call.
    """
    module, cell = _installed("flashinfer"), prepared.cell
    if cell.pool != cell.dtype:
        raise Unavailable("a scale for each token and head")
    size = cell.block_size
    pages = [-(-one // size) for one in cell.contexts]
    indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32, device=prepared.device)
    last = torch.tensor([(one - 1) % size + 1 for one in cell.contexts], dtype=torch.int32, device=prepared.device)
    heads = (cell.heads, cell.kv_heads, cell.head_dim, size)
    space = torch.zeros(128 << 20, dtype=torch.uint8, device=prepared.device)
    wrappers = []
    for index in range(prepared.count):
        indices = torch.cat([row[:n] for row, n in zip(prepared.tables[index], pages, strict=True)])
        types = {"q_data_type": cell.dtype, "kv_data_type": cell.pool}
        if cell.query == 1:
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
                space, "HND", use_tensor_cores=cell.heads > cell.kv_heads
            )
            wrapper.plan(indptr, indices, last, *heads, **types)
        else:
            wrapper = module.BatchPrefillWithPagedKVCacheWrapper(space, "HND")
            wrapper.plan(prepared.starts, indptr, indices, last, *heads, causal=True, **types)
        wrappers.append(wrapper)
    pool = (prepared.cache.keys, prepared.cache.values)
    return lambda index: wrappers[index].run(prepared.query, pool)


def vllm(prepared: AttentionInputs) -> Call:
    """Run vLLM's Triton kernel on a pool in its layout: [num_blocks, block_size, kv_heads, head_dim]."""
    _installed("vllm")
    cell = prepared.cell
    if cell.pool != cell.dtype:
        raise Unavailable("a scale for each token and head")
    for place in ("vllm.v1.attention.ops", "vllm.attention.ops"):  # the path depends on the version
        try:
            attend = import_module(f"{place}.triton_unified_attention").unified_attention
            break
        except ImportError:
            continue
    else:
        raise Unavailable("this vllm has no unified_attention")
    keys, values = (one.transpose(1, 2).contiguous() for one in (prepared.cache.keys, prepared.cache.values))
    out = torch.empty_like(prepared.query)

    def call(index: int) -> Tensor:
        attend(
            q=prepared.query, k=keys, v=values, out=out, cu_seqlens_q=prepared.starts, max_seqlen_q=cell.query,
            seqused_k=prepared.lens, max_seqlen_k=cell.context, softmax_scale=prepared.scale, causal=True,
            window_size=(-1, -1), block_table=prepared.tables[index], softcap=0, q_descale=None, k_descale=None,
            v_descale=None,
        )  # fmt: skip
        return out

    return call


def _installed(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise Unavailable("not installed") from None


def _cpu_variants() -> dict[str, Callable[[AttentionInputs], Call]]:
    """Return our implementations for CPUs with fewer instructions, and the one without compiled kernels."""
    if not native.levels():
        return {}  # PyTorch is the implementation in use
    levels = [level for level in native.levels() if level not in (native.level(), "amx_emulated")]
    attend = {level: partial(native.paged_attention, level=level) for level in levels}
    every: dict[str, Callable[..., Tensor]] = {**attend, "PyTorch": in_pytorch.paged_attention}
    return {f"paged, {name}": partial(paged_by, attend=one) for name, one in every.items()}


CONTESTANTS: dict[str, Callable[[AttentionInputs], Call]] = {
    OURS: paged,
    UNQUANTIZED: paged_wide,
    NO_SHARED_PREFIX: paged_by_each,
    "SDPA, contiguous": sdpa,
    "gather + SDPA": gather_sdpa,
    "flex_attention, contiguous": flex,
    "FlashInfer": flashinfer,
    "vLLM": vllm,
}


def contestants(cell: Cell, device: torch.device) -> dict[str, Callable[[AttentionInputs], Call]]:
    """Return the contestants of a cell.

    A quantized pool and a shared prefix are also compared with our kernel without them; on a CPU, our kernel is also
    compared with lower instruction sets.
    """
    absent = {UNQUANTIZED} if cell.pool == cell.dtype else set()
    absent |= set() if cell.shared else {NO_SHARED_PREFIX}
    variants = _cpu_variants() if device.type == "cpu" else {}
    return {who: make for who, make in (CONTESTANTS | variants).items() if who not in absent}


def targets(cell: Cell) -> dict[str, float]:
    """Return the target ratio of our speed to that of each contestant."""
    goals = {"SDPA, contiguous": 0.98, "FlashInfer": 1.0, "vLLM": 1.0}
    if cell.kind == "decode" and cell.batch == 1 and cell.context >= 32768:
        goals["vLLM"] = 1.15
    if cell.kind == "decode" and cell.pool != cell.dtype:
        goals[UNQUANTIZED] = 1.8
    if cell.shared:
        goals[NO_SHARED_PREFIX] = 0.7 * read_ratio(cell.batch, cell.shared, cell.context - cell.shared)
    return goals
