"""Attention problems of the kernel benchmark, and the implementations that compute them.

A contestant takes the inputs of a cell and returns a `Call`, which maps the number of a rotation to the output,
[num_tokens, num_heads, head_dim]. What a contestant prepares (a plan, a mask, keys and values in its own layout) is
not timed. It raises Unavailable if it is not installed or does not support the cell.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.execution.upload import DeviceUpload
from paged_backend.kv.cache import CacheLayout, KVCache, LayerShape
from paged_bench._timing import Call, rotations
from paged_kernels.cpu import native
from paged_kernels.cpu import paged_attention as in_pytorch
from paged_kernels.layer_cache import LayerCache, dequantize
from paged_kernels.ops import kv_write, paged_attention
from paged_kernels.paging import Paging, find_prefix_groups, read_ratio

CHECKED = 64  # queries per sequence whose output is compared with fp32, evenly spread
OURS = "paged"
UNQUANTIZED, NO_SHARED_PREFIX = "paged, pool as the query", "paged, prefix read by each"


@dataclass(frozen=True)
class Cell:
    """The sizes of one attention problem, with `query` tokens at the end of `context` tokens."""

    kind: str  # "decode" or "prefill"
    batch: int
    context: int
    query: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    pool: torch.dtype  # type of keys and values
    mixed: bool = False  # contexts of different lengths, `context` being the longest
    shared: int = 0  # number of leading tokens that all contexts share, in the same blocks
    block_size: int = 16

    @property
    def name(self) -> str:
        """Name of the cell's records."""
        query = f" q={self.query}" if self.query > 1 else ""
        pool = "" if self.pool == self.dtype else f" pool {_short(self.pool)}"
        lengths = "<=" if self.mixed else f"={self.shared}+" if self.shared else "="
        heads = f"heads={self.heads}/{self.kv_heads} d={self.head_dim}"
        own = self.context - self.shared
        return f"{self.kind} B={self.batch} ctx{lengths}{own}{query} {heads} {_short(self.dtype)}{pool}"

    @cached_property
    def contexts(self) -> list[int]:
        """Context length of every sequence."""
        if not self.mixed:
            return [self.context] * self.batch
        rnd = random.Random(0)
        drawn = [math.ceil(self.context * min(1.0, rnd.lognormvariate(-1.5, 1))) for _ in range(self.batch)]
        return [max(self.query, length) for length in [self.context, *drawn[1:]]]

    @property
    def kv_bytes(self) -> int:
        """Bytes that must be read: keys, values and scales of every context, shared tokens once."""
        return (sum(self.contexts) - (self.batch - 1) * self.shared) * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        scale = 4 if self.pool != self.dtype else 0
        return self.kv_heads * 2 * (self.head_dim * self.pool.itemsize + scale)

    @property
    def pool_bytes(self) -> int:
        """Bytes of a pool, or of a padded batch, in which every context has the maximum length."""
        return self.batch * self.context * self._token_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, queries and the output."""
        return self.kv_bytes + 2 * self.batch * self.query * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Operations of both matrix products, without those past the causal edge."""
        seen = sum(self.query * (length - self.query) + self.query * (self.query + 1) // 2 for length in self.contexts)
        return 4 * self.heads * self.head_dim * seen


def _short(dtype: torch.dtype) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


class AttentionInputs:
    """The inputs of a cell in shuffled blocks, in as many copies (rotations) as exceed the caches."""

    def __init__(self, cell: Cell, device: torch.device, most_bytes: int) -> None:
        self.cell, self.device = cell, device
        self.count = rotations(cell.pool_bytes, device, most_bytes)
        generator = torch.Generator().manual_seed(0)
        self.width = -(-cell.context // cell.block_size)
        shape = LayerShape(cell.kv_heads, cell.head_dim)
        blocks = self.count * cell.batch * self.width
        kv = KVCache.allocate(CacheLayout.of([shape], cell.block_size, cell.pool), blocks, device)
        (self.cache,) = kv.layers
        tables = torch.randperm(blocks, generator=generator).to(torch.int32)
        tables = tables.view(self.count, cell.batch, self.width)
        tables[:, :, : cell.shared // cell.block_size] = tables[:, :1, : cell.shared // cell.block_size].clone()
        self.tables = tables.to(device)
        tokens = cell.batch * cell.query
        self.query = torch.randn(tokens, cell.heads, cell.head_dim, dtype=cell.dtype, device=device)
        self.scale = cell.head_dim**-0.5
        self._fill()

    def _fill(self) -> None:
        """Write random keys and values into every block, in portions."""
        cell, size = self.cell, self.cell.block_size
        step = max(1, (64 << 20) // (size * cell.kv_heads * cell.head_dim * 4))
        for first in range(0, len(self.cache.keys), step):
            slots = torch.arange(first * size, min(first + step, len(self.cache.keys)) * size, device=self.device)
            key, value = torch.randn(
                2, len(slots), cell.kv_heads, cell.head_dim, dtype=cell.dtype, device=self.device
            ).unbind()
            kv_write(key, value, self.cache, slots)

    @cached_property
    def lens(self) -> Tensor:  # [batch]
        return torch.tensor(self.cell.contexts, dtype=torch.int32, device=self.device)

    @cached_property
    def starts(self) -> Tensor:  # [batch + 1]
        return torch.arange(self.cell.batch + 1, dtype=torch.int32, device=self.device) * self.cell.query

    def paging(self, rotation: int) -> Paging:
        """Return the addresses of one copy, without shared prefixes."""
        cell, table = self.cell, self.tables[rotation]
        positions = (self.lens - cell.query)[:, None] + torch.arange(cell.query, device=self.device)
        blocks = table.gather(1, (positions // cell.block_size).long())
        slots = blocks.long() * cell.block_size + positions % cell.block_size
        return Paging(slots.flatten(), table, self.lens, self.starts, cell.query, cell.context)

    def sharing(self, rotation: int) -> Paging:
        """Return the addresses of one copy with shared prefixes, as the engine finds them."""
        cell, paging = self.cell, self.paging(rotation)
        shared = find_prefix_groups(
            self.tables[rotation].cpu().numpy(),
            self.lens.cpu().numpy(),
            np.full(cell.batch, cell.query),
            block_size=cell.block_size,
            group=cell.heads // cell.kv_heads,
        )
        return replace(paging, shared=DeviceUpload(self.device)(shared)) if shared else paging

    def gathered(self, rotation: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values [batch, kv_heads, width * block_size, head_dim], in the query's type or `dtype`."""
        return _gather(self.cache, self.tables[rotation], dtype or self.cell.dtype)

    @property
    def contiguous(self) -> list[tuple[Tensor, ...]]:
        """Keys and values of every copy, [batch, kv_heads, context, head_dim] in contiguous memory."""
        context = self.cell.context
        pairs = (self.gathered(rotation) for rotation in range(self.count))
        return [tuple(tensor[:, :, :context].contiguous() for tensor in pair) for pair in pairs]

    @cached_property
    def mask(self) -> Tensor | None:
        """Attention mask [batch, 1, query, context]; None if every key is visible or a causal mask is enough."""
        cell = self.cell
        if not cell.mixed and cell.query in (1, cell.context):
            return None
        last = (self.lens - cell.query)[:, None] + torch.arange(cell.query, device=self.device)
        return (torch.arange(cell.context, device=self.device) <= last[:, :, None])[:, None]

    def rows(self, output: Tensor) -> Tensor:
        """Pack an output [batch, heads, query, head_dim] into rows."""
        return output.transpose(1, 2).reshape(-1, self.cell.heads, self.cell.head_dim)

    @cached_property
    def batched_query(self) -> Tensor:  # [batch, heads, query, head_dim]
        cell = self.cell
        return self.query.view(cell.batch, cell.query, cell.heads, cell.head_dim).transpose(1, 2).contiguous()


def _gather(cache: LayerCache, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, width = table.shape
    gathered = []
    for pool, scales in cache.pools:
        pages = pool.view(torch.int8)[table.flatten()].view(pool.dtype) if scales is not None else pool[table.flatten()]
        if scales is not None:
            out = torch.empty(pages.shape, dtype=dtype, device=pages.device)
            pages = dequantize(pages, scales[table.flatten()], out)
        pages = pages.view(batch, width, *pool.shape[1:]).transpose(1, 2)
        gathered.append(pages.reshape(batch, pool.shape[1], -1, pool.shape[3]).to(dtype))
    return gathered[0], gathered[1]


def error(prepared: AttentionInputs, output: Tensor) -> float:
    """Return the relative RMS error against attention in fp32, over some sequences and some of their queries."""
    cell = prepared.cell
    sequences = sorted({0, cell.batch // 2, cell.batch - 1})
    rows = torch.linspace(0, cell.query - 1, min(cell.query, CHECKED)).long().to(output.device)
    actual = output.view(cell.batch, cell.query, cell.heads, cell.head_dim)[sequences][:, rows].float()
    expected = torch.stack([_in_fp32(prepared, sequence, rows) for sequence in sequences])
    return float((actual - expected).norm() / expected.norm())


def _in_fp32(prepared: AttentionInputs, sequence: int, rows: Tensor) -> Tensor:  # [rows, heads, head_dim]
    cell = prepared.cell
    context = cell.contexts[sequence]
    keys, values = _gather(prepared.cache, prepared.tables[0, sequence : sequence + 1], torch.float32)
    keys, values = (pool[0, :, :context].repeat_interleave(cell.heads // cell.kv_heads, 0) for pool in (keys, values))
    scores = prepared.batched_query[sequence][:, rows].float() @ keys.transpose(1, 2) * prepared.scale
    future = torch.arange(context, device=rows.device) > (context - cell.query + rows)[:, None]
    return (scores.masked_fill(future, -math.inf).softmax(-1) @ values).transpose(0, 1)


# --- contestants ------------------------------------------------------------------------------------------------------


class Unavailable(Exception):
    """The reason why a contestant does not compute a cell."""


def paged(prepared: AttentionInputs) -> Call:
    """Run our kernel. The first call prepares what the layers of a step share, as in the engine."""
    return _paged(prepared, [prepared.sharing(index) for index in range(prepared.count)])


def paged_by_each(prepared: AttentionInputs) -> Call:
    """Run our kernel without the shared prefix pass: every sequence reads the prefix separately.

    Raises Unavailable on a CPU, where the kernel finds shared blocks itself.
    """
    if prepared.device.type == "cpu":
        raise Unavailable("the C++ kernels always read shared blocks once")
    return _paged(prepared, [prepared.paging(index) for index in range(prepared.count)])


def paged_wide(prepared: AttentionInputs) -> Call:
    """Run our kernel over an unquantized pool."""
    cell = prepared.cell
    wide = AttentionInputs(replace(cell, pool=cell.dtype), prepared.device, 0)
    return _paged(wide, [wide.paging(index) for index in range(wide.count)])


def paged_by(prepared: AttentionInputs, attend: Callable[..., Tensor]) -> Call:
    """Run another of our implementations."""
    return _paged(prepared, [prepared.paging(index) for index in range(prepared.count)], attend)


def _paged(prepared: AttentionInputs, pagings: list[Paging], attend: Callable[..., Tensor] = paged_attention) -> Call:
    return lambda index: attend(prepared.query, prepared.cache, pagings[index % len(pagings)], scale=prepared.scale)


def sdpa(prepared: AttentionInputs) -> Call:
    """Run SDPA on contiguous keys and values: the cost without pages."""
    cell = prepared.cell
    if cell.pool != cell.dtype:
        raise Unavailable("keys and values of one byte")
    kept = prepared.contiguous
    return lambda index: prepared.rows(_attend(prepared, *kept[index]))


def gather_sdpa(prepared: AttentionInputs) -> Call:
    """Copy the pages to contiguous memory, then run SDPA."""

    def call(index: int) -> Tensor:
        keys, values = (tensor[:, :, : prepared.cell.context] for tensor in prepared.gathered(index))
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
    """Run compiled flex_attention on contiguous keys and values, with a block mask that has the lengths."""
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
    kept = prepared.contiguous
    return lambda index: prepared.rows(
        compiled(prepared.batched_query, *kept[index], block_mask=mask, scale=prepared.scale, enable_gqa=True)
    )


def flashinfer(prepared: AttentionInputs) -> Call:
    """Run FlashInfer's paged wrappers, planned once, on copies of our keys and values, as HND.

    The arguments are as for `BatchDecodeWithPagedKVCacheWrapper` and `BatchPrefillWithPagedKVCacheWrapper` in
    FlashInfer 0.6 (docs.flashinfer.ai/api/attention.html). Its workspace is scratch memory of a call.
    """
    module, cell = _installed("flashinfer"), prepared.cell
    if cell.pool != cell.dtype:
        raise Unavailable("a scale for each token and head")
    size = cell.block_size
    pages = [-(-length // size) for length in cell.contexts]
    indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32, device=prepared.device)
    last = torch.tensor([(length - 1) % size + 1 for length in cell.contexts], dtype=torch.int32).to(prepared.device)
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
    pool = (prepared.cache.keys.contiguous(), prepared.cache.values.contiguous())
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
    keys, values = (pool.transpose(1, 2).contiguous() for pool in (prepared.cache.keys, prepared.cache.values))
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
    """Return our implementations for CPUs with fewer instructions, and the implementation without compiled kernels."""
    if not native.levels():
        return {}  # PyTorch is the implementation in use
    levels = [level for level in native.levels() if level not in (native.level(), "amx_emulated")]
    attend = {level: partial(native.paged_attention, level=level) for level in levels}
    every: dict[str, Callable[..., Tensor]] = {**attend, "PyTorch": in_pytorch.paged_attention}
    return {f"paged, {name}": partial(paged_by, attend=attend) for name, attend in every.items()}


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
    """Return the target of our speed relative to each contestant's."""
    goals = {"SDPA, contiguous": 0.98, "FlashInfer": 1.0, "vLLM": 1.0}
    if cell.kind == "decode" and cell.batch == 1 and cell.context >= 32768:
        goals["vLLM"] = 1.15
    if cell.kind == "decode" and cell.pool != cell.dtype:
        goals[UNQUANTIZED] = 1.8
    if cell.shared:
        goals[NO_SHARED_PREFIX] = 0.7 * read_ratio(cell.batch, cell.shared, cell.context - cell.shared)
    return goals
