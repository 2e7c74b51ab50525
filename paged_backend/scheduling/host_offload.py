"""Moves between the device's pool and the host's pool: offloading evicted blocks, swapping preempted requests, and
copying cached blocks for the disk tier. Both pools work without tensors; `BlockTransfer`s say what has to be copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from paged_backend.scheduling.block_pool import BlockPool, allocate_counted
from paged_backend.scheduling.content import Entry
from paged_backend.scheduling.windowed_pool import WindowedPool

PagePairs: TypeAlias = tuple[tuple[int, int], ...]  # (source, target) of pages


class BlockTransfer(NamedTuple):
    """Copy a whole block, in every layer, to a block of the other pool.

    `entry` is the content under which the target is indexed: immediately for a move to the host, after completion for a
    move to the device.
    """

    source: int
    target: int
    entry: Entry | None
    pages: PagePairs | None = None  # the pages to copy; None: those with the numbers of the blocks

    @property
    def target_pages(self) -> Sequence[int]:
        return [self.target] if self.pages is None else [target for _, target in self.pages]


class _Copied(Protocol):
    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...
    @property
    def pages(self) -> PagePairs | None: ...


def copied_pages(copy: _Copied) -> PagePairs:
    """Return the pages of a copy or move, as (source, target)."""
    return ((copy.source, copy.target),) if copy.pages is None else copy.pages


def page_pairs(source_pool: BlockPool, source: int, target_pool: BlockPool, target: int) -> PagePairs | None:
    """Return the pages that both blocks have, which a copy of one to the other includes. Returns None if blocks are
    single pages."""
    if not isinstance(source_pool, WindowedPool):
        return None
    return tuple(zip(source_pool.pages_of(source), target_pool.pages_of(target), strict=False))


class HostOffload:
    """Plans the moves between the device's pool and the host's. Without a host pool there are none.

    The blocks of a move are locked until `finish_moves_out` or `finish_moves_in`.
    """

    def __init__(self, pool: BlockPool, host: BlockPool | None):
        self.num_moves_out = 0
        self.num_moves_in = 0
        self._pool = pool
        self._host = host
        self._moves_out: list[BlockTransfer] = []  # moves to do before anything else of the next step
        self._arriving: set[int] = set()  # blocks of the host whose moves are not done
        self._unspilled: dict[int, None] = {}  # cached blocks that `spill` has not examined, oldest first

    @property
    def has_moves_out(self) -> bool:
        """True if moves to the host wait for the next step."""
        return bool(self._moves_out)

    @property
    def has_unspilled(self) -> bool:
        """True if `spill` has a block to examine."""
        return bool(self._unspilled)

    def block_cached(self, block: int) -> None:
        """Record a new cached block of the device."""
        if self._host:
            self._unspilled[block] = None

    def block_removed(self, block: int) -> None:
        """Record that a block of the device is no longer cached."""
        self._unspilled.pop(block, None)

    def evict(self, block: int) -> None:
        """Offload a cached block that is about to be evicted, if the host has room."""
        if self._host and self._host.caching and (target := self._move_out(block)) is not None:
            self._host.free(target)
        self.block_removed(block)

    def take_moves_out(self) -> tuple[BlockTransfer, ...]:
        """Return the moves that must be done before anything else of the next step, and forget them."""
        moves, self._moves_out = tuple(self._moves_out), []
        return moves

    def finish_moves_out(self, moves: Iterable[BlockTransfer], *, done: bool = True) -> None:
        """Unlock the host's blocks. If the moves were not done, remove the contents from the host's index."""
        for move in moves:
            assert self._host
            if not done and self._host.index.contains(move.target):
                self._host.index.remove(move.target)
            self._arriving.discard(move.target)
            self._host.unlock(move.target)

    def finish_moves_in(self, moves: Iterable[BlockTransfer], *, done: bool = True) -> None:
        """Unlock the blocks of both pools. If the moves were done, index the contents, even if the request has
        ended."""
        for move in moves:
            assert self._host
            if done and move.entry and self._pool.caching:
                self._pool.index.add(move.target, move.entry)
            self._pool.unlock(move.target)
            self._host.unlock(move.source)

    def copy_to_host(self, entry: Entry) -> int | None:
        """Return the host's block with this content, after planning a move to it if only the device has the content.
        `has_arrived` says whether the content is there. None if neither pool has it, or the host has no room."""
        assert self._host
        block = self._pool.index.find(entry)
        if block is None:
            return self._host.index.find(entry)
        target = self._move_out(block)
        if target is not None:
            self._host.free(target)
        return target

    def has_arrived(self, block: int) -> bool:
        """Return whether the content of a cached block of the host is there: False until its move is done."""
        return block not in self._arriving

    def spill(self, wanted: Callable[[Entry], bool], limit: int) -> tuple[BlockTransfer, ...]:
        """Copy up to `limit` cached blocks of wanted content to the host, for the disk tier. The oldest go first, and
        each block is examined only once."""
        left = limit
        while self._host and self._unspilled and left:
            block = next(iter(self._unspilled))
            entry = self._pool.index.entry(block)
            # A block whose pages have all left the window has no content any more.
            if entry and self._host.index.find(entry) is None and wanted(entry):
                target = self._move_out(block)
                if target is None:
                    break
                self._host.free(target)
                left -= 1
            del self._unspilled[block]
        return self.take_moves_out()

    def clear(self) -> None:
        """Drop the moves to the host that no step has done: the device's contents are gone."""
        self.finish_moves_out(self.take_moves_out(), done=False)
        self._unspilled.clear()

    def add_host_block(self, entry: Entry, *, trimmed: bool = False) -> int | None:
        """Allocate a cached block of the host for this content; the caller fills it at once. None if the host already
        has the content, or has no room. trimmed: whether the content lacks window pages."""
        assert self._host
        if self._host.index.find(entry) is not None:
            return None
        blocks = self._host.allocate(1, trimmed=int(trimmed))
        if blocks is None:
            return None
        block = blocks[0]
        self._host.index.add(block, entry)
        self._host.free(block)
        return block

    def swap_out(self, tables: Sequence[list[int]], starts: Sequence[int] | None = None) -> list[list[int]] | None:
        """Move block tables to the host and free them. Return the tables of the host's blocks, in the same order; None,
        with nothing changed, if the host lacks room for all of them.

        starts: for each table the first block whose window pages it references; by default 0.
        """
        if self._host is None:
            return None
        needed = sum(map(self._pages_on_host, {block for table in tables for block in table}))
        if needed > self._host.num_available:
            return None
        targets: dict[int, int] = {}
        for block in (block for table in tables for block in table):
            if block in targets:
                self._host.touch(targets[block])
            else:
                target = self._move_out(block)
                assert target is not None, "not enough blocks, although they were checked to be available"
                targets[block] = target
        swapped = [[targets[block] for block in table] for table in tables]
        for table, start in zip(tables, starts or [0] * len(tables), strict=True):
            self._pool.free_table(table, start)
        return swapped

    def swap_in(
        self, tables: Sequence[list[int]], starts: Sequence[int] | None = None
    ) -> tuple[list[list[int]], list[BlockTransfer]]:
        """Move block tables back from the host and free them there. Return the device's tables and the moves.

        Content that is still cached on the device is not moved. The device must have room for the rest. starts: for
        each table the first block whose window pages it references; by default 0.
        """
        assert self._host
        starts = starts or [0] * len(tables)
        places = [
            (block, index >= start)
            for table, start in zip(tables, starts, strict=True)
            for index, block in enumerate(table)
        ]
        windowed = {block for block, in_window in places if in_window}
        targets: dict[int, int] = {}
        for block in dict.fromkeys(block for block, _ in places):  # cached ones first: allocating below may evict
            entry = self._host.index.entry(block)
            cached = self._pool.index.find(entry) if entry else None
            if cached is not None and (block not in windowed or cached not in self._pool.trimmed):
                self._pool.touch(cached, block in windowed)
                targets[block] = cached
        moves = []
        for block, _ in places:
            if block not in targets:
                self._host.lock(block)
                moves.append(self.move_in(block, trimmed=block not in windowed))
                targets[block] = moves[-1].target
        for block, in_window in places:
            self._pool.touch(targets[block], in_window)
        for block, target in targets.items():  # the references from above; the tables have theirs
            self._pool.free(target, block in windowed)
        swapped = [[targets[block] for block in table] for table in tables]
        for table in tables:
            self._host.free_table(table)
        return swapped, moves

    def move_in(self, block: int, *, trimmed: bool = False) -> BlockTransfer:
        """Move a locked block of the host to a new block of the device. trimmed: whether it needs no window pages."""
        assert self._host
        self.num_moves_in += 1
        target = allocate_counted(self._pool, 1, trimmed=int(trimmed))[0]
        self._pool.lock(target)
        pages = page_pairs(self._host, block, self._pool, target)
        return BlockTransfer(block, target, self._host.index.entry(block), pages)

    def _pages_on_host(self, block: int) -> int:
        """Return how many pages of the host a block needs at most. If the host has cached its content, that block is
        used, and it may have window pages that this one has lost."""
        assert self._host
        entry, pages = self._pool.index.entry(block), len(self._pool.pages_of(block))
        cached = self._host.index.find(entry) if entry else None
        return pages if cached is None else max(pages, len(self._host.pages_of(cached)))

    def _move_out(self, block: int) -> int | None:
        """Return a block of the host with this block's content and one reference: the cached one, or the target of a
        new move. None if there is no room."""
        assert self._host
        entry = self._pool.index.entry(block)
        cached, trimmed = self._host.index.find(entry) if entry else None, block in self._pool.trimmed
        if cached is not None and (trimmed or cached not in self._host.trimmed):
            self._host.touch(cached)
            return cached
        blocks = self._host.allocate(1, trimmed=int(trimmed))
        if blocks is None:
            return None
        if entry and cached is not None:
            self._host.forget(entry)  # the new block has the window pages as well
        if entry and self._host.caching:
            self._host.index.add(blocks[0], entry)
        self._host.lock(blocks[0])
        self._arriving.add(blocks[0])
        pages = page_pairs(self._pool, block, self._host, blocks[0])
        self._moves_out.append(BlockTransfer(block, blocks[0], entry, pages))
        self.num_moves_out += 1
        return blocks[0]
