"""Blocks and entries for tests of the disk tier."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.api.request import Origin
from paged_backend.kv.content import BlockKey, Entry, PrefixParent
from paged_backend.kv.stores.block_file import BlockFormat

ORIGIN = Origin("")
PAGE_BYTES = 48
FORMAT = BlockFormat([2, 1], PAGE_BYTES)  # of two kinds of layers


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


def content(value: int) -> Tensor:
    """Return a block of the first kind, filled with a value."""
    return torch.full((2, PAGE_BYTES), value, dtype=torch.uint8)
