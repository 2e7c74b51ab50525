"""From a plan of integers to the tensors of one packed row of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.paging import Paging
from paged_backend.plan import Chunk, Plan
from paged_backend.sampler import SamplingBatch, prepare


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Every chunk of a step, end to end in one row."""

    input_ids: Tensor  # [1, num_tokens] int64
    position_ids: Tensor  # [1, num_tokens] int64
    paging: Paging
    sample_rows: Tensor  # [num_samples] int64: the rows whose logits are wanted
    repeats: Tensor | None  # [num_samples] int64: how many sequences draw from each; None: one
    sampling: SamplingBatch


def pack(plan: Plan, *, block_size: int, device: torch.device) -> PackedBatch:
    """Pack a plan. Everything is laid out on the host, then moved once."""
    chunks = plan.chunks
    starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    lengths = np.fromiter((chunk.length for chunk in chunks), np.int64, len(chunks))
    query_starts = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lengths)
    tables = _block_tables(chunks)
    owner = np.repeat(np.arange(len(chunks)), lengths)
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    drawing = [sequence for chunk in chunks for sequence in chunk.draws]
    counts = np.fromiter((len(chunk.draws) for chunk in chunks), np.int64, len(chunks))
    sample_rows = (query_starts[1:] - 1)[counts > 0]

    def move(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype, non_blocking=True)

    paging = Paging(
        slots=move(slots, torch.int64),
        block_tables=move(tables, torch.int32),
        context_lens=move(starts + lengths, torch.int32),
        query_starts=move(query_starts, torch.int32),
        max_query_len=int(lengths.max()),
        max_context_len=int((starts + lengths).max()),
    )
    return PackedBatch(
        input_ids=move(_tokens(chunks), torch.int64)[None],
        position_ids=move(positions, torch.int64)[None],
        paging=paging,
        sample_rows=move(sample_rows, torch.int64),
        repeats=move(counts[counts > 0], torch.int64) if (counts > 1).any() else None,
        sampling=prepare(drawing, device),
    )


def _tokens(chunks: tuple[Chunk, ...]) -> np.ndarray:
    tokens = [t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.length]]
    return np.array(tokens, dtype=np.int64)


def _block_tables(chunks: tuple[Chunk, ...]) -> np.ndarray:  # [num_seqs, max_blocks] int32
    width = max(len(chunk.sequence.blocks) for chunk in chunks)
    tables = np.zeros((len(chunks), width), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.sequence.blocks)] = chunk.sequence.blocks
    return tables
