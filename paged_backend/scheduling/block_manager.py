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

import numpy as np

from paged_backend.api.block_layout import BlockLayout
from paged_backend.scheduling.block_pool import BlockPool, allocate_counted
from paged_backend.scheduling.content import Chain, IndexListener
from paged_backend.scheduling.host_offload import BlockTransfer, HostOffload, PagePairs, page_pairs
from paged_backend.scheduling.prefix_cache import NO_PAGES, BlockLocation, CacheHit, PrefixCache
from paged_backend.scheduling.windowed_pool import WindowedPool, make_pool


class Copy(NamedTuple):
    """Copy-on-write: copy the whole of block `source` to block `target`, in every layer, before the next step."""

    source: int
    target: int
    pages: PagePairs | None = None  # the pages to copy; None: those with the numbers of the blocks


class BlockManager:
    """Assigns the blocks of a fixed pool to block tables and caches their contents."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        layout: BlockLayout | None = None,
        caching: bool = False,
        keeps_scores: bool = False,
        host: BlockPool | None = None,
        listener: IndexListener | None = None,
    ):
        """num_blocks: blocks of the pool, or pages with a layout that divides blocks. layout: by default one page per
        block. caching: whether prefixes are cached. keeps_scores: whether prompt log probabilities are cached with
        them, which requires that they depend on the tokens alone. host: the pool on the host, if there is one.
        listener: receives every content that is cached on the device, or dropped there."""
        assert num_blocks >= 1 and block_size >= 1, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size: int = block_size
        self.layout = layout or BlockLayout(block_size)
        self.caching = caching
        self.keeps_scores = keeps_scores and caching
        self.num_copies = 0  # copy-on-write copies since the start
        self.host = host
        self.pool = make_pool(
            num_blocks, self.layout, caching=caching, on_evict=self._offload_evicted, listener=listener
        )
        self.cache = PrefixCache(self.pool, host, self.layout)
        self.offload = HostOffload(self.pool, host)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return self.pool.num_available

    @property
    def page_tables(self) -> np.ndarray | None:
        """The pages of each block [num_blocks, pages] int32; None if blocks are single pages."""
        return self.pool.page_tables if isinstance(self.pool, WindowedPool) else None

    @property
    def num_used(self) -> int:
        return self.pool.num_used

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens need."""
        return self.layout.blocks_for(num_tokens)

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

    def free(self, table: list[int], start: int = 0) -> None:
        """Free a block table and clear it. start: the first block whose window pages the table references. Raises
        ValueError for a block that is not in use."""
        self.pool.free_table(table, start)

    def fork(self, table: Sequence[int], start: int = 0) -> list[int]:
        """Return a second block table of the same blocks, including a partial last block. start: the first block whose
        window pages both tables reference."""
        assert all(map(self.pool.is_used, table)), "a fork of blocks that are not in use"
        for index, block in enumerate(table):
            self.pool.touch(block, index >= start)
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
        return self._copy(source, blocks[0])

    def finish_copies(self, copies: Iterable[Copy]) -> None:
        """Unlock the sources of copies that are done or dropped."""
        for copy in copies:
            self.pool.unlock(copy.source)

    def match(self, chain: Chain, tokens: Sequence[int]) -> CacheHit:
        """Return the longest cached prefix of `tokens`; see `PrefixCache.match`."""
        return self.cache.match(chain, tokens)

    def adopt(self, hit: CacheHit) -> tuple[list[int], list[BlockTransfer], list[Copy]]:
        """Return a block table of a hit's blocks, and the moves and the copy that fill it. The table references window
        pages from block `hit.window_start` on.

        Full blocks on the device are shared. Blocks on the host are moved in. The partial block is copied, as the
        sequence will write into it. The pool must have room for the new blocks.
        """
        for index, location in enumerate(hit.blocks):  # locks all blocks first: allocating below may evict
            if location is NO_PAGES:
                continue
            if location.on_host:
                self._lock(location)
            else:
                self.pool.touch(location.block, index >= hit.window_start)
        if hit.partial:
            self._lock(hit.partial)
        table, moves, copies = [], [], []
        for index, location in enumerate(hit.blocks):
            block, on_host = location
            if location is NO_PAGES:
                block = allocate_counted(self.pool, 1, trimmed=1)[0]
            elif on_host:
                moves.append(self.offload.move_in(block, trimmed=index < hit.window_start))
                block = moves[-1].target
            table.append(block)
        if hit.partial:
            source, on_host = hit.partial
            if on_host:
                moves.append(self.offload.move_in(source)._replace(entry=None))
                table.append(moves[-1].target)
            else:
                copies.append(self._copy(source, allocate_counted(self.pool, 1)[0]))
                table.append(copies[-1].target)
        return table, moves, copies

    def cache_block(self, block: int, chain: Chain, tokens: Sequence[int], index: int) -> None:
        """Add a block that holds a sequence's full block `index` to the prefix cache."""
        replaced = self.cache.find_trimmed(block, chain, tokens, index)
        if replaced is not None:
            self.offload.block_removed(replaced)
            self.cache.remove_trimmed(replaced)
        if self.cache.add(block, chain, tokens, index):
            self.offload.block_cached(block)

    def trim(self, table: Sequence[int], start: int, end: int) -> None:
        """Drop a table's references to the window pages of its blocks `start` to `end`."""
        assert isinstance(self.pool, WindowedPool)
        for index in range(start, end):
            self.pool.release_window(table[index])

    def invalidate(self, table: Sequence[int]) -> None:
        """Remove the contents of these blocks from the prefix cache, on the host too. The table keeps the blocks."""
        for block in table:
            if self.cache.remove(block):
                self.offload.block_removed(block)

    def check(
        self,
        tables: Iterable[Sequence[int]],
        host_tables: Iterable[Sequence[int]] = (),
        starts: Iterable[int] | None = None,
    ) -> None:
        """Assert every invariant of both pools, given all live block tables. For tests and idle moments.

        starts: for each table the first block whose window pages it references; by default 0.
        """
        tables = list(tables)
        self.pool.check(tables)
        if isinstance(self.pool, WindowedPool):
            firsts = starts if starts is not None else [0] * len(tables)
            self.pool.check_windows(
                block for table, first in zip(tables, firsts, strict=True) for block in table[first:]
            )
        if self.host:
            self.host.check(host_tables)
        self.cache.check()

    def _offload_evicted(self, block: int) -> None:
        self.offload.evict(block)

    def _copy(self, source: int, target: int) -> Copy:
        self.num_copies += 1
        return Copy(source, target, page_pairs(self.pool, source, self.pool, target))

    def _lock(self, location: BlockLocation) -> None:
        pool = self.host if location.on_host else self.pool
        assert pool
        pool.lock(location.block)
