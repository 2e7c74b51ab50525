"""The pages of one memory, and the blocks that are made of them: reference counts, free runs, LRU list and index.

pages    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     one page has room for block_size tokens of some layers
kind 0   blocks 0, 3 and 4                     a block of a single page has the number of its page
kind 1   block 6, of pages 6, 1 and 7          a block of several pages has the number of its first page
kind 2   blocks 8, 9                           a block without pages has a number after those of all pages
free     2, 5                                  in runs, so that the blocks of a sequence follow each other (extents)
cached   6 -> 0                                not referenced, content still indexed; least recently used first
in use   {3: 1, 4: 2}                          references of each block: block tables, sessions and transfers

Free pages + pages of cached blocks + pages of blocks in use = all pages, always; `check()` asserts it.

The device has one pool and the host may have another.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from paged_backend.kv.content import DEVICE, BlockKey, Entry, Listener, PrefixIndex

NULL = -1  # in a block table: a block that no later token reads, and that was freed
RUN_PAGES = 8  # free pages that a sequence should find when its blocks do not continue an extent
EARLY_SHARE = 16  # cached blocks are evicted for that only while less than this part of the pool is free: 1/16

# Marks in a pool map: free; cached; number of references to the block; referenced by sessions only.
FREE, CACHED, HELD, HELD_BY_MORE, PINNED = ".", "c", "123456789", "+", "p"
_MARK_OF_COUNT = np.frombuffer((FREE + HELD).encode().ljust(256, HELD_BY_MORE.encode()), dtype=np.uint8)


class FreePages:
    """The free pages of a pool, in runs that are as long as possible.

    The page after the last one of a growing sequence is claimed: the sequence takes it next. Another one that starts a
    run gets the first page of the longest run that is not claimed, or the middle of a claimed one if half of that is
    longer.
    """

    def __init__(self, num_pages: int):
        """Start with all pages free."""
        self._count = 0
        self._lengths: dict[int, int] = {}  # of each run, by its first page
        self._starts: dict[int, int] = {}  # first page of each run, by the page after its last one
        self._growing: set[int] = set()  # pages at the end of growing sequences
        # Runs as (-length, first page), not claimed and claimed. Entries may be outdated; each run has one that is not.
        self._heaps: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._add(0, num_pages)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (page for start, length in self._lengths.items() for page in range(start, start + length))

    @property
    def longest(self) -> int:
        """The number of pages that a sequence can take one after the other if it starts a run."""
        return max(-self._top(0)[0], (1 - self._top(1)[0]) // 2)

    def take_after(self, page: int, count: int) -> int:
        """Take up to `count` pages that follow this one, which a sequence has, and return how many are free. The
        sequence claims the page after the last of them."""
        first = page + 1
        length = self._lengths.get(first, 0)
        self._growing.discard(page)
        if not length:
            return 0
        taken = min(count, length)
        self._remove(first, length)
        self._growing.add(page + taken)
        self._add(first + taken, length - taken)
        return taken

    def start_run(self) -> int:
        """Take the first of the `longest` pages, and claim the next one."""
        longest, (length, start) = self.longest, self._top(0)
        page = start
        if -length < longest:
            length, start = self._top(1)
            page = start - length - longest
        self._remove(start, -length)
        self._add(start, page - start)
        self._growing.add(page)
        self._add(page + 1, start - length - page - 1)
        return page

    def put(self, page: int, count: int = 1) -> None:
        """Free `count` pages, this one and those after it."""
        start, end = page, page + count
        for one in range(start, end):
            self.end_growth(one)
        if page in self._starts:
            start = self._starts[page]
            self._remove(start, page - start)
        if length := self._lengths.get(end):
            self._remove(end, length)
            end += length
        self._add(start, end - start)

    def end_growth(self, page: int) -> None:
        """Release the claim on the page after this one, if there is one."""
        if page in self._growing:
            self._growing.remove(page)
            self._push(page + 1)

    def check(self) -> None:
        """Assert every invariant. For tests and idle moments."""
        assert {start + length: start for start, length in self._lengths.items()} == self._starts, "ends of free runs"
        assert sum(self._lengths.values()) == self._count and 0 not in self._lengths.values()
        assert not self._lengths.keys() & self._starts.keys(), "two free runs that are one"
        assert self._growing.isdisjoint(self), "a growing sequence ends with a free page"
        for start, length in self._lengths.items():
            assert (-length, start) in self._heaps[start - 1 in self._growing], "a free run cannot be found"

    def _add(self, start: int, length: int) -> None:
        if length:
            self._count += length
            self._lengths[start] = length
            self._starts[start + length] = start
            self._push(start)

    def _remove(self, start: int, length: int) -> None:
        self._count -= length
        del self._lengths[start], self._starts[start + length]

    def _push(self, start: int) -> None:
        """Enter the run at `start`, if there is one, in its heap."""
        if start in self._lengths:
            heap = self._heaps[start - 1 in self._growing]
            heappush(heap, (-self._lengths[start], start))
            if len(heap) > 64 + 4 * len(self._lengths):
                heap[:] = {entry for entry in heap if self._is_valid(entry, heap)}
                heapify(heap)

    def _top(self, claimed: int) -> tuple[int, int]:
        """Return the longest run of a heap, as (-length, first page); (0, 0) if there is none."""
        heap = self._heaps[claimed]
        while heap and not self._is_valid(heap[0], heap):
            heappop(heap)
        return heap[0] if heap else (0, 0)

    def _is_valid(self, entry: tuple[int, int], heap: list[tuple[int, int]]) -> bool:
        length, start = entry
        return self._lengths.get(start) == -length and self._heaps[start - 1 in self._growing] is heap


class PagePool:
    """A fixed number of pages, each free, or in a block that is cached or in use."""

    def __init__(
        self,
        num_pages: int,
        kinds: Sequence[int] = (1,),
        *,
        single: int | None = None,
        caching: bool = False,
        on_evict: Callable[[int], None] | None = None,
        listener: Listener | None = None,
        medium: str = DEVICE,
        run_pages: int = 0,
    ):
        """kinds: number of pages of a block, by kind. single: a kind whose blocks do not follow each other; the pages
        of a block do, as far as possible. caching: whether contents are kept for the prefix cache. on_evict: called
        with a cached block before its content is dropped. listener, medium: passed to the first kind's index.
        run_pages: see RUN_PAGES; 0: never evict more than is needed."""
        assert num_pages >= 1, num_pages
        self.num_pages = num_pages
        self.caching = caching
        self.indexes = tuple(PrefixIndex(None if kind else listener, medium) for kind in range(len(kinds)))
        self.num_shared = 0  # blocks with more than one reference
        self.num_evictions = 0
        self._sizes = tuple(kinds)
        self._single = single
        self._num_blocks = [0] * len(kinds)  # blocks in use or cached, by kind
        self._num_cached_blocks = [0] * len(kinds)
        self._numbers: list[int] = []  # free numbers of blocks without pages
        self._on_evict = on_evict
        self._free = FreePages(num_pages)
        self._run_pages = run_pages
        self._most_free = num_pages // EARLY_SHARE
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_cached = 0  # pages of cached blocks
        self._references = [0] * num_pages  # by block; longer with blocks without pages
        self._transfers: Counter[int] = Counter()  # references of unfinished transfers, part of _references
        self._kinds = bytearray(num_pages)  # kind of each block
        # The pages of each block, with a last row for NULL: a page of zeros behind the pool, which is never written.
        self._pages = tuple(np.empty((num_pages + 1, size), dtype=np.int32) if size > 1 else None for size in kinds)
        for pages in self._pages:
            if pages is not None:
                pages[NULL] = num_pages

    @property
    def num_cached(self) -> int:
        """The number of pages in blocks that are not referenced but can still be found by their content."""
        return self._num_cached

    @property
    def num_available(self) -> int:
        """The number of pages that can be allocated: free pages and pages of cached blocks."""
        return len(self._free) + self._num_cached

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_available

    @property
    def blocks(self) -> set[int]:
        """The blocks that are in use or cached."""
        return {block for block, count in enumerate(self._references) if count} | self._cached.keys()

    def allocate(self, count: int, kind: int = 0, *, after: int = NULL) -> list[int] | None:
        """Allocate `count` blocks, each with one reference. None, with nothing changed, if too few pages are available.

        Free pages go first; then the least recently used cached blocks are evicted. after: the block before them in
        their block table, whose pages they continue if the next pages are free.
        """
        assert count >= 0, count
        if count * self._sizes[kind] > self.num_available:
            return None
        pages = self._pages[kind]
        if not self._sizes[kind]:
            blocks = [self._take_number() for _ in range(count)]
        elif kind == self._single:
            blocks = [self._take_single(kind) for _ in range(count)]
        elif pages is None:
            blocks = self._take(count, after)
        else:
            before = [NULL] * self._sizes[kind] if after == NULL else pages[after].tolist()
            of_blocks = list(zip(*(self._take(count, page) for page in before), strict=True))
            blocks = [taken[0] for taken in of_blocks]
            for block, taken in zip(blocks, of_blocks, strict=True):
                pages[block] = taken
        for block in blocks:
            self._references[block] = 1
            self._kinds[block] = kind
        self._num_blocks[kind] += count
        return blocks

    def claim(self, count: int, kind: int = 0, *, after: int = NULL) -> list[int]:
        """Allocate blocks whose pages the caller has checked to be available."""
        blocks = self.allocate(count, kind, after=after)
        assert blocks is not None, "pages that were counted available are not"
        return blocks

    def touch(self, block: int) -> None:
        """Add a reference; a cached block is then in use again."""
        if self._references[block] == 0:
            del self._cached[block]
            self._count_cached(self._kinds[block], -1)
        self._references[block] += 1
        if self._references[block] == 2:
            self.num_shared += 1

    def free(self, block: int) -> None:
        """Drop a reference. With its last reference, an indexed block becomes cached; the pages of any other block
        become free.

        Raises:
            ValueError: the block is not in use.
        """
        if not 0 <= block < len(self._references) or not self._references[block]:
            raise ValueError(f"block {block}: freed, but not in use")
        self._references[block] -= 1
        if self._references[block] == 1:
            self.num_shared -= 1
        elif self._references[block] == 0:
            kind = self._kinds[block]
            if self.indexes[kind].contains(block):
                self._cached[block] = None
                self._count_cached(kind, 1)
                for page in self.pages_of(block):
                    self._free.end_growth(page)
            else:
                self._release(block)

    def free_table(self, table: list[int]) -> None:
        """Free and clear a block table. Its tail is freed first, and so evicted before its head, which more requests
        can share. Raises ValueError for a block that is not in use."""
        for block in reversed(table):
            if block != NULL:
                self.free(block)
        table.clear()

    def lock(self, block: int) -> None:
        """Add the reference of a transfer, until `unlock`."""
        self.touch(block)
        self._transfers[block] += 1

    def unlock(self, block: int) -> None:
        self._transfers[block] -= 1
        self.free(block)

    def is_used(self, block: int) -> bool:
        return self._references[block] > 0

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def is_shared(self, block: int) -> bool:
        """Return whether more than one block table holds the block: a write would change what the others read."""
        return self._references[block] > 1 and self._references[block] - self._transfers[block] > 1

    def kind_of(self, block: int) -> int:
        return self._kinds[block]

    def pages_of(self, block: int) -> tuple[int, ...]:
        """Return the pages of a block."""
        kind = self._kinds[block]
        pages = self._pages[kind]
        return (block,) * self._sizes[kind] if pages is None else tuple(pages[block].tolist())

    def num_pages_of(self, blocks: Iterable[int]) -> int:
        """Return the number of pages of some blocks together."""
        return sum(self._sizes[self._kinds[block]] for block in blocks)

    def num_blocks(self, kind: int) -> tuple[int, int]:
        """Return how many blocks of a kind are in use, and how many are cached."""
        cached = self._num_cached_blocks[kind]
        return self._num_blocks[kind] - cached, cached

    def page_tables(self, kind: int, tables: np.ndarray) -> list[np.ndarray]:
        """Return block tables as one table of pages for each page of a block of this kind.

        tables: [num_seqs, max_blocks] int32 blocks of the kind, or NULL, which becomes the page of zeros.
        """
        pages = self._pages[kind]
        if pages is not None:
            return list(np.ascontiguousarray(pages[tables].transpose(2, 0, 1)))
        return [np.where(tables == NULL, np.int32(self.num_pages), tables)]

    def page_rows(self, kind: int, blocks: Sequence[int]) -> np.ndarray:
        """Return the pages of blocks of a kind, [len(blocks), pages of a block] int32."""
        pages, rows = self._pages[kind], np.array(blocks, dtype=np.int32)
        return rows[:, None] if pages is None else pages[rows]

    def num_freed_by(self, tables: Iterable[Iterable[int]]) -> int:
        """Return how many pages would become available if these block tables were freed."""
        held = Counter(block for table in tables for block in table if block != NULL)
        return self.num_pages_of(block for block, count in held.items() if self._references[block] == count)

    # --- contents ---------------------------------------------------------------------------------------------------

    def find(self, entry: Entry, kind: int = 0) -> int | None:
        """Return the block of a kind that holds this content, or None. Thread-safe."""
        return self.indexes[kind].find(entry)

    def entry(self, block: int) -> Entry | None:
        """Return the content under which a block is indexed, or None."""
        return self.indexes[self._kinds[block]].entry(block)

    def index(self, block: int, entry: Entry) -> bool:
        """Index a block in use by its content. False, with nothing changed, if the block or the content is indexed."""
        return self.caching and self.indexes[self._kinds[block]].add(block, entry)

    def forget(self, block: int) -> None:
        """Remove a block from the index. Block tables keep it; without them it becomes free."""
        kind = self._kinds[block]
        if self.indexes[kind].contains(block):
            self.indexes[kind].remove(block)
            if block in self._cached:
                del self._cached[block]
                self._count_cached(kind, -1)
                self._release(block)

    def evict_first(self, key: BlockKey) -> None:
        """Make the block with this content the next one that is evicted, if it is cached."""
        block = self.find(*key)
        if block is not None and block in self._cached:
            self._cached.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Remove all blocks from the index, the last indexed first."""
        for index in self.indexes:
            for block in reversed(list(index.blocks)):
                self.forget(block)

    def map(self, pinned: Mapping[int, int] | None = None) -> str:
        """Return the pool map: one mark per page, in order of page numbers.

        pinned: number of sessions that reference each block. Takes milliseconds for 100,000 pages.
        """
        counts = np.minimum(np.array(self._references), 255)
        marks = _MARK_OF_COUNT[counts]
        marks[np.fromiter(self._cached, np.int64, len(self._cached))] = ord(CACHED)
        for block, sessions in (pinned or {}).items():
            if self._references[block] == sessions:  # only sessions hold the block
                marks[block] = ord(PINNED)
        if any(pages is not None for pages in self._pages):
            of_block = np.fromiter(self.blocks, np.int64)
            kinds = np.frombuffer(self._kinds, dtype=np.uint8)[of_block]
            for kind, pages in enumerate(self._pages):
                if pages is not None:
                    marks[pages[of_block[kinds == kind]]] = marks[of_block[kinds == kind], None]
        return marks[: self.num_pages].tobytes().decode()

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert every invariant, given all live block tables. For tests and idle moments: it walks the pool."""
        owned = Counter(block for table in tables for block in table if block != NULL) + self._transfers
        assert all(count == owned[block] for block, count in enumerate(self._references)), "a wrong reference count"
        assert not self._cached.keys() & owned.keys(), "a cached block is in use"
        pages = [page for block in (*owned, *self._cached) for page in self.pages_of(block)]
        assert sorted([*pages, *self._free]) == list(range(self.num_pages)), "a page is lost or used twice"
        self._free.check()
        numbers = [block for block in (*owned, *self._cached) if not self._sizes[self._kinds[block]]]
        assert sorted([*numbers, *self._numbers]) == list(range(self.num_pages, len(self._references))), "a lost number"
        used, cached = (Counter(self._kinds[block] for block in blocks) for blocks in (owned, self._cached))
        for kind in range(len(self._sizes)):
            assert self.num_blocks(kind) == (used[kind], cached[kind]), "blocks of a kind are miscounted"
        assert self._num_cached == sum(len(self.pages_of(block)) for block in self._cached), "cached pages miscounted"
        assert self.num_shared == sum(count > 1 for count in owned.values()), "the number of shared blocks is wrong"
        for kind, index in enumerate(self.indexes):
            assert index.blocks <= owned.keys() | self._cached.keys(), "a free block is indexed"
            assert all(self._kinds[block] == kind for block in index.blocks), "a block in the index of another kind"
        indexed = {block for index in self.indexes for block in index.blocks}
        assert self._cached.keys() <= indexed, "a cached block is not indexed"

    def _take(self, count: int, before: int) -> list[int]:
        """Take pages, those after `before` if they are free. To start an extent, blocks may be evicted early."""
        free, pages = self._free, list[int]()
        while len(pages) < count:
            taken = free.take_after(before, count - len(pages)) if before != NULL else 0
            if not taken:
                while not free or (self._cached and free.longest < self._run_pages and len(free) < self._most_free):
                    self._evict()
                before, taken = free.start_run() - 1, 1
            pages += range(before + 1, before + 1 + taken)
            before += taken
        return pages

    def _count_cached(self, kind: int, change: int) -> None:
        self._num_cached += change * self._sizes[kind]
        self._num_cached_blocks[kind] += change

    def _take_single(self, kind: int) -> int:
        """Take the pages of a block that no other one follows."""
        taken = self._take(self._sizes[kind], NULL)
        self._free.end_growth(taken[-1])
        pages = self._pages[kind]
        if pages is not None:
            pages[taken[0]] = taken
        return taken[0]

    def _take_number(self) -> int:
        """Take the number of a block without pages."""
        if not self._numbers:
            self._numbers.append(len(self._references))
            self._references.append(0)
            self._kinds.append(0)
        return self._numbers.pop()

    def _release(self, block: int) -> None:
        kind = self._kinds[block]
        self._num_blocks[kind] -= 1
        pages = self._pages[kind]
        if pages is not None:
            for page, count in _runs(pages[block].tolist()):
                self._free.put(page, count)
        elif self._sizes[kind]:
            self._free.put(block)
        else:
            self._numbers.append(block)

    def _evict(self) -> None:
        """Free the least recently used cached block, and drop its content."""
        block = next(iter(self._cached))
        if self._on_evict:
            self._on_evict(block)
        self.num_evictions += 1
        self.forget(block)


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of pages that follow each other, as (first page, length)."""
    ends = [at for at in range(1, len(pages)) if pages[at] != pages[at - 1] + 1]
    return [(pages[start], end - start) for start, end in pairwise((0, *ends, len(pages)))]
