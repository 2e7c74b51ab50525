"""The transfers of blocks: from the device to the host, back, and copies within the device.

planned     move_out, move_in, copy            while a step is planned; `cancel` takes a request's transfers back
taken       take                               the step makes them before it computes
finished    finish                             after the step

Until it is finished, a transfer locks the source of a copy, the target on the host, and both blocks of a move to the
device. The source of a move to the host is not locked: it may be used again in the same step, which copies it first.

Integers only: the runner copies the pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple, TypeAlias

from paged_backend.kv.content import Entry
from paged_backend.kv.pages import NULL, PagePool

PagePairs: TypeAlias = tuple[tuple[int, int], ...]  # (source, target) of pages


class Transfer(NamedTuple):
    """Copy a block with all of its pages to another."""

    source: int
    target: int
    # The content under which a block is indexed: the target of a move, on the host at once and on the device when the
    # move is finished; the source of a copy, when it is finished.
    entry: Entry | None = None
    pages: PagePairs = ()  # the pages to copy


class Transfers(NamedTuple):
    """What a step copies before it computes, in this order."""

    moves_out: tuple[Transfer, ...] = ()  # device to host
    moves_in: tuple[Transfer, ...] = ()  # host to device
    copies: tuple[Transfer, ...] = ()  # within the device

    def without_entries(self) -> Transfers:
        """Return the transfers without contents, which only the rank that schedules knows."""
        return Transfers(*(tuple(transfer._replace(entry=None) for transfer in part) for part in self))


NO_TRANSFERS = Transfers()


class TransferLedger:
    """Plans the transfers of a device pool and its host pool, and keeps their blocks until they are finished."""

    def __init__(self, device: PagePool, host: PagePool | None):
        self.num_moves_out = 0  # since the start, like the next two
        self.num_moves_in = 0
        self.num_copies = 0
        self._device = device
        self._host = host
        self._moves_out: list[Transfer] = []
        self._moves_in: dict[int, list[Transfer]] = {}  # by request
        self._copies: dict[int, list[Transfer]] = {}  # by request
        self._arriving: set[int] = set()  # blocks of the host whose moves are not finished

    @property
    def has_moves_out(self) -> bool:
        """True if moves to the host wait for the next step."""
        return bool(self._moves_out)

    def has_arrived(self, block: int) -> bool:
        """Return whether the content of a block of the host is there: False until its move is finished."""
        return block not in self._arriving

    def move_out(self, block: int, *, after: int = NULL) -> int | None:
        """Return a block of the host with this block's content: one that is cached there, or the target of a new move.
        The caller owns one reference to it. None if the host has no room. after: see `PagePool.allocate`."""
        device, host = self._device, self._host
        assert host
        entry, kind = device.entry(block), device.kind_of(block)
        cached = host.find(entry, kind) if entry else None
        if cached is not None:
            host.touch(cached)
            return cached
        allocated = host.allocate(1, kind, after=after)
        if allocated is None:
            return None
        target = allocated[0]
        if entry:
            host.index(target, entry)
        host.lock(target)
        self._arriving.add(target)
        self._moves_out.append(Transfer(block, target, entry, _pairs(device, block, host, target)))
        self.num_moves_out += 1
        return target

    def move_in(self, request: int, block: int, *, indexed: bool = True, after: int = NULL) -> int:
        """Plan to move a block of the host, which the caller has locked, to a new block of the device, and return the
        new block. indexed: whether the new block keeps the content; False if the request will write into it. after: see
        `PagePool.allocate`."""
        device, host = self._device, self._host
        assert host
        target = device.claim(1, host.kind_of(block), after=after)[0]
        device.lock(target)
        entry = host.entry(block) if indexed else None
        move = Transfer(block, target, entry, _pairs(host, block, device, target))
        self._moves_in.setdefault(request, []).append(move)
        self.num_moves_in += 1
        return target

    def copy(self, request: int, block: int, *, entry: Entry | None = None, after: int = NULL) -> int:
        """Plan to copy a block of the device, which the caller has locked, to a new block, and return the new block.
        entry: a content under which the block is cached once it is copied. after: see `PagePool.allocate`."""
        target = self._device.claim(1, self._device.kind_of(block), after=after)[0]
        copy = Transfer(block, target, entry, _pairs(self._device, block, self._device, target))
        self._copies.setdefault(request, []).append(copy)
        self.num_copies += 1
        return target

    def copies_to(self, request: int, block: int) -> bool:
        """Return whether a copy to this block is planned for a request."""
        return any(copy.target == block for copy in self._copies.get(request, ()))

    def cancel(self, request: int) -> bool:
        """Take back the planned moves in and copies of a request. Return whether there were any."""
        moves_in, copies = self._moves_in.pop(request, []), self._copies.pop(request, [])
        self.finish(Transfers((), tuple(moves_in), tuple(copies)), done=False)
        return bool(moves_in or copies)

    def take(self) -> Transfers:
        """Return the planned transfers, which the next step makes, and forget them."""
        moves_in, copies = (chain.from_iterable(parts.values()) for parts in (self._moves_in, self._copies))
        taken = Transfers(tuple(self._moves_out), tuple(moves_in), tuple(copies))
        self._moves_out = []
        self._moves_in.clear()
        self._copies.clear()
        return taken

    def take_moves_out(self) -> Transfers:
        """Return the planned moves to the host alone."""
        moves, self._moves_out = tuple(self._moves_out), []
        return Transfers(moves)

    def finish(self, transfers: Transfers, *, done: bool = True) -> None:
        """Unlock the blocks of transfers. Content that was moved in is cached from now on, even if its request has
        ended. Content that was not moved out is dropped from the host. done: whether the transfers were made."""
        device, host = self._device, self._host
        for move in transfers.moves_out:
            assert host
            if not done:
                host.forget(move.target)
            self._arriving.discard(move.target)
            host.unlock(move.target)
        for move in transfers.moves_in:
            assert host
            if done and move.entry:
                device.index(move.target, move.entry)
            device.unlock(move.target)
            host.unlock(move.source)
        for copy in transfers.copies:
            if done and copy.entry:
                device.index(copy.source, copy.entry)
            device.unlock(copy.source)


def _pairs(source_pool: PagePool, source: int, target_pool: PagePool, target: int) -> PagePairs:
    return tuple(zip(source_pool.pages_of(source), target_pool.pages_of(target), strict=True))


def page_pairs(transfers: Iterable[Transfer]) -> list[tuple[int, int]]:
    """Return the pages of transfers, as (source, target)."""
    return [pair for transfer in transfers for pair in transfer.pages]
