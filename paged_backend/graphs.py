"""Decode steps recorded once for each of some batch sizes, and replayed: one launch in place of hundreds.

A graph reads its inputs where it was recorded, so a step of n rows is padded to the next size and written there. Rows
of padding have no context and write nowhere. Lengths are not part of a graph; it is recorded for the longest.

    rows      0 ... n-1 | n ... size-1
    slots     as packed | -1             nothing is written
    lengths   as packed | 0              nothing is read
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.cascade import MAX_GROUPS
from kernels.paging import Paging, SharedPrefixes
from paged_backend.batch import PackedBatch, Stage, known
from paged_backend.sampler import SamplingBatch

log = logging.getLogger("paged_llm")

NO_ROWS = torch.empty(0, dtype=torch.int32)
NOTHING_SHARED = SharedPrefixes(NO_ROWS, NO_ROWS, torch.zeros(MAX_GROUPS + 1, dtype=torch.int32), 0)
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]  # what runs a function again, into the same tensor


def sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: close together, so that little is computed for padding; as many as are worth the memory
    and the time to start."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    largest = min(max_num_seqs, steps[-1])
    return [*(size for size in steps if size < largest), largest]


def kinds(batch_sizes: Sequence[int], shared: bool) -> list[tuple[int, bool]]:
    """What is recorded for these sizes, and whether its rows share prefixes: that for a few sizes only. The largest
    first: the others fit into its memory."""
    most = max(batch_sizes)
    few = [size for size in batch_sizes if size & (size - 1) == 0 or size == most] if shared else []
    return sorted([*((size, False) for size in batch_sizes), *((size, True) for size in few)], reverse=True)


@dataclass(frozen=True, eq=False)
class _Rows:
    """What every step writes whole, in one place."""

    input_ids: Tensor  # [1, size] int64
    position_ids: Tensor  # [1, size] int64
    slots: Tensor  # [size] int64
    context_lens: Tensor  # [size] int32
    shared: SharedPrefixes | None

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        position_ids: Tensor,
        slots: Tensor,
        context_lens: Tensor,
        shared: SharedPrefixes | None,
        size: int,
    ) -> _Rows:
        more = (0, size - len(slots))
        if shared:
            shared = replace(shared, lens=pad(shared.lens, more), members=pad(shared.members, more))
        return cls(
            pad(input_ids, more),
            pad(position_ids, more),
            pad(slots, more, value=-1),
            pad(context_lens, more),
            shared,
        )


@dataclass(frozen=True, eq=False)
class _Recorded:
    buffer: Tensor  # [bytes] uint8: where it reads its rows
    replay: Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class _Step:
    """One step's upload."""

    rows: _Rows
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    sample_rows: Tensor | None  # None: every row
    draw_rows: Tensor | None
    sampling: SamplingBatch


@dataclass(frozen=True, eq=False)
class Forwarded:
    """What a forward pass gave, and how to draw from it, on the device."""

    logits: Tensor  # [num_samples, vocab]; of a recorded step valid until the next
    draw_rows: Tensor | None
    sampling: SamplingBatch
    guessed: Tensor | None = None  # [num_tokens] int64: the batch's tokens, where guesses were made on the device


class Graphs:
    """Recorded steps, over static inputs that all of them share."""

    def __init__(
        self,
        forward: Callable[[PackedBatch], Tensor],
        drawn: Tensor,
        record: Record,
        batch_sizes: Sequence[int],
        *,
        max_blocks: int,
        max_context_len: int,
        shared: bool = False,
    ):
        """forward: a packed batch -> logits, whatever its rows. drawn: [max_num_seqs] int64, what the step before
        drew. max_blocks: of a block table. shared: record steps whose rows share prefixes, too, for a few of the sizes.
        Raises what `forward` or `record` raises for a model that cannot be recorded."""
        every = kinds(batch_sizes, shared)
        most, device = max(batch_sizes), drawn.device
        empty = torch.empty(0, dtype=torch.int64)
        self._tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._every = torch.arange(most, device=device)
        # By whether rows share prefixes.
        self._sizes = {kind: sorted(size for size, shares in every if shares == kind) for kind in (False, True)}
        self._recorded: dict[tuple[int, bool], _Recorded] = {}
        for size, shares in every:
            rows = _Rows.of(empty[None], empty[None], empty, empty.int(), NOTHING_SHARED if shares else None, size)
            buffer = torch.zeros(Stage.size_of(rows), dtype=torch.uint8, device=device)
            static = Stage.views(rows, buffer)
            Stage(device)(rows, head=buffer)
            replay = record(self._step(forward, drawn, static, size, max_context_len))
            self._recorded[size, shares] = _Recorded(buffer, replay)

    def _step(
        self, forward: Callable[[PackedBatch], Tensor], drawn: Tensor, rows: _Rows, size: int, max_context_len: int
    ) -> Callable[[], Tensor]:
        # Whatever it reads must live as long as the recording, which keeps no tensor alive.
        starts, tables, every = self._starts[: size + 1], self._tables[:size], self._every[:size]

        def run() -> Tensor:
            shared = rows.shared and replace(rows.shared, max_len=max_context_len)
            paging = Paging(rows.slots, tables, rows.context_lens, starts, 1, max_context_len, shared)
            ids = known(rows.input_ids, drawn)
            nothing = SamplingBatch(None, None, None, None)
            return forward(PackedBatch(ids, rows.position_ids, paging, every, None, nothing, False))

        return run

    def fit(self, batch: PackedBatch) -> bool:
        """Whether a batch is a decode step of a size that was recorded."""
        paging = batch.paging
        return paging.max_query_len == 1 and paging.num_seqs <= max(self._sizes[paging.shared is not None], default=0)

    def replay(self, batch: PackedBatch, stage: Stage) -> Forwarded:
        paging = batch.paging
        count, shares = paging.num_seqs, paging.shared is not None
        size = self._sizes[shares][bisect_left(self._sizes[shares], count)]
        recorded = self._recorded[size, shares]
        wanted = None if len(batch.sample_rows) == count else batch.sample_rows
        rows = _Rows.of(batch.input_ids, batch.position_ids, paging.slots, paging.context_lens, paging.shared, size)
        staged = stage(_Step(rows, paging.block_tables, wanted, batch.draw_rows, batch.sampling), head=recorded.buffer)
        tables = staged.block_tables
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        logits = recorded.replay()
        logits = logits[:count] if staged.sample_rows is None else logits[staged.sample_rows]
        return Forwarded(logits, staged.draw_rows, staged.sampling)


def recorder(device: torch.device) -> Record | None:
    """What records on this device, if anything does."""
    return CudaRecorder() if device.type == "cuda" else None


class CudaRecorder:
    """Records into CUDA graphs that share their memory, with the logits in one place: of the first, the largest."""

    def __init__(self) -> None:
        self._stream = _side_stream(torch.cuda.current_device())
        self._pool: Any = None
        self._logits: Tensor | None = None

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            logits = step()
            return logits if self._logits is None else self._logits[: len(logits)].copy_(logits)

        expected = self._rehearse(run).clone()
        graph = torch.cuda.CUDAGraph()
        # thread_local: what another thread does, such as NCCL's, which asks after its events, must not end a recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = run()
        self._pool = graph.pool()
        if self._logits is None:
            self._logits = logits

        def replay() -> Tensor:
            graph.replay()
            return logits

        if not torch.allclose(replay(), expected, rtol=0.01, atol=0.01, equal_nan=True):
            raise RuntimeError("a replayed step gives other logits than one that is run")
        return replay

    def _rehearse(self, run: Callable[[], Tensor]) -> Tensor:
        """Run it twice: what is set up by a first call must not be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
            with no_waits():
                logits = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return logits


@contextmanager
def no_waits() -> Iterator[None]:
    """What waits for the GPU raises RuntimeError. To be tried before a recording: where that fails, PyTorch before 2.12
    keeps its memory for good, and raises at each `empty_cache`."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all recordings of a process: PyTorch keeps cuBLAS's workspace, 32 MiB on Hopper, for each stream that it
    has multiplied on."""
    return torch.cuda.Stream(device)
