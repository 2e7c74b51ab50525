"""Blocks that are pinned for sessions between their turns."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.state_slots import StateSlots


class _Pinned(NamedTuple):
    table: list[int]
    start: int  # the first block whose window pages are pinned


class Pins:
    """One pinned block table per session, the least recently used first.

    The least recently used table is unpinned when the limit is exceeded or when a request needs its blocks. They are
    then cached and may be evicted.
    """

    def __init__(self, blocks: BlockManager, limit: int, states: StateSlots):
        """limit: maximum number of pinned blocks, each counted once, or of pages if the layout divides blocks."""
        self._blocks = blocks
        self._limit = limit
        self._states = states
        self._tables: OrderedDict[Hashable, _Pinned] = OrderedDict()
        self._pinned: Counter[int] = Counter()
        self._pinned_windows: Counter[int] = Counter()  # the same for window pages

    @property
    def num_blocks(self) -> int:
        """The number of pinned blocks, or of pages if the layout divides blocks."""
        layout = self._blocks.layout
        return layout.base_pages * len(self._pinned) + layout.window_pages * len(self._pinned_windows)

    @property
    def counts(self) -> Mapping[int, int]:
        """The number of sessions that pin each block."""
        return self._pinned

    def __contains__(self, name: Hashable) -> bool:
        """Return whether blocks of a session are pinned."""
        return name in self._tables

    @property
    def tables(self) -> list[list[int]]:
        return [pinned.table for pinned in self._tables.values()]

    @property
    def starts(self) -> list[int]:
        """For each table, the first block whose window pages it references."""
        return [pinned.start for pinned in self._tables.values()]

    def pin(self, name: Hashable, table: Sequence[int], start: int = 0) -> None:
        """Pin these blocks for a session, and unpin its former ones.

        start: the first block whose window pages are pinned.
        """
        pinned = self._blocks.fork(table, start)
        self.drop(name)
        self._tables[name] = _Pinned(pinned, start)
        self._pinned.update(pinned)
        self._pinned_windows.update(pinned[start:])
        while self.num_blocks > self._limit:
            self.drop_oldest()

    def drop(self, name: Hashable) -> None:
        """Unpin the blocks of a session, if it has any."""
        table, start = self._tables.pop(name, _Pinned([], 0))
        for counts, blocks in ((self._pinned, table), (self._pinned_windows, table[start:])):
            for block in blocks:
                counts[block] -= 1
                if not counts[block]:
                    del counts[block]
        self._blocks.free(table, start)
        self._states.unpin(name)

    def drop_oldest(self) -> bool:
        """Unpin the blocks of the least recently used session. False if there is none."""
        if not self._tables:
            return False
        self.drop(next(iter(self._tables)))
        return True
