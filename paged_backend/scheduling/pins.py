"""Blocks that are pinned for sessions between their turns."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence

from paged_backend.scheduling.block_manager import BlockManager


class Pins:
    """One pinned block table per session, the least recently used first.

    The least recently used table is unpinned when the limit is exceeded or when a request needs its blocks. They are
    then cached and may be evicted.
    """

    def __init__(self, blocks: BlockManager, limit: int):
        """limit: maximum number of pinned blocks, each counted once."""
        self._blocks = blocks
        self._limit = limit
        self._tables: OrderedDict[Hashable, list[int]] = OrderedDict()
        self._pinned: Counter[int] = Counter()

    @property
    def num_blocks(self) -> int:
        return len(self._pinned)

    @property
    def counts(self) -> Mapping[int, int]:
        """The number of sessions that pin each block."""
        return self._pinned

    @property
    def tables(self) -> list[list[int]]:
        return list(self._tables.values())

    def pin(self, name: Hashable, table: Sequence[int]) -> None:
        """Pin these blocks for a session, in place of those that it had."""
        pinned = self._blocks.fork(table)
        self.drop(name)
        self._tables[name] = pinned
        self._pinned.update(pinned)
        while self.num_blocks > self._limit:
            self.drop_oldest()

    def drop(self, name: Hashable) -> None:
        """Unpin the blocks of a session, if it has any."""
        table = self._tables.pop(name, [])
        for block in table:
            self._pinned[block] -= 1
            if not self._pinned[block]:
                del self._pinned[block]
        self._blocks.free(table)

    def drop_oldest(self) -> bool:
        """Unpin the blocks of the least recently used session. False if there is none."""
        if not self._tables:
            return False
        self.drop(next(iter(self._tables)))
        return True
