"""The rows of a packed batch and the states that they advance, for models with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

# Takes blocks with states; returns their pages [num_blocks, pages of a block].
PageRows: TypeAlias = Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True, eq=False)
class StateChunk:
    """A chunk of a prompt: consecutive rows of one sequence."""

    first_row: int
    length: int
    is_start: bool  # whether it starts at position 0: from the zero state, whatever the block holds
    pages: Tensor  # [1, pages of a block] int64: the pages of the sequence's states


@dataclass(frozen=True, eq=False)
class StateDecode:
    """Rows of different sequences that run as one batch."""

    rows: Tensor | None  # [num_rows] int64; None: all rows of the step, in order
    sources: Tensor  # [num_rows, pages of a block] int64: the pages of the states before the rows
    targets: Tensor | None  # the pages of the states after them; None: the same


@dataclass(frozen=True, eq=False)
class StateRows:
    """The rows of a step by the states of their sequence.

    A sequence that decodes has one row, then a row for each draft token. The first rows of all these sequences run as
    one batch, then the rows of their first draft tokens, and so on. Every other chunk runs by itself.
    """

    decodes: tuple[StateDecode, ...]  # in order; each reads what the one before has written
    chunks: tuple[StateChunk, ...]


def state_rows(
    blocks: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    draft_blocks: Sequence[Sequence[int]],
    page_rows: PageRows,
) -> StateRows:
    """Return the rows of a step, on the host.

    Args:
        blocks: the block of each sequence's states, in the order of the packed batch.
        starts: the position of the first row of each sequence.
        lengths: the number of rows of each sequence, including draft tokens.
        draft_blocks: the blocks for the states after each draft token, which are the last rows of a sequence that
            decodes.
        page_rows: returns the pages of blocks.
    """

    def pages(of_blocks: Sequence[int]) -> Tensor:
        return torch.from_numpy(page_rows(of_blocks).astype(np.int64))

    chunks: list[StateChunk] = []
    decodes: list[list[tuple[int, int, int]]] = []  # (row, source, target)
    row = 0
    for block, start, length, drafts in zip(blocks, starts, lengths, draft_blocks, strict=True):
        if start > 0 and length == 1 + len(drafts):
            for number, (source, target) in enumerate(zip((block, block, *drafts), (block, *drafts), strict=False)):
                if number == len(decodes):
                    decodes.append([])
                decodes[number].append((row + number, source, target))
        else:
            assert not drafts, "draft tokens in a chunk of a prompt"
            chunks.append(StateChunk(row, length, start == 0, pages([block])))
        row += length
    has_all_rows = not chunks and len(decodes) == 1
    batches = []
    for triples in decodes:
        rows, sources, targets = zip(*triples, strict=True)
        batches.append(
            StateDecode(
                None if has_all_rows else torch.tensor(rows),
                pages(sources),
                None if sources == targets else pages(targets),
            )
        )
    return StateRows(tuple(batches), tuple(chunks))
