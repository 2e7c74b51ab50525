"""Steps recorded once for each of some sizes, and replayed: one launch in place of hundreds.

A graph reads its inputs where it was recorded, so a step of n rows is padded to a size and written there. Rows of
padding belong to sequences of padding, which have no context, and write nowhere. Lengths are not part of a graph; it
is recorded for the longest.

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
from typing import Any, NamedTuple

import torch
from paged_kernels.cascade import MAX_GROUPS
from paged_kernels.paging import Paging, SharedPrefixes
from torch import Tensor
from torch.nn.functional import pad

from paged_backend.execution.batch import DeviceUpload, PackedBatch, UniformBatch, resolve_placeholders
from paged_backend.sampling.sampler import SamplingBatch

log = logging.getLogger("paged_llm")

MOST_ROWS = 512  # of a recorded step: with more the device is busy for about as long as the host takes to launch it
FEW_ROWS = 192  # that a GPU multiplies while it reads the weights: 790 TFLOP/s over 4.3 TB/s, on an H200 in 16 bits
STEP = 32  # rows, between the sizes of steps with guesses of many sequences
NO_ROWS = torch.empty(0, dtype=torch.int32)
NOTHING_SHARED = SharedPrefixes(NO_ROWS, NO_ROWS, torch.zeros(MAX_GROUPS + 1, dtype=torch.int32), 0)
GraphCapture = Callable[
    [Callable[[], Tensor]], Callable[[], Tensor]
]  # what runs a function again, into the same tensor


class GraphShape(NamedTuple):
    """The steps that one recording stands for."""

    seqs: int  # these and the rows with those of padding
    rows: int
    queries: int  # of a sequence, at most
    shared: bool = False  # whether rows share prefixes

    @property
    def rows_per_seq(self) -> int:
        """Rows of a sequence of padding, while there are any."""
        return self.rows // self.seqs

    def fits(self, paging: Paging) -> bool:
        """Whether a step fits in, with a sequence of padding for every row of padding: what attention gives for a row
        of nobody could be NaN."""
        rows, seqs = self.rows - len(paging.slots), self.seqs - paging.num_seqs
        alike = paging.max_query_len <= self.queries and (paging.shared is not None) == self.shared
        return alike and 0 <= rows <= seqs * self.rows_per_seq


def capture_batch_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: close together, so that little is computed for padding; as many as are worth the memory
    and the time to start."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, MOST_ROWS + 1, 16)]
    largest = min(max_num_seqs, steps[-1])
    return [*(size for size in steps if size < largest), largest]


def graph_shapes(
    max_num_seqs: int, max_num_batched_tokens: int, *, queries: int = 1, shared: bool = False
) -> list[GraphShape]:
    """What is recorded for steps of up to so many queries of a sequence. The largest first: the others fit into its
    memory. shared: for a few of them also with rows that share prefixes.

    Beside decode steps there are two sorts of steps with guesses. Of few sequences each has `queries` rows, guesses or
    not (`batch.Uniform`): rows cost nothing as long as the weights take longer to read, and attention is cut up for the
    sequences that there are. Of many sequences, of which often only some have a guess, no row is added that is not
    needed, and any row may be a sequence: a row costs something, and attention has work enough however it is cut up.
    The latter also take what cannot be brought to the former.
    """
    decode = [GraphShape(size, size, 1) for size in capture_batch_sizes(max_num_seqs)]
    few, many = [], []
    if queries > 1:
        few = [GraphShape(one.seqs, one.seqs * queries, queries) for one in decode if one.seqs * queries <= FEW_ROWS]
        most = min(MOST_ROWS, max_num_seqs * queries, max_num_batched_tokens)
        many = [GraphShape(size, size, queries) for size in range(STEP, most + STEP, STEP)]
    sharing = [
        one._replace(shared=True)
        for sort in (decode, many)
        for one in sort
        if shared and (one.rows & (one.rows - 1) == 0 or one is sort[-1])
    ]
    return _largest_first([*decode, *few, *many, *sharing])


def draft_shapes(every: Sequence[GraphShape]) -> list[GraphShape]:
    """Of these, what a model that guesses runs by itself: a token of each sequence."""
    return [one for one in every if one.queries == 1 and not one.shared]


def largest(every: Sequence[GraphShape], count: int) -> list[GraphShape]:
    """The `count` largest of each sort: of those that differ in more than size."""
    found: dict[tuple[object, ...], list[GraphShape]] = {}
    for one in _largest_first(every):
        found.setdefault((one.queries, one.shared, one.rows_per_seq), []).append(one)
    return _largest_first([one for sort in found.values() for one in sort[:count]])


def _largest_first(graph_shapes: Sequence[GraphShape]) -> list[GraphShape]:
    return sorted(graph_shapes, key=lambda kind: (kind.rows, kind), reverse=True)


@dataclass(frozen=True, eq=False)
class _Rows:
    """What every step writes whole, in one place."""

    input_ids: Tensor  # [1, rows] int64
    position_ids: Tensor  # [1, rows] int64
    slots: Tensor  # [rows] int64
    context_lens: Tensor  # [seqs] int32
    query_starts: Tensor  # [seqs + 1] int32
    shared: SharedPrefixes | None

    @classmethod
    def of(cls, input_ids: Tensor, position_ids: Tensor, paging: Paging, kind: GraphShape) -> _Rows:
        rows, seqs, shared = len(paging.slots), paging.num_seqs, paging.shared
        more, others = (0, kind.rows - rows), (0, kind.seqs - seqs)
        if shared:
            shared = replace(shared, lens=pad(shared.lens, others), members=pad(shared.members, others))
        starts = paging.query_starts
        ends = torch.arange(1, others[1] + 1, dtype=starts.dtype, device=starts.device) * kind.rows_per_seq + rows
        return cls(
            pad(input_ids, more),
            pad(position_ids, more),
            pad(paging.slots, more, value=-1),
            pad(paging.context_lens, others),
            torch.cat((starts, ends.clamp(max=kind.rows))),
            shared,
        )

    @classmethod
    def of_padding(cls, kind: GraphShape) -> _Rows:
        ids, none = torch.empty(1, 0, dtype=torch.int64), NO_ROWS
        shared = NOTHING_SHARED if kind.shared else None
        return cls.of(ids, ids, Paging(ids[0], none[:, None], none, NO_ROWS.new_zeros(1), 1, 0, shared), kind)


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
class ForwardOutput:
    """What a forward pass gave, and how to draw from it, on the device."""

    logits: Tensor  # [num_samples, vocab]; of a recorded step valid until the next
    draw_rows: Tensor | None
    sampling: SamplingBatch
    draft_ids: Tensor | None = None  # [num_tokens] int64: the batch's tokens, where guesses were made on the device
    hidden: Tensor | None = None  # [num_hidden, hidden_size] float32, of the rows that the batch asks for


class Graphs:
    """Recorded steps, over static inputs that all of them share."""

    def __init__(
        self,
        forward: Callable[[PackedBatch], Tensor],
        drawn: Tensor,
        record: GraphCapture,
        graph_shapes: Sequence[GraphShape],
        *,
        max_blocks: int,
        max_context_len: int,
    ):
        """forward: a packed batch -> logits, whatever its rows. drawn: [max_draws] int64, what the step before drew.
        kinds: the largest first. max_blocks: of a block table. Raises what `forward` or `record` raises for a model
        that cannot be recorded."""
        most, device = max(kind.seqs for kind in graph_shapes), drawn.device
        self._tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device)
        self._every = torch.arange(max(kind.rows for kind in graph_shapes), device=device)
        self._kinds = sorted(graph_shapes)
        self._recorded: dict[GraphShape, _Recorded] = {}
        for kind in graph_shapes:
            rows = _Rows.of_padding(kind)
            buffer = torch.zeros(DeviceUpload.size_of(rows), dtype=torch.uint8, device=device)
            static = DeviceUpload.views(rows, buffer)
            DeviceUpload(device)(rows, head=buffer)
            replay = record(self._step(forward, drawn, static, kind, max_context_len))
            self._recorded[kind] = _Recorded(buffer, replay)

    def _step(
        self,
        forward: Callable[[PackedBatch], Tensor],
        drawn: Tensor,
        rows: _Rows,
        kind: GraphShape,
        max_context_len: int,
    ) -> Callable[[], Tensor]:
        # Whatever it reads must live as long as the recording, which keeps no tensor alive.
        tables, every = self._tables[: kind.seqs], self._every[: kind.rows]

        def run() -> Tensor:
            shared = rows.shared and replace(rows.shared, max_len=max_context_len)
            paging = Paging(
                rows.slots, tables, rows.context_lens, rows.query_starts, kind.queries, max_context_len, shared
            )  # fmt: skip
            ids = resolve_placeholders(rows.input_ids, drawn)
            return forward(PackedBatch(ids, rows.position_ids, paging, every, None, SamplingBatch(), False))

        return run

    @property
    def uniform(self) -> UniformBatch | None:
        """What steps with guesses are packed to, if any are recorded."""
        few = [kind for kind in self._kinds if kind.rows_per_seq > 1]
        return UniformBatch(few[-1].queries, few[-1].seqs) if few else None

    def find(self, paging: Paging) -> GraphShape | None:
        """The recording of the fewest sequences that a step fits into, if there is one."""
        first = bisect_left(self._kinds, (paging.num_seqs,))
        return next((kind for kind in self._kinds[first:] if kind.fits(paging)), None)

    def replay(self, kind: GraphShape, batch: PackedBatch, stage: DeviceUpload) -> ForwardOutput:
        paging = batch.paging
        count, recorded = len(paging.slots), self._recorded[kind]
        wanted = None if len(batch.sample_rows) == count else batch.sample_rows
        rows = _Rows.of(batch.input_ids, batch.position_ids, paging, kind)
        staged = stage(_Step(rows, paging.block_tables, wanted, batch.draw_rows, batch.sampling), head=recorded.buffer)
        tables = staged.block_tables
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        logits = recorded.replay()
        logits = logits[:count] if staged.sample_rows is None else logits[staged.sample_rows]
        return ForwardOutput(logits, staged.draw_rows, staged.sampling)


def graph_capture(device: torch.device) -> GraphCapture | None:
    """What records on this device, if anything does."""
    return CudaGraphCapture() if device.type == "cuda" else None


class CudaGraphCapture:
    """Records into CUDA graphs that share their memory, with the logits in one place, whichever model they are of: that
    of the first, the largest. Whoever replays has used them before the next replay."""

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
            with forbid_synchronization():
                logits = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return logits


@contextmanager
def forbid_synchronization() -> Iterator[None]:
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
