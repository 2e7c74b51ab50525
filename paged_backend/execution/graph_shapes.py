"""The shapes of steps that are captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paged_kernels.paging import Paging

MAX_ROWS = 512  # maximum rows of a captured step; with more, the device takes longer than the host's launches
# Number of rows at which computing takes as long as reading the weights (H200: 790 TFLOP/s / 4.3 TB/s).
MEMORY_BOUND_ROWS = 192
ROW_STEP = 32  # difference between the sizes of steps with draft tokens of many sequences


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
