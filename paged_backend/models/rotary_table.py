"""Rotary embeddings of fused layers, which are looked up in a table.

The angles of a position never change (`rope.py`). A step therefore gathers one row per token, in one operation instead
of the nine that compute sines and cosines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_BYTES = 1 << 27  # 2**20 positions of 32 pairs, or 131,072 of 128, in 16 bits
CHUNK = 4096  # positions that are computed at a time

Angles: TypeAlias = "tuple[Tensor, Tensor]"  # cosines and sines, [batch, num_tokens, head_dim]


class RotaryTable:
    """A rotary embedding with a table [positions, 2 * head_dim]: cosines, then sines."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, x: Tensor, position_ids: Tensor) -> Angles:
        """Return cosines and sines [*position_ids.shape, head_dim]."""
        cos, sin = F.embedding(position_ids, self._table).chunk(2, dim=-1)
        return cos, sin


class ConvertedAngles:
    """A rotary embedding that returns angles in another form than the kernels take."""

    def __init__(self, module: nn.Module, convert: Callable[[Any], Angles]) -> None:
        self._module, self._convert = module, convert

    def __call__(self, x: Tensor, position_ids: Tensor) -> Angles:
        """Return cosines and sines [*position_ids.shape, head_dim]."""
        return self._convert(type(self._module).forward(self._module, x, position_ids))


def for_both_halves(angles: Angles) -> Angles:
    """Return the angles of one half of a head [..., head_dim / 2] for both of its halves."""
    cos, sin = angles
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def of_complex(rotations: Tensor) -> Angles:
    """Return the angles of complex numbers of absolute value 1, [..., head_dim / 2], for both halves of a head."""
    return for_both_halves((rotations.real, rotations.imag))


class Rotation(NamedTuple):
    """The order of elements that are rotated together: pairs, at 2i and 2i + 1, or halves, at i and i + size / 2."""

    from_pairs: bool
    to_pairs: bool


def look_up_angles(
    rotary: nn.Module, positions: int | None, x: Tensor, convert: Callable[[Any], Angles] | None
) -> Callable[[Tensor, Tensor], Angles]:
    """Return a function like a rotary embedding that looks its angles up, if the table is not too large.

    Args:
        rotary: an unmodified rotary embedding of transformers.
        positions: the number of positions; None: unknown, so there is no table.
        x: a tensor of the type and device of the hidden states.
        convert: returns what the rotary embedding returns as angles; None: it returns angles.
    """
    angles = ConvertedAngles(rotary, convert) if convert else rotary
    return (None if positions is None else rotary_table(angles, positions, x)) or angles


@torch.no_grad()
def rotary_table(module: Callable[[Tensor, Tensor], Angles], positions: int, x: Tensor) -> RotaryTable | None:
    """Return a table of what a rotary embedding computes, or None if it would exceed MAX_BYTES.

    Args:
        module: a rotary embedding of transformers, or a function with its arguments x and position ids.
        positions: the number of positions, from 0 on.
        x: a tensor of the type and device of the hidden states.
    """

    def rows(ids: Tensor) -> Tensor:  # [len(ids), 2 * head_dim]
        return torch.cat(module(x, ids[None]), dim=-1)[0]

    ids = torch.arange(positions, device=x.device)
    first = rows(ids[:1])
    if positions * first.nbytes > MAX_BYTES:
        return None
    table = first.new_empty(positions, first.shape[1])
    for part, chunk in zip(table.split(CHUNK), ids.split(CHUNK), strict=True):
        part.copy_(rows(chunk))
    return RotaryTable(table)
