"""Blocks and entries for tests of the disk tier."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.api.request import Origin
from paged_backend.kv.content import BlockKey, Entry, PrefixParent

ORIGIN = Origin("")
LAYOUT = [torch.zeros(2, 3), torch.zeros(1, dtype=torch.bfloat16)]
LAYOUTS = [LAYOUT, LAYOUT[:1]]  # of two kinds of layers


def key_of(*tokens: int, before: BlockKey | PrefixParent = ORIGIN, kind: int = 0) -> BlockKey:
    """Return the key of a block with these tokens."""
    return BlockKey(Entry(before.entry if isinstance(before, BlockKey) else before, tokens), kind)


def prefix(count: int, parent: PrefixParent = ORIGIN) -> list[BlockKey]:
    """Return the keys of a prefix of `count` blocks."""
    keys: list[BlockKey] = []
    for index in range(count):
        parent = Entry(parent, (index, index))
        keys.append(BlockKey(parent))
    return keys


def content(value: float) -> list[Tensor]:
    """Return the tensors of a block, filled with a value."""
    return [torch.full((2, 3), float(value)), torch.full((1,), float(value), dtype=torch.bfloat16)]
