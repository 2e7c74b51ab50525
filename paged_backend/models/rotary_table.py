"""Rotary embeddings that are looked up in a table.

The angles of a position never change (`rope.py`). A step therefore gathers one row per token, in one operation instead
of the nine that compute sines and cosines.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_BYTES = 1 << 27  # 2**20 positions of 32 pairs, or 131,072 of 128, in 16 bits
CHUNK = 4096  # positions that are computed at a time


class RotaryTable:
    """The `forward` of a rotary embedding, with a table [positions, 2 * head_dim]: cosines, then sines."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [*position_ids.shape, head_dim]."""
        cos, sin = F.embedding(position_ids, self._table).chunk(2, dim=-1)
        return cos, sin


def look_up_angles(decoder: Any, positions: int | None, dtype: torch.dtype) -> None:
    """Make a decoder's rotary embedding look its angles up, if the table is not too large.

    Args:
        decoder: a decoder of transformers with an unmodified `rotary_emb`.
        positions: the number of positions; None: unknown, which leaves the embedding as it is.
        dtype: type of the hidden states.
    """
    if positions is None:
        return
    if table := rotary_table(decoder.rotary_emb, positions, decoder.norm.weight.data.new_empty(0, dtype=dtype)):
        decoder.rotary_emb.forward = table


@torch.no_grad()
def rotary_table(module: nn.Module, positions: int, x: Tensor) -> RotaryTable | None:
    """Return a table of what a rotary embedding computes, or None if it would exceed MAX_BYTES.

    Args:
        module: called with x and position ids, as the rotary embeddings of transformers.
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
