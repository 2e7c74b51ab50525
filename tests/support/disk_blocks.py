"""Blocks and entries for tests of the disk tier."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.api.request import Origin
from paged_backend.scheduling.content import Entry, PrefixParent

ORIGIN = Origin("")
LAYOUT = [torch.zeros(2, 3), torch.zeros(1, dtype=torch.bfloat16)]


def entry(*tokens: int, before: PrefixParent = ORIGIN) -> Entry:
    """Return the index entry of a block with these tokens."""
    return Entry(before, tokens)


def content(value: float) -> list[Tensor]:
    """Return the tensors of a block, filled with a value."""
    return [torch.full((2, 3), float(value)), torch.full((1,), float(value), dtype=torch.bfloat16)]
