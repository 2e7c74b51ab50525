"""CUDA graphs of steps: captured once for a set of sizes, then replayed with one launch instead of hundreds.

A graph reads its inputs from fixed memory, so a step of n rows is padded to a captured size and written there. Padding
rows belong to padding sequences, which have no context, and they write no keys and values. Context lengths are not part
of a graph; it is captured for the longest.

    rows           0 ... n-1 | n ... size-1
    slots          as packed | -1             nothing is written
    context_lens   as packed | 0              nothing is read
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from paged_backend.execution.batch import PackedBatch, UniformBatch, resolve_placeholders
from paged_backend.execution.upload import DeviceUpload
from paged_backend.sampling.sampler import SamplingBatch
from paged_kernels.cascade import MAX_GROUPS
from paged_kernels.paging import Paging, SharedPrefixes

log = logging.getLogger("paged_llm")

MAX_ROWS = 512  # maximum rows of a captured step; with more, the device takes longer than the host's launches
# Number of rows at which computing takes as long as reading the weights (H200: 790 TFLOP/s / 4.3 TB/s).
MEMORY_BOUND_ROWS = 192
ROW_STEP = 32  # difference between the sizes of steps with draft tokens of many sequences
NO_ROWS = torch.empty(0, dtype=torch.int32)
NO_SHARED_PREFIXES = SharedPrefixes(NO_ROWS, NO_ROWS, torch.zeros(MAX_GROUPS + 1, dtype=torch.int32), 0)
# Captures a function that returns logits, and returns a function that replays it into the same tensor.
GraphCapture: TypeAlias = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class GraphShape(NamedTuple):
    """The steps that one graph can run."""

    seqs: int  # sequences, including padding
    rows: int  # rows, including padding
    queries: int  # maximum rows per sequence
    shared: bool = False  # whether rows share prefixes

    @property
    def rows_per_seq(self) -> int:
        """The rows of each padding sequence, except for the last ones."""
        return self.rows // self.seqs

    def fits(self, paging: Paging) -> bool:
        """Return whether a step fits, with a padding sequence for every padding row. Attention may return NaN for a
        row that belongs to no sequence."""
        rows, seqs = self.rows - len(paging.slots), self.seqs - paging.num_seqs
        same_kind = paging.max_query_len <= self.queries and (paging.shared is not None) == self.shared
        return same_kind and 0 <= rows <= seqs * self.rows_per_seq


def capture_batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the decode batch sizes to capture. They are dense enough that padding costs little, but few enough to
    limit memory and start-up time."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, MAX_ROWS + 1, 16)]
    largest = min(max_num_seqs, steps[-1])
    return [*(size for size in steps if size < largest), largest]


def graph_shapes(
    max_num_seqs: int, max_num_batched_tokens: int, *, queries: int = 1, shared: bool = False
) -> list[GraphShape]:
    """Return the shapes to capture, the largest first, so that the others fit into its memory.

    queries: maximum rows per sequence, which is 1 plus the number of draft tokens. shared: also capture shapes for
    steps with shared prefixes.

    Besides decode steps there are two kinds of steps with draft tokens. With few sequences, every sequence is padded to
    `queries` rows (`batch.UniformBatch`): extra rows are free as long as reading the weights takes longer, and
    attention is partitioned for the actual number of sequences. With many sequences, often only some have draft tokens.
    Then rows cost time, so sequences are not padded and a shape allows up to one sequence per row; attention has enough
    work for any partition. The second kind also runs the steps that cannot be padded to the first.
    """
    decode = [GraphShape(size, size, 1) for size in capture_batch_sizes(max_num_seqs)]
    few, many = [], []
    if queries > 1:
        few = [
            GraphShape(shape.seqs, shape.seqs * queries, queries)
            for shape in decode
            if shape.seqs * queries <= MEMORY_BOUND_ROWS
        ]
        most = min(MAX_ROWS, max_num_seqs * queries, max_num_batched_tokens)
        many = [GraphShape(size, size, queries) for size in range(ROW_STEP, most + ROW_STEP, ROW_STEP)]
    sharing = [
        shape._replace(shared=True)
        for sort in (decode, many)
        for shape in sort
        if shared and (shape.rows & (shape.rows - 1) == 0 or shape is sort[-1])
    ]
    return _largest_first([*decode, *few, *many, *sharing])


def draft_shapes(shapes: Sequence[GraphShape]) -> list[GraphShape]:
    """Return the shapes that a draft model runs by itself: one token per sequence."""
    return [shape for shape in shapes if shape.queries == 1 and not shape.shared]


def largest_shapes(shapes: Sequence[GraphShape], count: int) -> list[GraphShape]:
    """Return the `count` largest shapes of each kind. Shapes of one kind differ only in size."""
    sorts: dict[tuple[object, ...], list[GraphShape]] = {}
    for shape in _largest_first(shapes):
        sorts.setdefault((shape.queries, shape.shared, shape.rows_per_seq), []).append(shape)
    return _largest_first([shape for sort in sorts.values() for shape in sort[:count]])


def _largest_first(shapes: Sequence[GraphShape]) -> list[GraphShape]:
    return sorted(shapes, key=lambda shape: (shape.rows, shape), reverse=True)


@dataclass(frozen=True, eq=False)
class _StaticInputs:
    """The inputs that every replay overwrites, in one buffer."""

    input_ids: Tensor  # [1, rows] int64
    position_ids: Tensor  # [1, rows] int64
    slots: Tensor  # [rows] int64
    context_lens: Tensor  # [seqs] int32
    query_starts: Tensor  # [seqs + 1] int32
    shared: SharedPrefixes | None

    @classmethod
    def padded(cls, input_ids: Tensor, position_ids: Tensor, paging: Paging, shape: GraphShape) -> _StaticInputs:
        """Return a step's inputs, padded to a shape."""
        rows, seqs, shared = len(paging.slots), paging.num_seqs, paging.shared
        more_rows, more_seqs = (0, shape.rows - rows), (0, shape.seqs - seqs)
        if shared:
            shared = replace(shared, lens=pad(shared.lens, more_seqs), members=pad(shared.members, more_seqs))
        starts = paging.query_starts
        ends = torch.arange(1, more_seqs[1] + 1, dtype=starts.dtype, device=starts.device) * shape.rows_per_seq + rows
        return cls(
            pad(input_ids, more_rows),
            pad(position_ids, more_rows),
            pad(paging.slots, more_rows, value=-1),
            pad(paging.context_lens, more_seqs),
            torch.cat((starts, ends.clamp(max=shape.rows))),
            shared,
        )

    @classmethod
    def all_padding(cls, shape: GraphShape) -> _StaticInputs:
        """Return inputs that consist of padding."""
        ids, none = torch.empty(1, 0, dtype=torch.int64), NO_ROWS
        shared = NO_SHARED_PREFIXES if shape.shared else None
        return cls.padded(ids, ids, Paging(ids[0], none[:, None], none, NO_ROWS.new_zeros(1), 1, 0, shared), shape)


@dataclass(frozen=True, eq=False)
class _CapturedGraph:
    buffer: Tensor  # [bytes] uint8: the _StaticInputs that the graph reads
    replay: Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class _StepUpload:
    """The tensors that the host uploads for one replay. The first part goes to the graph's buffer."""

    inputs: _StaticInputs
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    sample_rows: Tensor | None  # None: every row
    logit_rows: Tensor | None
    sampling: SamplingBatch


@dataclass(frozen=True, eq=False)
class ForwardOutput:
    """The result of a forward pass on the device, with the inputs of sampling."""

    logits: Tensor  # [num_samples, vocab]; if from a graph, valid until the next replay
    logit_rows: Tensor | None
    sampling: SamplingBatch
    draft_ids: Tensor | None = None  # [num_tokens] int64: the batch's tokens, if a draft model proposed some of them
    hidden: Tensor | None = None  # [num_hidden, hidden_size] float32, for hidden_rows of the batch


class Graphs:
    """Captured graphs of one model, which share static inputs if possible."""

    def __init__(
        self,
        forward: Callable[[PackedBatch], Tensor],
        previous: Tensor,
        capture: GraphCapture,
        shapes: Sequence[GraphShape],
        *,
        max_blocks: int,
        max_context_len: int,
    ):
        """Capture every shape.

        forward: returns the logits of a packed batch. previous: [max_sampled] int64, the tokens that the previous step
        sampled. shapes: the largest first. max_blocks: maximum blocks in a block table. Raises what `forward` or
        `capture` raises for a model that cannot be captured.
        """
        max_seqs, device = max(shape.seqs for shape in shapes), previous.device
        self._tables = torch.zeros(max_seqs, max_blocks, dtype=torch.int32, device=device)
        self._all_rows = torch.arange(max(shape.rows for shape in shapes), device=device)
        self._shapes = sorted(shapes)
        self._captured: dict[GraphShape, _CapturedGraph] = {}
        for shape in shapes:
            padding = _StaticInputs.all_padding(shape)
            buffer = torch.zeros(DeviceUpload.size_of(padding), dtype=torch.uint8, device=device)
            static = DeviceUpload.views(padding, buffer)
            DeviceUpload(device)(padding, head=buffer)
            replay = capture(self._step(forward, previous, static, shape, max_context_len))
            self._captured[shape] = _CapturedGraph(buffer, replay)

    def _step(
        self,
        forward: Callable[[PackedBatch], Tensor],
        previous: Tensor,
        inputs: _StaticInputs,
        shape: GraphShape,
        max_context_len: int,
    ) -> Callable[[], Tensor]:
        # The closure keeps alive every tensor that the graph reads, which the graph itself does not.
        tables, all_rows = self._tables[: shape.seqs], self._all_rows[: shape.rows]

        def run() -> Tensor:
            shared = inputs.shared and replace(inputs.shared, max_len=max_context_len)
            paging = Paging(
                inputs.slots,
                tables,
                inputs.context_lens,
                inputs.query_starts,
                shape.queries,
                max_context_len,
                shared,
            )
            ids = resolve_placeholders(inputs.input_ids, previous)
            return forward(PackedBatch(ids, inputs.position_ids, paging, all_rows, None, SamplingBatch(), False))

        return run

    @property
    def uniform(self) -> UniformBatch | None:
        """The padding of steps with draft tokens, if such shapes are captured."""
        few = [shape for shape in self._shapes if shape.rows_per_seq > 1]
        return UniformBatch(few[-1].queries, few[-1].seqs) if few else None

    def find(self, paging: Paging) -> GraphShape | None:
        """Return the smallest captured shape, by sequences, that a step fits into; None if there is none."""
        first = bisect_left(self._shapes, (paging.num_seqs,))
        return next((shape for shape in self._shapes[first:] if shape.fits(paging)), None)

    def replay(self, shape: GraphShape, batch: PackedBatch, upload: DeviceUpload) -> ForwardOutput:
        """Run a batch that fits a captured shape."""
        paging = batch.paging
        count, captured = len(paging.slots), self._captured[shape]
        sample_rows = None if len(batch.sample_rows) == count else batch.sample_rows
        inputs = _StaticInputs.padded(batch.input_ids, batch.position_ids, paging, shape)
        step = _StepUpload(inputs, paging.block_tables, sample_rows, batch.logit_rows, batch.sampling)
        step = upload(step, head=captured.buffer)
        tables = step.block_tables
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        logits = captured.replay()
        logits = logits[:count] if step.sample_rows is None else logits[step.sample_rows]
        return ForwardOutput(logits, step.logit_rows, step.sampling)


def graph_capture(device: torch.device) -> GraphCapture | None:
    """Return the object that captures graphs on a device; None for a device without graphs."""
    return CudaGraphCapture() if device.type == "cuda" else None


class CudaGraphCapture:
    """Captures CUDA graphs that share one memory pool and one tensor for logits, which the first and largest graph
    allocates. The logits must be used before the next replay of any graph."""

    def __init__(self) -> None:
        self._stream = _capture_stream(torch.cuda.current_device())
        self._pool: Any = None
        self._logits: Tensor | None = None

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            logits = step()
            return logits if self._logits is None else self._logits[: len(logits)].copy_(logits)

        expected = self._warm_up(run).clone()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads' calls, such as NCCL's queries of its events, must not invalidate the capture.
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

    def _warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Run the step twice, so that the initialization in its first call is not captured."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
            with forbid_synchronization():
                logits = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return logits


@contextmanager
def forbid_synchronization() -> Iterator[None]:
    """Raise RuntimeError if the host waits for the GPU. Used before a capture, because after a capture that fails for
    this reason PyTorch before 2.12 never frees its memory and raises in every later `empty_cache`."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream that all captures of a process share, because PyTorch keeps a cuBLAS workspace (32 MiB on
    Hopper) for each stream that has run a matrix product."""
    return torch.cuda.Stream(device)
