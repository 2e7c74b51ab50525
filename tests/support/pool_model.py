"""A simple model of a block pool, made of sets and dicts that are searched one by one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class Content(NamedTuple):
    """The content of a full block."""

    key: tuple[int, tuple[int, ...]]  # salt, and all tokens up to the block's end
    parent: tuple[int, tuple[int, ...]]  # salt, and all tokens up to its beginning
    tokens: tuple[int, ...]


class PoolModel:
    def __init__(self, count: int, *, caching: bool):
        self.caching = caching
        self.free = set(range(count))
        self.cached: dict[int, None] = {}  # cached blocks; the first is evicted next
        self.holders = [0] * count
        self.moving = [0] * count  # references of each block that copies and moves hold
        self.known: dict[int, Content] = {}
        self.digests: dict[int, list[int]] = {}  # expected slots of an indexed block
        self.scores: dict[int, tuple[int, bool, int]] = {}  # top tokens, fingerprints, and a token of indexed blocks
        self._by_key: dict[Hashable, int] = {}

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.cached)

    @property
    def states(self) -> str:
        marks = [".", *"123456789"]
        marks = [marks[count] if count < 10 else "+" for count in self.holders]
        for block in self.cached:
            marks[block] = "c"
        return "".join(marks)

    def hold(self, block: int) -> None:
        assert block not in self.free, "a free block is held"
        self.cached.pop(block, None)
        self.holders[block] += 1

    def drop(self, block: int) -> None:
        self.holders[block] -= 1
        assert self.holders[block] >= self.moving[block] >= 0
        if not self.holders[block]:
            if block in self.known:
                self.cached[block] = None
            else:
                self.free.add(block)

    def lock(self, block: int) -> None:
        self.hold(block)
        self.moving[block] += 1

    def unlock(self, block: int) -> None:
        self.moving[block] -= 1
        self.drop(block)

    def is_shared(self, block: int) -> bool:
        return self.holders[block] - self.moving[block] > 1

    def take(self, block: int) -> bool:
        """Follow the allocation of a block: a free one, or else the least recently used cached one. Return whether it
        was cached."""
        assert block in self.free if self.free else block == next(iter(self.cached)), f"block {block} was not next"
        evicted = not self.free
        self.free.discard(block)
        self.cached.pop(block, None)
        self.holders[block] = 1
        return evicted

    def find(self, content: Content) -> int | None:
        return self._by_key.get(content.key)

    def know(self, block: int, content: Content, digests: list[int]) -> bool:
        if block in self.known or content.key in self._by_key:
            return False
        self.known[block], self.digests[block], self._by_key[content.key] = content, digests, block
        return True

    def forget(self, block: int) -> tuple[Content, list[int]]:
        content = self.known.pop(block)
        self.scores.pop(block, None)
        del self._by_key[content.key]
        return content, self.digests.pop(block)

    def score(self, block: int, num_top: int, digest: bool, token: int) -> None:
        known, had, _ = self.scores.get(block, (0, False, token))
        self.scores[block] = max(num_top, known), digest or had, token

    def most_common(self, parent: Hashable, tokens: tuple[int, ...]) -> int:
        """Return the longest common prefix of these tokens with a block after `parent`."""
        return max((common(one.tokens, tokens) for one in self.known.values() if one.parent == parent), default=0)


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
