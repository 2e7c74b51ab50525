"""Block tables over the device's pool: allocation, sharing, copy-on-write and the prefix cache. Integers, no tensors.

There may be a second pool on the host: blocks that are evicted from the device are offloaded to it and can still be
found, and preempted requests are swapped out to it.

    BlockManager    block tables: allocate, grow, fork, copy-on-write, adopt a cache hit, free
      pool          block_pool.py: reference counts, free list, LRU list of cached blocks
      cache         prefix_cache.py: finds cached blocks by their content (content.py)
      host          the host's pool, or None
      offload       host_offload.py: moves between the two pools
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paged_backend.scheduling.block_pool import BlockPool
from paged_backend.scheduling.content import Chain, IndexListener
from paged_backend.scheduling.host_offload import BlockTransfer, HostOffload
from paged_backend.scheduling.prefix_cache import BlockLocation, CacheHit, PrefixCache


class Copy(NamedTuple):
    """Copy-on-write: copy the whole of block `source` to block `target`, in every layer, before the next step."""

    source: int
    target: int


class BlockManager:
    """Assigns the blocks of a fixed pool to block tables and caches their contents."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = False,
        host: BlockPool | None = None,
        listener: IndexListener | None = None,
    ):
        """caching: whether prefixes are cached. host: the pool on the host, if there is one. listener: receives
        every content that is cached on the device, or dropped there."""
        assert num_blocks >= 1 and block_size >= 1, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size: int = block_size
        self.caching = caching
        self.num_copies = 0  # copy-on-write copies since the start
        self.host = host
        self.pool = BlockPool(num_blocks, caching=caching, on_evict=self._offload_evicted, listener=listener)
        self.cache = PrefixCache(self.pool, host, block_size)
        self.offload = HostOffload(self.pool, host)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return self.pool.num_available

    @property
    def num_used(self) -> int:
        return self.pool.num_used

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` blocks. None, with nothing changed, if fewer are available."""
        return self.pool.allocate(count)

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend a block table to hold `num_tokens` tokens. False, with nothing changed, if the pool is exhausted."""
        blocks = self.pool.allocate(max(0, self.blocks_for(num_tokens) - len(table)))
        if blocks is None:
            return False
        table.extend(blocks)
        return True

    def free(self, table: list[int]) -> None:
        """Free a block table and clear it. Raises ValueError for a block that is not in use."""
        self.pool.free_table(table)

    def fork(self, table: Sequence[int]) -> list[int]:
        """Return a second block table of the same blocks, including a partial last block."""
        assert all(map(self.pool.is_used, table)), "a fork of blocks that are not in use"
        for block in table:
            self.pool.touch(block)
        return list(table)

    def make_writable(self, table: list[int], index: int) -> Copy | None:
        """Replace a shared block of a table by a new one. None, with nothing changed, if the pool is exhausted.

        The source of the copy stays locked until `finish_copies`, so it is neither evicted nor written to.
        """
        blocks = self.pool.allocate(1)
        if blocks is None:
            return None
        source, table[index] = table[index], blocks[0]
        self.pool.lock(source)
        self.pool.free(source)  # drops the table's reference; the copy's lock keeps one
        self.num_copies += 1
        return Copy(source, blocks[0])

    def finish_copies(self, copies: Iterable[Copy]) -> None:
        """Unlock the sources of copies that are done or dropped."""
        for copy in copies:
            self.pool.unlock(copy.source)

    def match(self, chain: Chain, tokens: Sequence[int]) -> CacheHit:
        """Return the longest cached prefix of `tokens`; see `PrefixCache.match`."""
        return self.cache.match(chain, tokens)

    def adopt(self, hit: CacheHit) -> tuple[list[int], list[BlockTransfer], list[Copy]]:
        """Return a block table of a hit's blocks, and the moves and the copy that fill it.

        Full blocks on the device are shared. Blocks on the host are moved in. The partial block is copied, as the
        sequence will write into it. The pool must have room for the new blocks.
        """
        for location in hit.blocks:  # locks all blocks of the hit first: allocating below may evict
            if location.on_host:
                self._lock(location)
            else:
                self.pool.touch(location.block)
        if hit.partial:
            self._lock(hit.partial)
        table, moves, copies = [], [], []
        for block, on_host in hit.blocks:
            if on_host:
                moves.append(self.offload.move_in(block))
                block = moves[-1].target
            table.append(block)
        if hit.partial:
            source, on_host = hit.partial
            if on_host:
                moves.append(self.offload.move_in(source)._replace(entry=None))
                table.append(moves[-1].target)
            else:
                copies.append(Copy(source, self.pool.allocate_counted(1)[0]))
                table.append(copies[-1].target)
                self.num_copies += 1
        return table, moves, copies

    def cache_block(self, block: int, chain: Chain, tokens: Sequence[int], index: int) -> None:
        """Add a block that holds a sequence's full block `index` to the prefix cache."""
        if self.cache.add(block, chain, tokens, index):
            self.offload.block_cached(block)

    def invalidate(self, table: Sequence[int]) -> None:
        """Remove the contents of these blocks from the prefix cache, on the host too. The table keeps the blocks."""
        for block in table:
            if self.cache.remove(block):
                self.offload.block_removed(block)

    def check(self, tables: Iterable[Sequence[int]], host_tables: Iterable[Sequence[int]] = ()) -> None:
        """Assert every invariant of both pools, given all live block tables. For tests and idle moments."""
        self.pool.check(tables)
        if self.host:
            self.host.check(host_tables)
        self.cache.check()

    def _offload_evicted(self, block: int) -> None:
        self.offload.evict(block)

    def _lock(self, location: BlockLocation) -> None:
        pool = self.host if location.on_host else self.pool
        assert pool
        pool.lock(location.block)
