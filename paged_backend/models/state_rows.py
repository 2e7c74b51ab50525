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
    is_start: bool  # whether it starts at position 0, so from the zero state whatever the slot holds


@dataclass(frozen=True, eq=False)
class StateRows:
    """The rows of a step by the slot of their sequence's state. A slot occurs once in a step.

    Sequences that decode have one row each, which all run as one batch. Every other chunk runs by itself.
    """

    decode_slots: Tensor  # [num_decode] int64: the slot of each sequence that decodes
    decode_rows: Tensor | None  # [num_decode] int64: their rows; None: all rows of the step, in order
    chunks: tuple[StateChunk, ...]


def state_rows(slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> StateRows:
    """Return the rows of a step, on the host.

    Args:
        slots: the slot of each sequence's state, in the order of the packed batch.
        starts: the position of the first row of each.
        lengths: the number of rows of each.
    """
    decode_slots, decode_rows, chunks, row = [], [], [], 0
    for slot, start, length in zip(slots, starts, lengths, strict=True):
        if length == 1 and start > 0:
            decode_slots.append(slot)
            decode_rows.append(row)
        else:
            chunks.append(StateChunk(row, length, slot, start == 0))
        row += length
    return StateRows(
        torch.tensor(decode_slots, dtype=torch.int64),
        torch.tensor(decode_rows, dtype=torch.int64) if chunks else None,
        tuple(chunks),
    )
