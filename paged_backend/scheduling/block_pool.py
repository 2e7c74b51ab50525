"""Reference counts, free list and LRU list of one pool of blocks, on the device or on the host.

pool     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     one physical block = block_size slots in every layer
free     [5, 2]                                a stack: the block freed last is reused first, still in the CPU cache
cached   7 -> 0                                not referenced, content still indexed; least recently used first
in use   {1: 1, 3: 2, 4: 1, 6: 3}              number of references to each: block tables, copies and moves

Free + cached + used = total, always; `check()` asserts it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from paged_backend.scheduling.content import Entry, IndexListener, PrefixIndex

# Marks in a pool map: free; cached; number of block tables that reference the block; referenced by sessions only.
FREE, CACHED, HELD, HELD_BY_MORE, PINNED = ".", "c", "123456789", "+", "p"
MARK_OF_COUNT = (FREE + HELD).encode().ljust(256, HELD_BY_MORE.encode())


def allocate_counted(pool: BlockPool, count: int, trimmed: int = 0) -> list[int]:
    """Allocate `count` blocks of a pool. The caller has checked that they are available."""
    blocks = pool.allocate(count, trimmed)
    assert blocks is not None, "blocks that were counted available are not"
    return blocks


class BlockPool:
    """A fixed number of blocks, each free, cached or in use.

    Blocks of this class are single pages. `WindowedPool` divides them into pages, some of which can be freed before the
    block. The numbers of blocks that are free, cached, available or used are numbers of pages there.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        caching: bool = False,
        on_evict: Callable[[int], None] | None = None,
        listener: IndexListener | None = None,
    ):
        """caching: whether contents are kept for the prefix cache. on_evict: called with a cached block before its
        content is dropped. listener: receives every content that is cached or dropped."""
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self.caching = caching
        self.index = PrefixIndex(listener)
        self.num_shared = 0  # blocks with more than one reference
        self.num_evictions = 0
        self.trimmed: set[int] = set()  # blocks whose window pages were freed
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._transfers: Counter[int] = Counter()  # references of unfinished copies and moves, part of _references

    @property
    def num_free(self) -> int:
        """Blocks that are not referenced and hold no known content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that are not referenced but can still be found by their content."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int, trimmed: int = 0) -> list[int] | None:
        """Allocate `count` blocks, each with one reference. None, with nothing changed, if fewer are available.

        Free blocks go first; then the least recently used cached blocks are evicted. trimmed: number of blocks, the
        first ones, that get no window pages.
        """
        assert count >= 0, count
        if count > self.num_available:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def touch(self, block: int, windowed: bool | None = None) -> None:
        """Add a reference; a cached block is then in use again.

        windowed: whether the reference includes the window pages; by default if the block has them. It is dropped with
        the same argument.
        """
        self._cached.pop(block, None)
        self._references[block] += 1
        if self._references[block] == 2:
            self.num_shared += 1

    def free(self, block: int, windowed: bool | None = None) -> None:
        """Drop a reference. When the last reference is dropped, a block with known content becomes cached and any other
        becomes free.

        Raises:
            ValueError: the block is not in use.
        """
        if not 0 <= block < self.num_blocks or not self._references[block]:
            raise ValueError(f"block {block}: freed, but not in use")
        self._references[block] -= 1
        if self._references[block] == 1:
            self.num_shared -= 1
        elif self._references[block] == 0:
            if self.index.contains(block):
                self._cached[block] = None
            else:
                self._free.append(block)

    def free_table(self, table: list[int], start: int | None = None) -> None:
        """Free and clear a block table. Its tail is freed first, and so evicted before its head, which more requests
        can share. start: the first block whose window pages the table references; by default all that have some.
        Raises ValueError for a block that is not in use."""
        for block in reversed(table):
            self.free(block)
        table.clear()

    def pages_of(self, block: int) -> tuple[int, ...]:
        """Return the pages of a block: base pages, then its window pages if it has them."""
        return (block,)

    def lock(self, block: int) -> None:
        """Add the reference of a copy or move, until `unlock`."""
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
        return self._references[block] - self._transfers[block] > 1

    def num_freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """Return how many blocks would become available if these block tables were freed."""
        held = Counter(block for table in tables for block in table)
        return sum(self._references[block] == count for block, count in held.items())

    def forget(self, entry: Entry) -> None:
        """Remove a content from the index. Block tables keep its block."""
        block = self.index.find(entry)
        if block is not None:
            self.index.remove(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def states(self, pinned: Mapping[int, int] | None = None) -> str:
        """Return the pool map: one mark per block, in order of block numbers.

        pinned: by block, how many sessions reference it. Takes a millisecond or two for 100,000 blocks, as only the
        smaller of the free and the cached set is walked block by block.
        """
        try:
            counts = bytes(self._references)
        except ValueError:  # raised by a count above 255
            counts = bytes([count if count < 256 else 255 for count in self._references])
        smaller: Iterable[int] = self._free
        mark, other = FREE, CACHED
        if len(self._cached) < len(self._free):
            smaller, mark, other = self._cached, other, mark
        marks = bytearray(counts.translate(other.encode() + MARK_OF_COUNT[1:]))
        number = ord(mark)
        for block in smaller:
            marks[block] = number
        for block, sessions in (pinned or {}).items():
            if self._references[block] == sessions:  # only sessions hold the block
                marks[block] = ord(PINNED)
        return marks.decode()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, given all live block tables. For tests and idle moments: it walks the pool."""
        owned = Counter(block for table in tables for block in table) + self._transfers
        assert all(self._references[block] == owned[block] for block in range(self.num_blocks)), (
            "a wrong reference count"
        )
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert not set(self._free) & self._cached.keys(), "a block is free and cached"
        assert not (set(self._free) | self._cached.keys()) & owned.keys(), "a block is free and in use"
        assert len(owned) + len(self._free) + len(self._cached) == self.num_blocks, "a block is lost"
        assert self.num_shared == sum(count > 1 for count in owned.values()), "the number of shared blocks is wrong"
        indexed = self.index.blocks
        assert not indexed & set(self._free), "a free block is indexed"
        assert self._cached.keys() <= indexed, "a cached block is not indexed"

    def _evict(self) -> int:
        """Take the least recently used cached block and drop its content."""
        block, _ = self._cached.popitem(last=False)
        if self._on_evict:
            self._on_evict(block)
        self.index.remove(block)
        self.num_evictions += 1
        return block
