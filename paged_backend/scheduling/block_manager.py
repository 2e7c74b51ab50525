"""Which block belongs to whom. Integers only: no tensor is in sight here.

pool     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     one physical block = block_size slots in every layer
free     [5, 2]                                a stack: the block freed last is warm in the cache, and goes first
cached   7 -> 0                                released with their content known, least recently used first
in use   {1: 1, 3: 2, 4: 1, 6: 3}              how many block tables hold each

A second pool may stand behind the first: what is evicted from the device's goes to the host's, where it can still be
found, and what is preempted waits there. Both are this class; `Move`s say what is to be copied between them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.scheduling.content import Chain, Contents, Entry, Index, PrefixParent


class Copy(NamedTuple):
    """Copy-on-write: the whole of block `source` goes to block `target`, in every layer, before the next step."""

    source: int
    target: int


class Move(NamedTuple):
    """The whole of a block goes to a block of the other pool. `entry` is what it holds, if that is to be known there:
    at once on the way out, and once it has arrived on the way in."""

    source: int
    target: int
    entry: Entry | None


class BlockLocation(NamedTuple):
    """Where something was found."""

    block: int
    on_host: bool


@dataclass(frozen=True)
class CacheHit:
    """Blocks that hold the first tokens of a sequence. Nobody's yet: `adopt` takes them."""

    blocks: tuple[BlockLocation, ...]  # full ones
    partial: BlockLocation | None = None  # a block whose first `partial_tokens` continue them, and the rest does not
    partial_tokens: int = 0

    @property
    def on_device(self) -> list[int]:
        return [place.block for place in self.blocks if not place.on_host]


@dataclass
class BlockCounters:
    """What has happened to blocks since the pool was made."""

    evictions: int = 0  # cached blocks that lost their content to a newer owner
    copies: int = 0  # copy-on-write
    moves_out: int = 0  # to the host
    moves_in: int = 0  # and back


NO_HIT = CacheHit(())

# What a map of the pool shows of a block: free, cached, held by so many block tables, pinned and held by none of them.
FREE, CACHED, HELD, HELD_BY_MORE, PINNED = ".", "c", "123456789", "+", "p"
_OF_COUNT = (FREE + HELD).encode().ljust(256, HELD_BY_MORE.encode())  # the mark of a block that so many hold


class BlockManager:
    """Hands out the blocks of a fixed pool and remembers what they hold. Free + cached + used = total, always;
    `check()` proves it."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = False, host: BlockManager | None = None):
        assert num_blocks >= 1 and block_size >= 1, (num_blocks, block_size)
        assert host is None or host.block_size == block_size
        self.num_blocks = num_blocks
        self.block_size: int = block_size
        self.caching = caching
        self.host = host
        self.counters = BlockCounters()
        self.contents: Contents = host.contents if host else Contents()
        self.index = Index()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._busy: Counter[int] = Counter()  # of the references, those of copies and moves that are not done yet
        self._shared = 0
        self._outs: list[Move] = []  # to do before anything of the next step
        self._fresh: dict[int, None] = {}  # blocks that became known here, and that `spill` has not looked at yet

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can still be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_shared(self) -> int:
        """Blocks that more than one block table holds."""
        return self._shared

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None with nothing changed where fewer are available."""
        assert count >= 0, count
        if count > self.num_available:
            return None
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend a block table to hold `num_tokens` tokens; False, with nothing changed, where the pool is dry."""
        blocks = self.allocate(max(0, self.blocks_for(num_tokens) - len(table)))
        if blocks is None:
            return False
        table.extend(blocks)
        return True

    def release(self, table: list[int]) -> None:
        """Let go of a whole block table, and empty it: the tail first, so that it is evicted before the head, which
        more requests can use. Raises ValueError for a block that is not in use."""
        for block in reversed(table):
            self.drop(block)
        table.clear()

    def drop(self, block: int) -> None:
        """Let go of one block. Raises ValueError where it is not in use."""
        if not 0 <= block < self.num_blocks or not self._references[block]:
            raise ValueError(f"block {block}: released, but not in use")
        self._references[block] -= 1
        if self._references[block] == 1:
            self._shared -= 1
        elif self._references[block] == 0:
            if self.index.contains(block):
                self._cached[block] = None
            else:
                self._free.append(block)

    def hold(self, block: int) -> None:
        """One holder more. A cached block is in use again."""
        self._cached.pop(block, None)
        self._references[block] += 1
        if self._references[block] == 2:
            self._shared += 1

    def num_freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """Blocks that would become available if these tables were released."""
        held = Counter(block for table in tables for block in table)
        return sum(self._references[block] == count for block, count in held.items())

    def fork(self, table: Sequence[int]) -> list[int]:
        """A second block table of the same blocks, the partial last one too."""
        assert all(self._references[block] for block in table), "a fork of blocks that are not in use"
        for block in table:
            self.hold(block)
        return list(table)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def is_shared(self, block: int) -> bool:
        """Whether writing into it would change what another block table reads."""
        return self._references[block] - self._busy[block] > 1

    def lock(self, block: int) -> None:
        """Hold a block for a copy or move; `unlock` lets it go."""
        self.hold(block)
        self._busy[block] += 1

    def unlock(self, block: int) -> None:
        self._busy[block] -= 1
        self.drop(block)

    def make_writable(self, table: list[int], index: int) -> Copy | None:
        """Put a block of its own in place of a shared one. None, with nothing changed, where the pool is dry. Until
        `finish` the source of a copy is held: neither evicted nor anybody else's target."""
        blocks = self.allocate(1)
        if blocks is None:
            return None
        source, table[index] = table[index], blocks[0]
        self._busy[source] += 1  # the table's reference is now the copy's
        self.counters.copies += 1
        return Copy(source, blocks[0])

    def finish(self, copies: Iterable[Copy]) -> None:
        """Let go of the sources of copies that are done, or will not be."""
        for copy in copies:
            self.unlock(copy.source)

    # --- content -------------------------------------------------------------------------------------------------

    def match(self, chain: Chain, tokens: Sequence[int]) -> CacheHit:
        """The longest known prefix of `tokens`, always at least one token short of all: it must be computed, so that
        there is something to sample from. `chain` gets what was found here, so that the next try is a matter of
        looking up. Changes nothing else."""
        if not self.caching:
            return NO_HIT
        size, most, entries = self.block_size, len(tokens) - 1, chain.entries
        places: list[BlockLocation] = []
        for start in range(0, most // size * size, size):
            index = len(places)
            if index == len(entries):
                entry = self.contents.find(chain.before(index), tuple(tokens[start : start + size]))
                if entry is None:
                    break
                entries.append(entry)
            place = self.find(entries[index])
            if place is None:
                break
            places.append(place)
        start = len(places) * size
        return CacheHit(
            tuple(places), *self._nearest(chain.before(len(places)), tuple(tokens[start : min(start + size, most)]))
        )

    def find(self, entry: Entry) -> BlockLocation | None:
        """Where this content is known: here, or on the host. From any thread."""
        block = self.index.find(entry)
        if block is not None:
            return BlockLocation(block, False)
        block = self.host.index.find(entry) if self.host else None
        return None if block is None else BlockLocation(block, True)

    def adopt(self, hit: CacheHit) -> tuple[list[int], list[Move], list[Copy]]:
        """A block table of a hit's blocks, the partial one as a block of its own; the moves that bring in what is on
        the host, and the copy of a partial one that is not. The pool must have room for these."""
        for place in hit.blocks:  # first, so that nothing of the hit is evicted for the rest of it
            self._lock(place) if place.on_host else self.hold(place.block)
        if hit.partial:
            self._lock(hit.partial)
        table, moves, copies = [], [], []
        for block, on_host in hit.blocks:
            if on_host:
                moves.append(self._in(block))
                block = moves[-1].target
            table.append(block)
        if hit.partial:
            source, on_host = hit.partial
            if on_host:
                moves.append(self._in(source)._replace(entry=None))
                table.append(moves[-1].target)
            else:
                copies.append(Copy(source, self._allocate(1)[0]))
                table.append(copies[-1].target)
                self.counters.copies += 1
        return table, moves, copies

    def seal(self, block: int, chain: Chain, tokens: Sequence[int], index: int) -> None:
        """Make a sequence's full block `index` known by its content."""
        assert self._references[block], f"block {block}: sealed, but not in use"
        if self.caching and not self.index.contains(block) and self.index.add(block, self.entry(chain, tokens, index)):
            self._fresh[block] = None

    def entry(self, chain: Chain, tokens: Sequence[int], index: int) -> Entry:
        """What a sequence's full block `index` holds; works out and keeps those up to it."""
        return self.contents.extend(chain, tokens, index + 1, self.block_size)

    def disown(self, table: list[int]) -> None:
        """Nobody is to find what these blocks hold any more, here or on the host. Their holders keep them."""
        for block in table:
            if self.index.contains(block):
                entry = self.index.remove(block)
                self._fresh.pop(block, None)
                if self.host:
                    self.host._discard(entry)

    def _discard(self, entry: Entry) -> None:
        block = self.index.find(entry)
        if block is not None:
            self.index.remove(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def _nearest(self, before: PrefixParent, tokens: tuple[int, ...]) -> tuple[BlockLocation | None, int]:
        here = self.index.nearest_child(before, tokens) or (-1, 0)
        there = (self.host.index.nearest_child(before, tokens) if self.host else None) or (-1, 0)
        block, length = max(here, there, key=lambda found: found[1])  # of equals the one that is nearer
        return (BlockLocation(block, there[1] > here[1]), length) if length else (None, 0)

    def _allocate(self, count: int) -> list[int]:
        blocks = self.allocate(count)
        assert blocks is not None, "blocks that were counted available are not"
        return blocks

    def _take(self) -> int:
        return self._free.pop() if self._free else self._evict()

    def _evict(self) -> int:
        """The least recently used cached block; its content goes to the host, if there is room, or is forgotten."""
        block, _ = self._cached.popitem(last=False)
        if self.host and self.host.caching and (kept := self._out(block)) is not None:
            self.host.drop(kept)
        self.index.remove(block)
        self._fresh.pop(block, None)
        self.counters.evictions += 1
        return block

    # --- the host's pool -----------------------------------------------------------------------------------------

    def take_moves_out(self) -> tuple[Move, ...]:
        """What must leave before anything else of the next step happens."""
        moves_out, self._outs = tuple(self._outs), []
        return moves_out

    def finish_moves_out(self, moves_out: Iterable[Move], *, done: bool = True) -> None:
        """Let go of the host's blocks. What did not arrive is not known there."""
        for move in moves_out:
            assert self.host
            if not done and self.host.index.contains(move.target):
                self.host.index.remove(move.target)
            self.host.unlock(move.target)

    def finish_moves_in(self, moves_in: Iterable[Move], *, done: bool = True) -> None:
        """Let go of both blocks. What has arrived is known here, even if its owner is gone by now."""
        for move in moves_in:
            assert self.host
            if done and move.entry and self.caching:
                self.index.add(move.target, move.entry)
            self.unlock(move.target)
            self.host.unlock(move.source)

    @property
    def has_unspilled(self) -> bool:
        """Whether `spill` has something to look at."""
        return bool(self._fresh)

    def spill(self, wanted: Callable[[Entry], bool], most: int) -> tuple[Move, ...]:
        """Up to `most` known blocks of wanted content go to the host as well, those that became known first; each is
        looked at once."""
        left = most
        while self.host and self._fresh and left:
            block = next(iter(self._fresh))
            entry = self.index.entry(block)
            assert entry
            if self.host.index.find(entry) is None and wanted(entry):
                kept = self._out(block)
                if kept is None:
                    break
                self.host.drop(kept)
                left -= 1
            del self._fresh[block]
        return self.take_moves_out()

    def keep(self, entry: Entry) -> int | None:
        """A block that holds this and that nobody holds, to be filled at once. None where there is one, or no room."""
        if self.index.find(entry) is not None or not self.num_available:
            return None
        block = self._allocate(1)[0]
        self.index.add(block, entry)
        self.drop(block)
        return block

    def swap_out(self, tables: Sequence[list[int]]) -> list[list[int]] | None:
        """Move block tables to the host: tables of its blocks, which hold them, in their place. None, with nothing
        changed, where it has no room for all."""
        if self.host is None or len({block for table in tables for block in table}) > self.host.num_available:
            return None
        moved: dict[int, int] = {}
        for block in (block for table in tables for block in table):
            if block in moved:
                self.host.hold(moved[block])
            else:
                target = self._out(block)
                assert target is not None, "blocks that were counted available are not"
                moved[block] = target
        on_host = [[moved[block] for block in table] for table in tables]
        for table in tables:
            self.release(table)
        return on_host

    def swap_in(self, tables: Sequence[list[int]]) -> tuple[list[list[int]], list[Move]]:
        """Block tables with the content of these of the host's, which are released, and the moves that bring it. What
        is still known here is taken as it is. The pool must have room for the rest."""
        assert self.host
        blocks = list(dict.fromkeys(block for table in tables for block in table))
        here: dict[int, int] = {}
        for block in blocks:  # first, so that none of them is evicted for another
            entry = self.host.index.entry(block)
            known = self.index.find(entry) if entry else None
            if known is not None:
                self.hold(known)
                here[block] = known
        moves = []
        for block in blocks:
            if block not in here:
                self.host.lock(block)
                moves.append(self._in(block))
                here[block] = moves[-1].target
        held = Counter(block for table in tables for block in table)
        for block in held - Counter(blocks):
            for _ in range(held[block] - 1):
                self.hold(here[block])
        moved = [[here[block] for block in table] for table in tables]
        for table in tables:
            self.host.release(table)
        return moved, moves

    def _out(self, block: int) -> int | None:
        """A block of the host's with this one's content, held for the caller. None where there is no room."""
        assert self.host
        entry = self.index.entry(block)
        known = self.host.index.find(entry) if entry else None
        if known is not None:
            self.host.hold(known)
            return known
        blocks = self.host.allocate(1)
        if blocks is None:
            return None
        if entry and self.host.caching:
            self.host.index.add(blocks[0], entry)
        self.host.lock(blocks[0])
        self._outs.append(Move(block, blocks[0], entry))
        self.counters.moves_out += 1
        return blocks[0]

    def _in(self, block: int) -> Move:
        """Bring in a block of the host's, which is locked."""
        assert self.host
        self.counters.moves_in += 1
        target = self._allocate(1)[0]
        self.lock(target)
        return Move(block, target, self.host.index.entry(block))

    def _lock(self, place: BlockLocation) -> None:
        pool = self.host if place.on_host else self
        assert pool
        pool.lock(place.block)

    # -------------------------------------------------------------------------------------------------------------
    def states(self, pinned: Mapping[int, int] | None = None) -> str:
        """One character a block, in order of their numbers. pinned: how many sessions keep each. For the engine's
        thread: a millisecond or two for 100,000 blocks, as only the fewer of the free and the cached are walked one by
        one."""
        try:
            counts = bytes(self._references)
        except ValueError:  # a count above 255
            counts = bytes([count if count < 256 else 255 for count in self._references])
        few: Iterable[int] = self._free
        mark, other = FREE, CACHED
        if len(self._cached) < len(self._free):
            few, mark, other = self._cached, other, mark
        marks = bytearray(counts.translate(other.encode() + _OF_COUNT[1:]))
        number = ord(mark)
        for block in few:
            marks[block] = number
        for block, sessions in (pinned or {}).items():
            if self._references[block] == sessions:  # no request holds it
                marks[block] = ord(PINNED)
        return marks.decode()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, against all live block tables. For tests and idle moments: it walks the pool."""
        owned = Counter(block for table in tables for block in table) + self._busy
        assert all(self._references[block] == owned[block] for block in range(self.num_blocks)), "a wrong count"
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert not set(self._free) & self._cached.keys(), "a block is free and cached"
        assert not (set(self._free) | self._cached.keys()) & owned.keys(), "a block is free and owned"
        assert len(owned) + len(self._free) + len(self._cached) == self.num_blocks, "a block is lost"
        assert self._shared == sum(count > 1 for count in owned.values()), "the number of shared blocks is off"
        known = self.index.blocks
        assert not known & set(self._free), "a free block is known"
        assert self._cached.keys() <= known, "a cached block is not known"
        self.index.check(self.contents)
