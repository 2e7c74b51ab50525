"""The rows of a packed batch and the state slots that they advance, for models with recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class StateChunk(NamedTuple):
    """A chunk of a prompt: consecutive rows of one sequence."""

    first_row: int
    length: int
    slot: int
    is_start: bool  # whether it starts at position 0: from the zero state, whatever the slot holds


@dataclass(frozen=True, eq=False)
class StateDecode:
    """Rows of different sequences that run as one batch."""

    rows: Tensor | None  # [num_rows] int64; None: all rows of the step, in order
    sources: Tensor  # [num_rows] int64: the slots of the states before the rows
    targets: Tensor  # [num_rows] int64: the slots of the states after them


@dataclass(frozen=True, eq=False)
class StateRows:
    """The rows of a step by the slot of their sequence's state.

    A sequence that decodes has one row, then a row for each draft token. The first rows of all these sequences run as
    one batch, then the rows of their first draft tokens, and so on. Every other chunk runs by itself.
    """

    decodes: tuple[StateDecode, ...]  # in order; each reads what the one before has written
    chunks: tuple[StateChunk, ...]


def state_rows(
    slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int], draft_slots: Sequence[Sequence[int]]
) -> StateRows:
    """Return the rows of a step, on the host.

    Args:
        slots: the slot of each sequence's state, in the order of the packed batch.
        starts: the position of the first row of each sequence.
        lengths: the number of rows of each sequence, including draft tokens.
        draft_slots: the slots for the states after each draft token, which are the last rows of a sequence that
            decodes.
    """
    chunks: list[StateChunk] = []
    decodes: list[list[tuple[int, int, int]]] = []  # (row, source, target)
    row = 0
    for slot, start, length, drafts in zip(slots, starts, lengths, draft_slots, strict=True):
        if start > 0 and length == 1 + len(drafts):
            for number, (source, target) in enumerate(zip((slot, slot, *drafts), (slot, *drafts), strict=False)):
                if number == len(decodes):
                    decodes.append([])
                decodes[number].append((row + number, source, target))
        else:
            assert not drafts, "draft tokens in a chunk of a prompt"
            chunks.append(StateChunk(row, length, slot, start == 0))
        row += length
    has_all_rows = not chunks and len(decodes) == 1
    return StateRows(tuple(_decode(triples, has_all_rows) for triples in decodes), tuple(chunks))


def _decode(triples: list[tuple[int, int, int]], has_all_rows: bool) -> StateDecode:
    rows, sources, targets = torch.tensor(triples, dtype=torch.int64).unbind(1)
    return StateDecode(None if has_all_rows else rows, sources, targets)
