"""CUDA graphs of steps: captured once for a set of sizes, then replayed with one launch instead of hundreds.

A graph reads its inputs from fixed memory, so a step of n rows is padded to a captured size and written there. Padding
rows belong to padding sequences, which have no context, and they write no keys and values. Context lengths are not part
of a graph; it is captured for the longest. The graphs of decode steps and of steps with chunks of prompts also sample.
If any row has penalties or constraints, all rows are sampled again from the graph's logits.

    rows           0 ... n-1 | n ... size-1
    slots          as packed | -1             nothing is written
    context_lens   as packed | 0              nothing is read

In a step with chunks of prompts only the last row of a chunk is sampled, and none of a chunk that ends before its
prompt. Its graph computes logits for one row per captured sequence:

    sample_rows    as packed | 0              logits that are not used
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from paged_backend.execution.batch import PackedBatch, UniformBatch, resolve_placeholders
from paged_backend.execution.upload import DeviceUpload
from paged_backend.sampling.sampler import SamplingBatch, pad_metadata, resolve_tokens
from paged_kernels.launch import Counters, own_counters
from paged_kernels.ops import sample, step_inputs
from paged_kernels.paging import MAX_GROUPS, Paging, SharedPrefixes
from paged_kernels.sampling_metadata import SamplingMetadata

log = logging.getLogger("paged_llm")

MAX_ROWS = 512  # maximum rows of a captured step; with more, the device takes longer than the host's launches
# Number of rows at which computing takes as long as reading the weights (H200: 790 TFLOP/s / 4.3 TB/s).
MEMORY_BOUND_ROWS = 192
ROW_STEP = 32  # difference between the sizes of steps with draft tokens of many sequences
CHUNK_STEP = 64  # difference between the sizes of steps with chunks of prompts

NO_ROWS = torch.empty(0, dtype=torch.int32)
NO_SHARED_PREFIXES = SharedPrefixes(NO_ROWS, NO_ROWS, torch.zeros(MAX_GROUPS + 1, dtype=torch.int32), 0)
# Captures a function that returns logits, and returns a function that replays it into the same tensor.
GraphCapture: TypeAlias = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


# --- shapes -----------------------------------------------------------------------------------------------------------


class GraphShape(NamedTuple):
    """The steps that one graph can run."""

    seqs: int  # sequences, including padding
    rows: int  # rows, including padding
    queries: int  # maximum rows per sequence
    shared: bool = False  # whether rows share prefixes
    prompts: bool = False  # whether logits are computed for `seqs` rows, as in steps with chunks of prompts

    @property
    def logits(self) -> int:
        """The number of rows whose logits are computed."""
        return self.seqs if self.prompts else self.rows

    @property
    def is_uniform(self) -> bool:
        """Whether every sequence is padded to `queries` rows (`batch.UniformBatch`)."""
        return self.rows > self.seqs and not self.prompts

    @property
    def kind(self) -> tuple[int, ...]:
        """What shapes that differ only in size have in common."""
        return self.prompts, self.shared, self.is_uniform, 0 if self.prompts else self.queries

    def fits(self, batch: PackedBatch) -> bool:
        """Return whether a batch fits, with padding sequences for all padding rows. Attention may return NaN for a row
        that belongs to no sequence."""
        paging = batch.paging
        rows, seqs = self.rows - len(paging.slots), self.seqs - paging.num_seqs
        same_kind = paging.max_query_len <= self.queries and (paging.shared is not None) == self.shared
        return same_kind and 0 <= rows <= seqs * self.queries and len(batch.sample_rows) <= self.logits


def capture_batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the decode batch sizes to capture. They are dense enough that padding costs little, but few enough to
    limit memory and start-up time."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, MAX_ROWS + 1, 16)]
    largest = min(max_num_seqs, steps[-1])
    return [*(size for size in steps if size < largest), largest]


def graph_shapes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    queries: int = 1,
    shared: bool = False,
    max_chunk: int = MAX_ROWS,
) -> list[GraphShape]:
    """Return the shapes to capture, the largest first, so that the others fit into its memory.

    queries: maximum rows per sequence that decodes, which is 1 plus the number of draft tokens. shared: also capture
    shapes for steps with shared prefixes. max_chunk: maximum rows of a chunk of a prompt.

    Besides decode steps there are two kinds of steps with draft tokens. With few sequences, every sequence is padded to
    `queries` rows (`batch.UniformBatch`): extra rows are free as long as reading the weights takes longer, and
    attention is partitioned for the actual number of sequences. With many sequences, often only some have draft tokens.
    Then rows cost time, so sequences are not padded and a shape allows up to one sequence per row; attention has enough
    work for any partition. The second kind also runs the steps that cannot be padded to the first.

    Steps with chunks of prompts have up to a quarter as many sequences as rows, for a few chunks and the decode rows
    beside them: attention launches programs for each of them, used or not. One more sequence is for padding.
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
    most = min(MAX_ROWS, max_num_batched_tokens)
    prompts = [
        GraphShape(min(max_num_seqs, max(1, rows // 4)) + 1, rows, min(rows, max_chunk), prompts=True)
        for rows in (*range(CHUNK_STEP, most, CHUNK_STEP), most)
        if rows > 1
    ]
    return _largest_first([*decode, *few, *many, *prompts, *sharing])


def without_prompts(shapes: Sequence[GraphShape]) -> list[GraphShape]:
    """Return the shapes of steps without chunks of prompts."""
    return [shape for shape in shapes if not shape.prompts]


def draft_shapes(shapes: Sequence[GraphShape]) -> list[GraphShape]:
    """Return the shapes that a draft model runs by itself: one token per sequence."""
    return [shape for shape in shapes if shape.queries == 1 and not shape.shared]


def largest_shapes(shapes: Sequence[GraphShape], count: int) -> list[GraphShape]:
    """Return the `count` largest shapes of each kind."""
    kinds: dict[tuple[int, ...], list[GraphShape]] = {}
    for shape in _largest_first(shapes):
        kinds.setdefault(shape.kind, []).append(shape)
    return _largest_first([shape for kind in kinds.values() for shape in kind[:count]])


def _largest_first(shapes: Sequence[GraphShape]) -> list[GraphShape]:
    return sorted(shapes, key=lambda shape: (shape.rows, shape), reverse=True)


# --- inputs and results of a captured step ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _StaticInputs:
    """The inputs that every replay overwrites, one after the other in one buffer."""

    input_ids: Tensor  # [1, rows] int64; -1 - i is a placeholder for sample i of the previous step
    position_ids: Tensor  # [1, rows] int64
    slots: tuple[Tensor, ...]  # for each page of a block [rows] int64
    context_lens: Tensor  # [seqs] int32
    query_starts: Tensor  # [seqs + 1] int32
    shared: SharedPrefixes | None
    sample_rows: Tensor | None  # [logits] int64: the rows whose logits are computed; None: every row
    sampling: SamplingMetadata | None  # parameters of every row of the logits; None: the graph does not sample
    table_width: Tensor  # [1] int32
    # [up to pages * seqs * max_blocks] int32: a row of table_width entries per page and sequence, page after page. The
    # last field, because its size varies.
    block_tables: Tensor

    @classmethod
    def padded(cls, batch: PackedBatch, shape: GraphShape, sampling: SamplingMetadata | None) -> _StaticInputs:
        """Return a step's inputs, padded to a shape."""
        paging = batch.paging
        rows, seqs, shared = len(paging.slots), paging.num_seqs, paging.shared
        more_rows, more_seqs = (0, shape.rows - rows), (0, shape.seqs - seqs)
        if shared:
            shared = replace(shared, lens=pad(shared.lens, more_seqs), members=pad(shared.members, more_seqs))
        starts = paging.query_starts
        ends = torch.arange(1, more_seqs[1] + 1, dtype=starts.dtype, device=starts.device) * shape.queries + rows
        sample_rows = pad(batch.sample_rows, (0, shape.logits - len(batch.sample_rows))) if shape.prompts else None
        return cls(
            pad(batch.input_ids, more_rows),
            pad(batch.position_ids, more_rows),
            tuple(pad(of_page.slots, more_rows, value=-1) for of_page in batch.pagings),
            pad(paging.context_lens, more_seqs),
            torch.cat((starts, ends.clamp(max=shape.rows))),
            shared,
            sample_rows,
            sampling,
            starts.new_full((1,), paging.block_tables.shape[1]),
            torch.cat([pad(of_page.block_tables, (0, 0, *more_seqs)) for of_page in batch.pagings]).flatten(),
        )

    @classmethod
    def all_padding(cls, shape: GraphShape, num_pages: int, *, samples: bool) -> _StaticInputs:
        """Return inputs that consist of padding, without block tables."""
        ids, none = torch.empty(1, 0, dtype=torch.int64), NO_ROWS
        shared = NO_SHARED_PREFIXES if shape.shared else None
        paging = Paging(ids[0], none[:, None], none, NO_ROWS.new_zeros(1), 1, 0, shared)
        sampling = pad_metadata(None, shape.logits, device=ids.device) if samples else None
        padded = cls.padded(PackedBatch(ids, ids, (paging,) * num_pages, sample_rows=ids[0]), shape, sampling)
        return replace(padded, block_tables=NO_ROWS)


@dataclass(frozen=True, eq=False)
class _StepUpload:
    """The tensors that the host uploads for one replay. The inputs go to the graphs' buffer."""

    inputs: _StaticInputs
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
    tokens: Tensor | None = None  # [num_samples] int64: sampled tokens, if the graph has sampled them
    replayed: bool = False  # whether it came from a captured graph


# --- capture and replay -----------------------------------------------------------------------------------------------


class Graphs:
    """Captured graphs of one model, which share a buffer for their inputs.

    A graph that samples contains everything from the inputs, which arrive in one copy, to the sampled tokens.
    """

    def __init__(
        self,
        forward: Callable[[PackedBatch], Tensor],
        previous: Tensor,
        capture: GraphCapture,
        shapes: Sequence[GraphShape],
        *,
        samples: bool,
        block_size: int,
        max_blocks: int,
        max_context_len: int,
        num_pages: int = 1,
        broadcast_tokens: Callable[[Tensor], None] = lambda tokens: None,
    ):
        """Capture every shape.

        forward: returns the logits of a packed batch. previous: [max_sampled] int64, the tokens that the previous step
        sampled. shapes: the largest first. samples: whether decode steps and steps with chunks of prompts sample, into
        `previous`. max_blocks: maximum blocks in a block table. num_pages: pages of a block. broadcast_tokens: called
        with the sampled tokens. Raises what `forward` or `capture` raises for a model that cannot be captured.
        """
        self._samples, self._previous, self._broadcast_tokens = samples, previous, broadcast_tokens
        self._block_size, self._max_context_len = block_size, max_context_len
        max_seqs, device = max(shape.seqs for shape in shapes), previous.device
        self._num_pages = num_pages
        self._tables = torch.zeros(num_pages * max_seqs, max_blocks, dtype=torch.int32, device=device)
        self._all_rows = torch.arange(max(shape.rows for shape in shapes), device=device)
        self._shapes = sorted(shapes, key=lambda shape: (shape.rows, shape.queries, shape))
        paddings = {
            shape: _StaticInputs.all_padding(shape, num_pages, samples=self._samples_in(shape)) for shape in shapes
        }
        size = max(DeviceUpload.size_of(padding) for padding in paddings.values()) + self._tables.nbytes
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._replays: dict[GraphShape, Callable[[], Tensor]] = {}
        for shape, padding in paddings.items():
            inputs = self._views(padding, shape)
            self._upload(_StepUpload(padding, None, None, SamplingBatch()), DeviceUpload(device))
            self._replays[shape] = capture(self._step(forward, inputs, shape))

    def _samples_in(self, shape: GraphShape) -> bool:
        return self._samples and (shape.queries == 1 or shape.prompts)

    def _views(self, padding: _StaticInputs, shape: GraphShape) -> _StaticInputs:
        """Return a shape's inputs in the buffer, with block tables of the maximum size."""
        tables = NO_ROWS.new_empty(self._num_pages * shape.seqs * self._tables.shape[1])
        return DeviceUpload.views(replace(padding, block_tables=tables), self._buffer)

    def _upload(self, step: _StepUpload, upload: DeviceUpload) -> _StepUpload:
        """Copy a step's tensors to the device, its inputs to the buffer."""
        return upload(step, head=self._buffer[: DeviceUpload.size_of(step.inputs)])

    def _step(
        self, forward: Callable[[PackedBatch], Tensor], inputs: _StaticInputs, shape: GraphShape
    ) -> Callable[[], Tensor]:
        # The closure keeps alive every tensor that the graph reads, which the graph itself does not.
        num_pages, previous = self._num_pages, self._previous
        sample_rows = self._all_rows[: shape.rows] if inputs.sample_rows is None else inputs.sample_rows
        tables = self._tables[: num_pages * shape.seqs]  # the tables of all sequences for each page
        of_page = tables.split(shape.seqs)
        sampled, metadata = previous[: shape.logits], inputs.sampling
        block_size, max_context_len, broadcast_tokens = self._block_size, self._max_context_len, self._broadcast_tokens

        def run() -> Tensor:
            context_lens = inputs.context_lens
            if num_pages > 1:
                context_lens = context_lens.repeat(num_pages)
            ids = step_inputs(
                inputs.input_ids,
                previous,
                tables,
                inputs.block_tables,
                inputs.table_width,
                context_lens,
                block_size=block_size,
            )
            shared = inputs.shared and replace(inputs.shared, max_len=max_context_len)
            pagings = tuple(
                Paging(
                    slots,
                    block_tables,
                    inputs.context_lens,
                    inputs.query_starts,
                    shape.queries,
                    max_context_len,
                    shared,
                )
                for slots, block_tables in zip(inputs.slots, of_page, strict=True)
            )
            logits = forward(PackedBatch(ids, inputs.position_ids, pagings, sample_rows=sample_rows))
            if metadata:
                broadcast_tokens(sample(logits, metadata, out=sampled))
            return logits

        return run

    @property
    def count(self) -> int:
        """The number of captured shapes."""
        return len(self._shapes)

    @property
    def uniform(self) -> UniformBatch | None:
        """The padding of steps with draft tokens, if such shapes are captured."""
        few = [shape for shape in self._shapes if shape.is_uniform]
        return UniformBatch(few[-1].queries, few[-1].seqs) if few else None

    def find(self, batch: PackedBatch) -> GraphShape | None:
        """Return the captured shape with the fewest rows that a batch fits into; None if there is none."""
        first = bisect_left(self._shapes, len(batch.paging.slots), key=lambda shape: shape.rows)
        return next((shape for shape in self._shapes[first:] if shape.fits(batch)), None)

    def replay(self, shape: GraphShape, batch: PackedBatch, upload: DeviceUpload) -> ForwardOutput:
        """Run a batch that fits a captured shape. The graph's own tokens are used if every sample has a row of the
        logits by itself, and unchanged logits."""
        count, sampling, tokens, metadata = len(batch.sample_rows), batch.sampling, None, None
        has_own_rows = shape.prompts or count == len(batch.paging.slots)  # the logits are those of the sampled rows
        sample_rows = None if has_own_rows else batch.sample_rows
        if self._samples_in(shape):
            if has_own_rows and batch.logit_rows is None and not sampling.changes_logits:
                tokens, metadata = self._previous[:count], sampling.metadata
                sampling = replace(sampling, metadata=None)
            metadata = pad_metadata(metadata, shape.logits, device=batch.input_ids.device)
        inputs = _StaticInputs.padded(batch, shape, metadata)
        step = self._upload(_StepUpload(inputs, sample_rows, batch.logit_rows, sampling), upload)
        sampling = step.sampling
        if batch.uses_previous_step:  # before the graph overwrites the previous step's tokens
            sampling = resolve_tokens(sampling, partial(resolve_placeholders, previous=self._previous))
        logits = self._replays[shape]()
        logits = logits[:count] if step.sample_rows is None else logits[step.sample_rows]
        return ForwardOutput(logits, step.logit_rows, sampling, tokens=tokens, replayed=True)


def graph_capture(device: torch.device) -> GraphCapture | None:
    """Return the object that captures graphs on a device; None for a device without graphs."""
    return CudaGraphCapture() if device.type == "cuda" else None


class CudaGraphCapture:
    """Captures CUDA graphs that share one memory pool and one tensor for logits, which the first graph with the most
    logits allocates. The logits must be used before the next replay of any graph."""

    def __init__(self) -> None:
        self._stream = _capture_stream(torch.cuda.current_device())
        self._pool: Any = None
        self._logits: Tensor | None = None
        self._counters: Counters = {}

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with own_counters(self._counters):
            return self._captured(step)

    def _captured(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            logits = step()
            shared = None if self._logits is None else self._logits[: len(logits)]
            return logits if shared is None or len(shared) < len(logits) else shared.copy_(logits)

        expected = self._warm_up(run).clone()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads' calls, such as NCCL's queries of its events, must not invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = run()
        self._pool = graph.pool()
        if self._logits is None or len(self._logits) < len(logits):
            self._logits = logits

        replay = partial(_replay, graph, logits, self._counters)
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


def _replay(graph: torch.cuda.CUDAGraph, logits: Tensor, counters: Counters) -> Tensor:
    """Run a graph. counters: memory of its kernels, which is kept for it."""
    graph.replay()
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
