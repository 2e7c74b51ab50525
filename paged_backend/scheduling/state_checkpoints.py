"""Checkpoints of the states of recurrent layers: copies at the ends of blocks, from which prefixes are continued.

A state belongs to one position: the tokens before it are all in it. A prefix can therefore be continued only from a
position at which the state was copied to a slot of its own. Checkpoints are cached like blocks: they are found by the
content of the last block before them, and the least recently used is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from paged_backend.scheduling.block_pool import BlockPool, allocate_counted
from paged_backend.scheduling.content import Contents, Entry
from paged_backend.scheduling.prefix_cache import CacheHit
from paged_backend.scheduling.sequence import Sequence


class StateCheckpoints:
    """Finds checkpoints by their content, and pins those of sessions. Without a pool, for a model without recurrent
    layers, hits are not restricted."""

    def __init__(
        self,
        pool: BlockPool | None,
        contents: Contents,
        block_size: int,
        num_spare: Callable[[], int],
        *,
        caching: bool,
    ):
        """pool: the slots. contents: the entries of the prefix cache. num_spare: returns the number of available slots
        that no sequence will need."""
        self._pool = pool
        self._contents = contents
        self._block_size = block_size
        self._num_spare = num_spare
        self._caching = caching
        self._pinned: dict[Hashable, int] = {}  # by session

    @property
    def pinned(self) -> list[int]:
        """The slots that sessions pin."""
        return list(self._pinned.values())

    def entry(self, sequence: Sequence, position: int) -> Entry:
        """Return the content of the full block that ends at `position`."""
        count = position // self._block_size
        return self._contents.extend(sequence.chain, sequence.tokens, count, self._block_size)

    def restrict(self, hit: CacheHit, entries: list[Entry]) -> CacheHit:
        """Return the longest part of a hit that ends at a checkpoint, without a partial block.

        entries: the contents of the hit's blocks.
        """
        if self._pool is None:
            return hit
        for count in range(len(hit.blocks), 0, -1):
            slot = self._pool.index.find(entries[count - 1])
            if slot is not None:
                return CacheHit(hit.blocks[:count])
        return CacheHit(())

    def add(self, entry: Entry) -> int | None:
        """Return the slot of a new checkpoint, whose state the caller writes at once. None if there is one already, or
        no slot to spare."""
        if self._pool is None or not self._caching or self._pool.index.find(entry) is not None:
            return None
        if self._num_spare() <= 0:
            return None
        slot = allocate_counted(self._pool, 1)[0]
        self._pool.index.add(slot, entry)
        self._pool.free(slot)
        return slot

    def forget(self, sequence: Sequence) -> None:
        """Remove the checkpoints within the tokens of a sequence."""
        if self._pool:
            for entry in sequence.chain.entries:
                self._pool.forget(entry)

    def pin(self, name: Hashable, sequence: Sequence) -> None:
        """Keep the checkpoint at the end of a sequence's full blocks for a session, in place of the one that it had."""
        self.unpin(name)
        full = sequence.committed // self._block_size
        if self._pool and self._caching and full:
            slot = self._pool.index.find(self.entry(sequence, full * self._block_size))
            if slot is not None and self._num_spare() >= self._pool.is_cached(slot):
                self._pool.touch(slot)
                self._pinned[name] = slot

    def unpin(self, name: Hashable) -> None:
        """Release the checkpoint of a session, if it has one."""
        slot = self._pinned.pop(name, None)
        if self._pool and slot is not None:
            self._pool.free(slot)

    def clear(self) -> None:
        """Forget all checkpoints, also those of sessions. No sequence has a slot."""
        for name in list(self._pinned):
            self.unpin(name)
        if self._pool:
            for entry in [self._pool.index.entry(slot) for slot in self._pool.index.blocks]:
                assert entry
                self._pool.forget(entry)
