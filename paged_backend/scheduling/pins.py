"""Blocks that are kept for sessions between their turns."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence

from paged_backend.scheduling.block_manager import BlockManager


class Pins:
    """One block table for each session, the least recently used first. Past the limit, and where a request needs the
    room, that one is let go of: its blocks are cached then, and may be evicted."""

    def __init__(self, blocks: BlockManager, limit: int):
        """limit: blocks, each counted once."""
        self._blocks = blocks
        self._limit = limit
        self._tables: OrderedDict[Hashable, list[int]] = OrderedDict()
        self._pinned: Counter[int] = Counter()

    @property
    def num_blocks(self) -> int:
        return len(self._pinned)

    @property
    def counts(self) -> Mapping[int, int]:
        """By block how many sessions keep it."""
        return self._pinned

    @property
    def tables(self) -> list[list[int]]:
        return list(self._tables.values())

    def pin(self, name: Hashable, table: Sequence[int]) -> None:
        """Keep these blocks for a session, in place of what it had."""
        kept = self._blocks.fork(table)
        self.drop(name)
        self._tables[name] = kept
        self._pinned.update(kept)
        while self.num_blocks > self._limit:
            self.drop_oldest()

    def drop(self, name: Hashable) -> None:
        table = self._tables.pop(name, [])
        for block in table:
            self._pinned[block] -= 1
            if not self._pinned[block]:
                del self._pinned[block]
        self._blocks.release(table)

    def drop_oldest(self) -> bool:
        """Let go of the blocks of the session whose last turn was the longest ago. False where there is none."""
        if not self._tables:
            return False
        self.drop(next(iter(self._tables)))
        return True
