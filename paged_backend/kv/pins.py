"""Blocks that are pinned for sessions between their turns."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping

from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.pages import NULL
from paged_backend.kv.sequence import Sequence


class Pins:
    """The pinned block tables of each session, the least recently used first.

    The least recently used session is unpinned when the limit is exceeded or when a request needs its blocks. They are
    then cached and may be evicted.
    """

    def __init__(self, blocks: BlockManager, limit: int):
        """limit: maximum number of pinned pages; those of a block that several sessions pin count once."""
        self._blocks = blocks
        self._limit = limit
        self._pinned: OrderedDict[Hashable, list[list[int]]] = OrderedDict()
        self._counts: Counter[int] = Counter()
        self.num_pages = 0  # pinned pages

    @property
    def counts(self) -> Mapping[int, int]:
        """The number of sessions that pin each block."""
        return self._counts

    def __contains__(self, name: Hashable) -> bool:
        """Return whether blocks of a session are pinned."""
        return name in self._pinned

    @property
    def tables(self) -> list[list[int]]:
        """The pinned block tables of all sessions and kinds of layers."""
        return [table for tables in self._pinned.values() for table in tables]

    def pin_and_free(self, name: Hashable, sequence: Sequence) -> None:
        """Pin the full blocks of a sequence that has ended for a session, in place of its former ones, and free the
        others."""
        blocks = self._blocks
        full = sequence.committed // blocks.block_size
        tables = [table[:full] for table in sequence.tables]
        for block in _blocks_of(tables):
            blocks.pool.touch(block)
        self.drop(name)
        self._pinned[name] = tables
        for block in _blocks_of(tables):
            self._counts[block] += 1
            if self._counts[block] == 1:
                self.num_pages += len(blocks.pool.pages_of(block))
        while self.num_pages > self._limit:
            self.drop_oldest()
        blocks.free(sequence)
        if name in self:
            blocks.states.pin(name, sequence)

    def drop(self, name: Hashable) -> None:
        """Unpin the blocks of a session, if it has any."""
        tables = self._pinned.pop(name, [])
        for block in _blocks_of(tables):
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]
                self.num_pages -= len(self._blocks.pool.pages_of(block))
        for table in tables:
            self._blocks.pool.free_table(table)
        self._blocks.states.unpin(name)

    def drop_oldest(self) -> bool:
        """Unpin the blocks of the least recently used session. False if there is none."""
        if not self._pinned:
            return False
        self.drop(next(iter(self._pinned)))
        return True


def _blocks_of(tables: list[list[int]]) -> list[int]:
    return [block for table in tables for block in table if block != NULL]
