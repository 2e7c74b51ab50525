"""A pool whose blocks have base pages and window pages, for models with sliding windows; see `BlockLayout`.

pages    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     each in one block, or free
block 0    base 4, window 1 and 7              references 2, window references 1
block 1    base 0, window pages freed          references 2, window references 0
cached   ~3 -> 5 -> ~2                         least recently used first; ~3: only the window pages of block 3

References to window pages are counted separately. When the last one is dropped, the window pages of a block with known
content become cached on their own, before the block itself, so a pool under pressure drops them first. A block whose
window pages are gone can still be the beginning of a prefix, but not its end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from paged_backend.api.block_layout import BlockLayout
from paged_backend.scheduling.block_pool import CACHED, FREE, MARK_OF_COUNT, PINNED, BlockPool
from paged_backend.scheduling.content import Entry, IndexListener


def make_pool(
    num_pages: int,
    layout: BlockLayout,
    *,
    caching: bool = False,
    on_evict: Callable[[int], None] | None = None,
    listener: IndexListener | None = None,
) -> BlockPool:
    """Return a pool of blocks with this layout; see `BlockPool` for the arguments."""
    if layout.window_pages:
        return WindowedPool(num_pages, layout, caching=caching, on_evict=on_evict, listener=listener)
    return BlockPool(num_pages, caching=caching, on_evict=on_evict, listener=listener)


def pages_taken_by_lock(pool: BlockPool, block: int) -> int:
    """Return how many pages are not available any more while a block is locked: those of the block that are cached."""
    if not isinstance(pool, WindowedPool):
        return int(pool.is_cached(block))
    has_cached_window = block not in pool.trimmed and not pool._window_references[block]
    return pool.layout.base_pages * pool.is_cached(block) + pool.layout.window_pages * has_cached_window


class WindowedPool(BlockPool):
    """A fixed number of pages, which belong to blocks. Block numbers are only names: they can exceed the pages."""

    def __init__(
        self,
        num_pages: int,
        layout: BlockLayout,
        *,
        caching: bool = False,
        on_evict: Callable[[int], None] | None = None,
        listener: IndexListener | None = None,
    ):
        assert layout.window_pages
        super().__init__(num_pages, caching=caching, on_evict=on_evict, listener=listener)
        self.layout = layout
        self.null_page = num_pages  # a page of zeros behind the pool, in place of window pages that were freed
        self._free_pages = self._free
        self._free = []  # block numbers that are not in use
        self._references = []
        self._window_references: list[int] = []
        self._pages = np.empty((0, layout.pages), dtype=np.int32)  # of each block
        self._cached: OrderedDict[int, None] = OrderedDict()  # blocks, and ~block for window pages alone
        self._num_cached_pages = 0

    @property
    def num_free(self) -> int:
        return len(self._free_pages)

    @property
    def num_cached(self) -> int:
        return self._num_cached_pages

    @property
    def page_tables(self) -> np.ndarray:
        """The pages of every block [num_blocks, pages] int32; freed window pages are the null page."""
        return self._pages

    def allocate(self, count: int, trimmed: int = 0) -> list[int] | None:
        base, window = self.layout.base_pages, self.layout.window_pages
        needed = count * base + (count - trimmed) * window
        if needed > self.num_available:
            return None
        while len(self._free_pages) < needed:
            self._evict()
        if count > len(self._free):
            self._add_numbers(count - len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        for index, block in enumerate(blocks):
            size = base + window if index >= trimmed else base
            self._pages[block, :size] = [self._free_pages.pop() for _ in range(size)]
            self._references[block] = 1
            self._window_references[block] = int(index >= trimmed)
        self.trimmed.update(blocks[:trimmed])
        return blocks

    def touch(self, block: int, windowed: bool | None = None) -> None:
        if windowed is None:
            windowed = block not in self.trimmed
        if not self._references[block]:
            self._num_cached_pages -= self.layout.base_pages
            del self._cached[block]
            if block not in self.trimmed and ~block not in self._cached:  # the window pages were cached with the block
                self._num_cached_pages -= self.layout.window_pages
                if not windowed:
                    self._cache_window(block)
        self._references[block] += 1
        if self._references[block] == 2:
            self.num_shared += 1
        if windowed:
            assert block not in self.trimmed, f"block {block}: its window pages are gone"
            if ~block in self._cached:
                del self._cached[~block]
                self._num_cached_pages -= self.layout.window_pages
            self._window_references[block] += 1

    def free(self, block: int, windowed: bool | None = None) -> None:
        if not 0 <= block < len(self._references) or not self._references[block]:
            raise ValueError(f"block {block}: freed, but not in use")
        if windowed is None:
            windowed = block not in self.trimmed
        self._references[block] -= 1
        if self._references[block] == 1:
            self.num_shared -= 1
        if self._references[block]:
            if windowed:
                self.release_window(block)
            return
        if windowed:
            assert self._window_references[block] == 1, "window pages are referenced without their block"
            self._window_references[block] = 0
        if not self.index.contains(block):
            self._release(block)
        elif not self.layout.base_pages and block in self.trimmed:
            self.index.remove(block)  # no page is left of it
            self._release(block)
        else:
            self._cached[block] = None
            self._num_cached_pages += self.layout.base_pages
            if block not in self.trimmed and ~block not in self._cached:
                self._num_cached_pages += self.layout.window_pages

    def free_table(self, table: list[int], start: int | None = None) -> None:
        for index in reversed(range(len(table))):
            self.free(table[index], None if start is None else index >= start)
        table.clear()

    def release_window(self, block: int) -> None:
        """Drop a reference to the window pages of a block, which are then cached or freed. The block stays in use."""
        self._window_references[block] -= 1
        assert self._window_references[block] >= 0, f"block {block}: its window pages are freed, but not in use"
        if not self._window_references[block]:
            if self.index.contains(block):
                self._cache_window(block)
            else:
                self._free_window(block)

    def pages_of(self, block: int) -> tuple[int, ...]:
        pages = self._pages[block].tolist()
        return tuple(pages[: self.layout.base_pages] if block in self.trimmed else pages)

    def num_freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        held = Counter(block for table in tables for block in table)
        freed = [block for block, count in held.items() if self._references[block] == count]
        windows = sum(self._window_references[block] > 0 for block in freed)
        return len(freed) * self.layout.base_pages + windows * self.layout.window_pages

    def forget(self, entry: Entry) -> None:
        block = self.index.find(entry)
        if block is not None:
            self.index.remove(block)
            if block in self._cached:
                del self._cached[block]
                self._num_cached_pages -= self.layout.base_pages
                if block not in self.trimmed and ~block not in self._cached:
                    self._num_cached_pages -= self.layout.window_pages
                self._release(block)

    def states(self, pinned: Mapping[int, int] | None = None) -> str:
        """Return the pool map: one mark per page."""
        marks = np.full(self.num_blocks + 1, ord(FREE), dtype=np.uint8)
        of_count = np.frombuffer(CACHED.encode() + MARK_OF_COUNT[1:], dtype=np.uint8)
        base = self.layout.base_pages
        live = np.ones(len(self._references), dtype=bool)
        live[self._free] = False
        pages = self._pages[: len(live)]
        for part, counts in ((pages[:, :base], self._references), (pages[:, base:], self._window_references)):
            of_block = of_count[np.minimum(counts, 255).astype(np.uint8)]
            for block, sessions in (pinned or {}).items():
                if counts[block] and self._references[block] == sessions:  # only sessions hold the block
                    of_block[block] = ord(PINNED)
            marks[part[live]] = of_block[live, None]
        return marks[:-1].tobytes().decode()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        tables = list(tables)
        owned = Counter(block for table in tables for block in table) + self._transfers
        assert all(count == owned[block] for block, count in enumerate(self._references)), "a wrong reference count"
        unused, base = set(self._free), self.layout.base_pages
        assert len(unused) == len(self._free), "a block number is free twice"
        live = [block for block in range(len(self._references)) if block not in unused]
        pages = [page for block in live for page in self.pages_of(block)]
        assert sorted(pages + self._free_pages) == list(range(self.num_blocks)), "a page is lost or used twice"
        windows = self._window_references
        assert all(windows[block] <= self._references[block] for block in live), "more references to window pages"
        assert all(block not in self.trimmed for block in live if windows[block]), "referenced window pages are gone"
        cached = {block for block in self._cached if block >= 0}
        assert cached == {block for block in live if not self._references[block]}, "a block is neither cached nor used"
        assert cached <= self.index.blocks <= set(live), "a cached block is not indexed, or a free one is"
        alone = {~block for block in self._cached if block < 0}
        held = {block for block in live if self._references[block] and block not in self.trimmed and not windows[block]}
        assert held <= alone, "window pages are neither cached nor used"
        assert all(block not in self.trimmed and not windows[block] for block in alone), "wrong cached window pages"
        count = len(cached) * base + len(alone) * self.layout.window_pages
        count += sum(self.layout.window_pages for block in cached - alone if block not in self.trimmed)
        assert count == self._num_cached_pages, "the number of cached pages is wrong"
        assert self.num_shared == sum(count > 1 for count in owned.values()), "the number of shared blocks is wrong"

    def check_windows(self, referenced: Iterable[int]) -> None:
        """Assert the number of references to window pages, given the blocks of all live block tables from the first
        one whose window pages each table references."""
        owned = Counter(referenced)
        owned += Counter({block: count for block, count in self._transfers.items() if block not in self.trimmed})
        assert all(count == owned[block] for block, count in enumerate(self._window_references)), (
            "a wrong number of references to window pages"
        )

    def _add_numbers(self, count: int) -> None:
        first = len(self._references)
        self._free[:0] = range(first + count - 1, first - 1, -1)
        self._references += [0] * count
        self._window_references += [0] * count
        if len(self._references) > len(self._pages):  # grows by half, so that the copies do not add up
            size = max(len(self._references), len(self._pages) * 3 // 2)
            grown = np.full((size, self.layout.pages), self.null_page, dtype=np.int32)
            grown[: len(self._pages)] = self._pages
            self._pages = grown

    def _cache_window(self, block: int) -> None:
        self._cached[~block] = None
        self._num_cached_pages += self.layout.window_pages

    def _free_window(self, block: int) -> None:
        base = self.layout.base_pages
        self._free_pages += self._pages[block, base:].tolist()
        self._pages[block, base:] = self.null_page
        self.trimmed.add(block)

    def _release(self, block: int) -> None:
        """Free the pages and the number of a block without references."""
        if self._cached.pop(~block, 0) is None:
            self._num_cached_pages -= self.layout.window_pages
        if block not in self.trimmed:
            self._free_window(block)
        self._free_pages += self._pages[block, : self.layout.base_pages].tolist()
        self._pages[block] = self.null_page
        self.trimmed.discard(block)
        self._free.append(block)

    def _evict(self) -> int:
        """Evict what was used least recently: a block, or only its window pages. Return the block."""
        key, _ = self._cached.popitem(last=False)
        self.num_evictions += 1
        if key < 0:
            block = ~key
            self._num_cached_pages -= self.layout.window_pages
            self._free_window(block)
            if not self.layout.base_pages and self.index.contains(block):
                self.index.remove(block)  # no page is left of it
                if self._cached.pop(block, 0) is None:
                    self._release(block)
            return block
        self._num_cached_pages -= self.layout.base_pages
        if key not in self.trimmed and ~key not in self._cached:
            self._num_cached_pages -= self.layout.window_pages
        if self._on_evict:
            self._on_evict(key)
        self.index.remove(key)
        self._release(key)
        return key
