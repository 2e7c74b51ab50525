"""Attention cells of the kernel benchmark: their sizes, their inputs, and the error of an output against fp32."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from paged_backend.execution.batch import shared_prefixes
from paged_backend.execution.upload import DeviceUpload
from paged_backend.memory.kv_cache import KVCache, LayerShape
from paged_bench._race import rotations
from paged_kernels.layer_cache import LayerCache, dequantize
from paged_kernels.ops import kv_write
from paged_kernels.paging import Paging

CHECKED = 64  # queries per sequence whose output is compared with fp32, evenly spread


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
        return [max(self.query, one) for one in [self.context, *drawn[1:]]]

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
        seen = sum(self.query * (one - self.query) + self.query * (self.query + 1) // 2 for one in self.contexts)
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
        kv = KVCache.allocate([shape], num_blocks=blocks, block_size=cell.block_size, dtype=cell.pool, device=device)
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
        shared = shared_prefixes(
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
    found = []
    for pool, scales in cache.pools:
        pages = pool.view(torch.int8)[table.flatten()].view(pool.dtype) if scales is not None else pool[table.flatten()]
        if scales is not None:
            out = torch.empty(pages.shape, dtype=dtype, device=pages.device)
            pages = dequantize(pages, scales[table.flatten()], out)
        pages = pages.view(batch, width, *pool.shape[1:]).transpose(1, 2)
        found.append(pages.reshape(batch, pool.shape[1], -1, pool.shape[3]).to(dtype))
    return found[0], found[1]


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
    keys, values = (one[0, :, :context].repeat_interleave(cell.heads // cell.kv_heads, 0) for one in (keys, values))
    scores = prepared.batched_query[sequence][:, rows].float() @ keys.transpose(1, 2) * prepared.scale
    future = torch.arange(context, device=rows.device) > (context - cell.query + rows)[:, None]
    return (scores.masked_fill(future, -math.inf).softmax(-1) @ values).transpose(0, 1)
