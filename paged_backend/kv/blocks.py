"""The block manager: which blocks hold the keys and values of which tokens. Integers, no tensors.

    sequence.tables       a block table for each kind of layer (api/block_layout.py)
    pool, host            pages.py: the blocks of the device and of the host, with the index of cached contents
    contents              content.py: the identity of contents, by tokens
    states                states.py: the blocks with the states of recurrent layers
    ledger                ledger.py: the transfers between device and host, and the copies on write

The life of a block: `extend` allocates it, steps write it, `commit` caches it when it is full, `free` leaves it cached,
`match` and `adopt` find it for another sequence, and at last it is evicted, to the host if there is room. `free` also
caches the last block of a sequence, which need not be full.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from paged_backend.api.block_layout import FULL, BlockLayout
from paged_backend.kv.content import HOST, BlockKey, BlockScores, Contents, Entry, Listener, PrefixParent
from paged_backend.kv.ledger import TransferLedger, Transfers
from paged_backend.kv.pages import NULL, RUN_PAGES, PagePool
from paged_backend.kv.sequence import Sequence
from paged_backend.kv.states import States


class Location(NamedTuple):
    """A block, and the pool that it is in."""

    block: int
    on_host: bool


@dataclass(frozen=True)
class Hit:
    """Cached blocks that hold the first tokens of a sequence. They are not referenced until `BlockManager.adopt`."""

    num_blocks: int = 0  # full blocks
    tables: tuple[list[Location | None], ...] = ()  # by kind; None: a block that no later token reads
    partial: tuple[Location, ...] = ()  # by kind: blocks whose first `partial_tokens` tokens match, or empty
    partial_tokens: int = 0

    @property
    def locations(self) -> Iterable[Location]:
        """All full blocks of all kinds."""
        return (location for table in self.tables for location in table if location)

    def without_partial(self) -> Hit:
        return replace(self, partial=(), partial_tokens=0)


NO_HIT = Hit()


class Allocation(NamedTuple):
    """The blocks of the first kind that were allocated to a sequence for a chunk."""

    new: int
    copied: int  # new blocks that are copies on write, a part of `new`


NO_BLOCKS = Allocation(0, 0)


class BlockManager:
    """Assigns blocks to sequences, finds cached ones, and swaps sequences to the host and back."""

    def __init__(
        self,
        num_pages: int,
        layout: BlockLayout,
        *,
        caching: bool = False,
        num_host_pages: int = 0,
        keeps_scores: bool = False,
        listener: Listener | None = None,
    ):
        """num_pages, num_host_pages: pages on the device, and on the host for evicted blocks and preempted requests.
        caching: whether prefixes are cached. keeps_scores: whether the optional outputs of prompts are cached with
        their blocks; they must depend on the tokens alone. listener: receives every content of the first kind that is
        cached or dropped."""
        self.layout = layout
        self.block_size: int = layout.block_size
        self.caching = caching
        self.keeps_scores = keeps_scores and caching
        sizes = [kind.pages for kind in layout.kinds]
        self.pool = PagePool(
            num_pages,
            sizes,
            single=layout.state,
            caching=caching,
            on_evict=self._offload,
            listener=listener,
            run_pages=RUN_PAGES,
        )
        self.host = (
            PagePool(num_host_pages, sizes, single=layout.state, caching=caching, listener=listener, medium=HOST)
            if num_host_pages
            else None
        )
        self.ledger = TransferLedger(self.pool, self.host)
        self.contents = Contents()
        self.states = None if layout.state is None else States(self, layout.state)  # None: no recurrent layers
        self._num_token_kinds, self._token_pages = len(layout.token_kinds), layout.token_pages
        self._dropping = [(index, kind) for index, kind in enumerate(layout.kinds) if not kind.keeps_all]
        self._keeping = [index for index, kind in enumerate(layout.kinds) if kind.keeps_all]
        self._unspilled: dict[int, None] = {}  # cached blocks that `spill` has not examined, oldest first

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_used(self) -> int:
        """Pages of the device in use."""
        return self.pool.num_used

    @property
    def stats(self) -> dict[str, float]:
        """The statistics of the blocks, by name. Counters count since the start."""
        pool, host, ledger = self.pool, self.host, self.ledger
        states_used, states_cached = pool.num_blocks(self.states.kind) if self.states else (0, 0)
        return {
            "block_size": self.block_size,
            "blocks_total": pool.num_pages,
            "blocks_used": pool.num_used,
            "blocks_cached": pool.num_cached,
            "blocks_shared": pool.num_shared,
            "evictions": pool.num_evictions,  # cached blocks whose content was dropped to make room
            "host_total": host.num_pages if host else 0,
            "host_used": host.num_used if host else 0,  # by preempted requests
            "host_cached": host.num_cached if host else 0,
            "copies": ledger.num_copies,  # on write
            "moves_out": ledger.num_moves_out,  # blocks moved to the host
            "moves_in": ledger.num_moves_in,  # blocks moved back
            "states_used": states_used,
            "states_cached": states_cached,
        }

    # --- the prefix cache -------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence, num_tokens: int) -> Hit:
        """Return the longest cached prefix of a sequence's first `num_tokens` tokens. Changes nothing in the pools.

        The hit is at least one token shorter, as the last token has to be computed to sample from its logits. The chain
        of the sequence is extended by the entries that were found, so the next call does not compute them again.
        """
        if not self.caching:
            return NO_HIT
        size, limit, entries = self.block_size, num_tokens - 1, sequence.chain.entries
        tables: list[list[Location | None]] = [[] for _ in self.layout.kinds]
        count = limit // size
        for index in range(count):
            if not self._extend_known(sequence, index) or not self._append_kept(entries[index], tables):
                count = index
                break
        while count and (missing := self._missing_block(entries, count)) is not None:
            count = missing
        for place in self._keeping:
            del tables[place][count:]
        for place, kind in self._dropping:
            needed = kind.needed(count, size)
            tables[place] = [self.locate(BlockKey(entries[at], place)) if at in needed else None for at in range(count)]
        hit = Hit(count, tuple(tables))
        if self.states:
            return hit  # a state can be continued from the end of a block only
        start = count * size
        rest = tuple(sequence.tokens[start : min(start + size, limit)])
        return self._with_partial(hit, sequence.chain.parent_of(count), rest)

    def adopt(self, sequence: Sequence, hit: Hit) -> None:
        """Begin the block tables of a sequence with the blocks of a hit, and plan the transfers that fill them.

        Full blocks on the device are shared. Blocks on the host are moved in. The partial block is copied, as the
        sequence will write into it, or taken over. The pool must have room for the new blocks.
        """
        taken_over = self.takes_over_partial(hit)
        for block, on_host in hit.locations:  # references all blocks first: allocating below may evict
            if on_host:
                self._lock(block, on_host=True)
            else:
                self.pool.touch(block)
        for block, on_host in hit.partial:
            if taken_over:
                self.pool.touch(block)
                self.pool.forget(block)
            else:
                self._lock(block, on_host=on_host)
        key, ledger = sequence.key, self.ledger
        tables: list[list[int]] = []
        for kind, located in enumerate(hit.tables or [[] for _ in self.layout.kinds]):
            table: list[int] = []
            for location in located:
                if location is None:
                    table.append(NULL)
                elif location.on_host:
                    indexed = kind != self.layout.state  # a state is overwritten
                    table.append(ledger.move_in(key, location.block, indexed=indexed, after=_last_of(table)))
                else:
                    table.append(location.block)
            tables.append(table)
        for table, (block, on_host) in zip(tables, hit.partial, strict=False):
            after = _last_of(table)
            if taken_over:
                table.append(block)
            elif on_host:
                table.append(ledger.move_in(key, block, indexed=False, after=after))
            else:
                table.append(ledger.copy(key, block, after=after))
        sequence.tables = tables
        sequence.computed = sequence.committed = hit.num_blocks * self.block_size + hit.partial_tokens
        sequence.placed = 0 if taken_over else sequence.committed
        usage = sequence.usage
        first = [location for location in (*(hit.tables[0] if hit.tables else ()), *hit.partial[:1]) if location]
        moved = sum(location.on_host for location in first)
        copied = sum(not location.on_host for location in hit.partial[:1] if not taken_over)
        usage.reused += len(first) - moved - copied
        usage.new += moved + copied
        usage.from_host += moved
        usage.copied += copied

    def takes_over_partial(self, hit: Hit) -> bool:
        """Return whether a sequence may write into the partial block of a hit, after its tokens, without a copy: if no
        other sequence has it, and all tokens in it match."""
        if any(on_host or not self.pool.is_cached(block) for block, on_host in hit.partial):
            return False
        entry = self.pool.entry(hit.partial[0].block) if hit.partial else None
        return entry is not None and len(entry.tokens) == hit.partial_tokens

    def commit(self, sequence: Sequence, end: int) -> None:
        """Record that keys and values are written up to `end`, cache the blocks that are full, and free those that no
        later token reads."""
        size = self.block_size
        first, sequence.committed = sequence.committed // size, end
        full = end // size
        if full <= first:
            return
        if self.caching:
            self.entry(sequence, full - 1)
            for kind, table in zip(self.layout.kinds, sequence.tables, strict=True):
                for index in range(first, full if kind.caches_freed else kind.needed(full, size).stop):
                    if table[index] != NULL:  # of states, only those at the end of the block
                        self.cache(table[index], sequence.chain.entries[index])
        for place, kind in self._dropping:
            table, needed = sequence.tables[place], kind.needed(full, size)
            for index in chain(kind.needed(first, size), range(first, full)):
                if index not in needed and table[index] != NULL:
                    self.pool.free(table[index])
                    table[index] = NULL

    def entry(self, sequence: Sequence, index: int) -> Entry:
        """Return the content of a sequence's full block `index`."""
        return self.contents.extend(sequence.chain, sequence.tokens, index + 1, self.block_size)

    def locate(self, key: BlockKey) -> Location | None:
        """Return where a block is cached, the device first, or None. Thread-safe."""
        block = self.pool.find(*key)
        if block is not None:
            return Location(block, False)
        block = self.host.find(*key) if self.host else None
        return None if block is None else Location(block, True)

    def invalidate(self, sequence: Sequence) -> None:
        """Remove the contents of a sequence's blocks, and the states within its tokens, from the prefix cache, on the
        host too. The sequence keeps its blocks."""
        for block in [] if sequence.on_host else _blocks_of(sequence.tables):
            entry = self.pool.entry(block)
            if entry is not None:
                self.forget(BlockKey(entry, self.pool.kind_of(block)))
        if self.states:
            for entry in sequence.chain.entries:
                self.forget(BlockKey(entry, self.states.kind))
        sequence.committed = 0  # so that `free` does not cache the last block either

    def find_scores(self, sequence: Sequence, index: int) -> BlockScores | None:
        """Return the scores of a sequence's full block `index`, or None if the device does not have them."""
        known = self._extend_known(sequence, index)
        block = self.pool.find(sequence.chain.entries[index]) if known else None
        return None if block is None else self.pool.indexes[0].scores.get(block)

    def add_scores(self, sequence: Sequence, index: int, scores: BlockScores) -> None:
        """Keep the scores of a sequence's full block `index` until it leaves the device's index."""
        block = self.pool.find(self.entry(sequence, index))
        if block is not None:
            known = self.pool.indexes[0].scores
            known[block] = scores.merged(known.get(block))

    # --- block tables -----------------------------------------------------------------------------------------------

    def extend(self, sequence: Sequence, num_tokens: int, *, num_states: int = 0) -> Allocation | None:
        """Give a sequence blocks for its first `num_tokens` tokens, with copies of the blocks to be written next that
        are shared. None, with nothing changed, if the pool is exhausted. num_states: further states for which there
        must be room.

        The caller counts the result in the usage when the tokens are committed.
        """
        size, pool, length = self.block_size, self.pool, len(sequence.tables[0])
        index, shared = sequence.computed // size, []
        if index < length:
            for table in sequence.tables[: self._num_token_kinds]:
                if pool.is_shared(table[index]):
                    shared.append(table)
        shares_state = self.states is not None and length > 0 and pool.is_shared(self.states.of(sequence))
        if not shared and not shares_state and not num_states and num_tokens <= length * size:
            return NO_BLOCKS
        more = max(0, self.layout.blocks_for(num_tokens) - length)
        pages = pool.num_pages_of(table[index] for table in shared) + more * self._token_pages
        if self.states:
            pages += self.states.pages * (shares_state + num_states + (not length and more > 0))
        if pages > pool.num_available:
            return None
        for table in shared:
            source = table[index]
            pool.lock(source)
            pool.free(source)  # drops the table's reference; the lock keeps one until the copy is made
            sequence.placed = sequence.computed
            table[index] = self.ledger.copy(sequence.key, source, after=table[index - 1] if index else NULL)
        if self.states and shares_state:
            self.states.copy(sequence)
        self._grow(sequence, more)
        return Allocation(bool(shared) + more, int(bool(shared)))

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Free the blocks after the first `num_tokens` tokens, which held rejected draft tokens."""
        excess = max(0, sequence.num_blocks - self.layout.blocks_for(num_tokens))
        for _ in range(excess):
            for table in sequence.tables[: self._num_token_kinds]:
                self.pool.free(table.pop())
        if self.states and excess:
            self.states.resize(sequence)
        sequence.usage.new -= excess

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child share the blocks of its parent, including a partial last block and the state. Both have the same
        tokens as far as the parent has computed them."""
        assert not child.num_blocks
        child.tables = [list(table) for table in parent.tables]
        for block in _blocks_of(child.tables):
            assert self.pool.is_used(block), "a fork of blocks that are not in use"
            self.pool.touch(block)
        child.computed, child.committed, child.placed = parent.computed, parent.committed, parent.computed
        child.chain = parent.chain.head(parent.computed // self.block_size)

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence, on the device or on the host. On the device, its full blocks remain cached,
        and so does the last one."""
        pool = self.host if sequence.on_host else self.pool
        assert pool
        self._cache_last(sequence)
        for table in sequence.tables:
            pool.free_table(table)
        sequence.on_host = False

    def restart(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence, whose tokens will be computed again."""
        self.free(sequence)
        sequence.computed = sequence.committed = 0

    def page_tables(self, kind: int, tables: np.ndarray) -> list[np.ndarray]:
        """Return block tables of a kind as tables of pages; see `PagePool.page_tables`."""
        if self.layout.kinds[kind] == FULL:  # each block is one page, and no block is NULL
            return [tables]
        return self.pool.page_tables(kind, tables)

    # --- room -------------------------------------------------------------------------------------------------------

    def missing_pages(self, sequences: Items[Sequence], *, forked: bool) -> int:
        """Return how many more pages a running request needs for the tokens that it has. forked: whether its sequences
        share the blocks of the prompt already."""
        blocks, pending, shared = self._sizes(sequences)
        total = 0
        for place, kind in enumerate(self.layout.kinds):
            if kind.keeps_all:
                held = sum(sequence.num_blocks for sequence in sequences)
                held -= (len(sequences) - 1) * shared if forked else 0
            else:
                held = len({block for sequence in sequences for block in self._held(sequence, place)})
            needed = self.layout.blocks_of_kind(kind, blocks, pending, shared)
            total += kind.pages * max(0, needed - held)
        return total

    def pages_to_admit(self, sequences: Items[Sequence], hit: Hit) -> int:
        """Return how many pages must be available to admit a request with this hit: pages for the new blocks of its
        tokens, and for blocks of the hit that are only cached. The source of the partial block is not counted."""
        blocks, pending, shared = self._sizes(sequences)
        total = 0
        for place, kind in enumerate(self.layout.kinds):
            needed = self.layout.blocks_of_kind(kind, blocks, pending, shared)
            if kind.keeps_all and hit.tables:  # in other kinds, new blocks will replace the hit's blocks
                here = [location.block for location in hit.tables[place] if location and not location.on_host]
                needed += sum(map(self.pool.is_cached, here)) - len(here)
            total += kind.pages * needed
        return total

    def pages_to_copy_partial(self, hit: Hit) -> int:
        """Return how many more pages must be available to copy the partial block of a hit: its source, if only cached,
        is locked meanwhile. None if it is taken over."""
        if self.takes_over_partial(hit):
            return 0
        sources = (location.block for location in hit.partial if not location.on_host)
        return self.pool.num_pages_of(block for block in sources if self.pool.is_cached(block))

    def pages_to_swap_in(self, sequences: Items[Sequence], active: Items[Sequence]) -> int:
        """Return how many pages must be available to swap a request in: for its blocks on the host, for blocks of its
        further tokens, and for copies of shared blocks that a sequence would write into. active: the sequences that may
        compute."""
        assert self.host
        sizes, size = self._sizes(sequences), self.block_size
        total = 0
        for place, kind in enumerate(self.layout.kinds):
            held = {block for sequence in sequences for block in sequence.tables[place]} - {NULL}
            if place == self.layout.state:
                total += kind.pages * self.layout.blocks_of_kind(kind, *sizes)
                continue
            more = sum(self.layout.blocks_for(len(sequence.tokens)) - sequence.num_blocks for sequence in active)
            written = [
                sequence.tables[place][sequence.computed // size]
                for sequence in active
                if sequence.computed < sequence.num_blocks * size
            ]
            copied = len(written) - len(set(written))
            if kind.keeps_all:
                total += kind.pages * (len(held) + more + copied)
            else:
                total += kind.pages * max(len(held) + copied, self.layout.blocks_of_kind(kind, *sizes))
        return total

    # --- the host ---------------------------------------------------------------------------------------------------

    def swap_out(self, sequences: Items[Sequence]) -> bool:
        """Move the blocks of sequences to the host. False, with nothing changed, if it lacks room for all."""
        if self.host is None or self.num_pages_held(sequences) > self.host.num_available:
            return False
        targets: dict[int, int] = {}
        for sequence in sequences:
            sequence.tables, left = [self._move_out(table, targets) for table in sequence.tables], sequence.tables
            for table in left:
                self.pool.free_table(table)
            sequence.on_host = True
        return True

    def num_pages_held(self, sequences: Iterable[Sequence]) -> int:
        """Return the number of pages in the blocks of sequences on the device."""
        blocks = {block for sequence in sequences for table in sequence.tables for block in table}
        return self.pool.num_pages_of(blocks - {NULL})

    def swap_in(self, sequences: Items[Sequence]) -> int:
        """Move the blocks of sequences back to the device, and return how many blocks of the first kind are moved.
        Blocks whose content is still cached on the device are reused, not moved. The device must have room for the
        rest."""
        host, state = self.host, self.layout.state
        assert host
        places = [block for sequence in sequences for table in sequence.tables for block in table if block != NULL]
        targets: dict[int, int] = {}
        for block in dict.fromkeys(places):  # cached ones first: allocating below may evict
            entry = host.entry(block)
            cached = self.pool.find(entry, host.kind_of(block)) if entry else None
            # A sequence that is planned already may overwrite a state that it has for itself.
            if cached is not None and (host.kind_of(block) != state or self.pool.is_cached(cached)):
                self.pool.touch(cached)
                targets[block] = cached
        moved = 0
        for table in (table for sequence in sequences for table in sequence.tables):
            after = NULL
            for block in table:
                if block != NULL and block not in targets:
                    host.lock(block)
                    kind = host.kind_of(block)
                    indexed = kind != state  # a state is overwritten
                    targets[block] = self.ledger.move_in(sequences[0].key, block, indexed=indexed, after=after)
                    moved += kind == 0
                after = targets.get(block, NULL)
        for block in places:
            self.pool.touch(targets[block])
        for target in targets.values():  # the references from above; the tables have theirs
            self.pool.free(target)
        for sequence in sequences:
            left = sequence.tables
            sequence.tables = [[targets.get(block, NULL) for block in table] for table in left]
            for table in left:
                host.free_table(table)
            sequence.on_host, sequence.placed = False, sequence.computed
        sequences[0].usage.new += moved
        sequences[0].usage.from_host += moved
        return moved

    @property
    def has_unspilled(self) -> bool:
        """True if `spill` has a block to examine."""
        return bool(self._unspilled)

    def spill(self, wanted: Callable[[BlockKey], bool], limit: int) -> Transfers:
        """Copy up to `limit` wanted blocks of the prefix cache to the host, for the stores behind it. The oldest
        go first, and each block is examined only once. Returns all planned moves to the host."""
        left = limit
        while self.host and self._unspilled and left:
            block = next(iter(self._unspilled))
            entry, kind = self.pool.entry(block), self.pool.kind_of(block)
            assert entry
            if self.host.find(entry, kind) is None and wanted(BlockKey(entry, kind)):
                if self._copy_out(block) is None:
                    break
                left -= 1
            del self._unspilled[block]
        return self.ledger.take_moves_out()

    def copy_to_host(self, key: BlockKey) -> int | None:
        """Return the host's block with this content, after planning a move to it if only the device has the content;
        `ledger.has_arrived` says whether it is there. None if neither pool has it, or the host has no room."""
        assert self.host
        block = self.pool.find(*key)
        return self.host.find(*key) if block is None else self._copy_out(block)

    def add_to_host(self, key: BlockKey) -> int | None:
        """Return a new cached block of the host for this content, which the caller fills at once. None if the host
        already has the content, or has no room."""
        assert self.host
        if self.host.find(*key) is not None or (allocated := self.host.allocate(1, key.kind)) is None:
            return None
        self.host.index(allocated[0], key.entry)
        self.host.free(allocated[0])
        return allocated[0]

    def reserve(self, keys: Iterable[BlockKey]) -> dict[BlockKey, int]:
        """Return new blocks of the device for the contents that neither pool has, as far as there is room. The caller
        fills them, then calls `insert`."""
        reserved: dict[BlockKey, int] = {}
        after = NULL
        for key in keys:
            if self.locate(key) is None:
                allocated = self.pool.allocate(1, key.kind, after=after)
                if allocated is None:
                    break
                after = reserved[key] = allocated[0]
        return reserved

    def insert(self, reserved: dict[BlockKey, int]) -> None:
        """Cache reserved blocks, whose contents are there now. The last are evicted first."""
        for key, block in reserved.items():
            self.cache(block, key.entry)
        for block in reversed(reserved.values()):
            self.pool.free(block)

    # --- clear and check --------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop all cached contents of the device, the latest first. No block of the device may be in use. The host
        keeps its contents."""
        self.ledger.finish(self.ledger.take_moves_out(), done=False)
        self._unspilled.clear()
        self.pool.forget_all()

    def check(self, sequences: Collection[Sequence], pinned: Iterable[Items[int]] = ()) -> None:
        """Assert every invariant, given all sequences, and the block tables of sessions. For tests and idle moments."""
        here = [table for sequence in sequences if not sequence.on_host for table in sequence.tables]
        self.pool.check([*here, *pinned, self.states.drafts if self.states else ()])
        if self.host:
            self.host.check(table for sequence in sequences if sequence.on_host for table in sequence.tables)
        for pool in (self.pool, self.host):
            for index in pool.indexes if pool else ():
                index.check(self.contents)
        assert self._unspilled.keys() <= {block for index in self.pool.indexes for block in index.blocks}
        for sequence in sequences:
            assert all(len(first) == len(second) for first, second in pairwise(sequence.tables))
            for place, table in enumerate(sequence.tables):
                held = self._held(sequence, place)
                assert NULL not in held, "a block that later tokens read is gone"
                assert sum(block != NULL for block in table) == len(held), "a block that no later token reads is held"

    # --- parts ------------------------------------------------------------------------------------------------------

    def _extend_known(self, sequence: Sequence, index: int) -> bool:
        """Extend the chain of a sequence to its full block `index`. False if there is no entry of its content."""
        size, entries = self.block_size, sequence.chain.entries
        while len(entries) <= index:
            start = len(entries) * size
            content = tuple(sequence.tokens[start : start + size])
            entry = self.contents.find(sequence.chain.parent_of(len(entries)), content)
            if entry is None:
                return False
            entries.append(entry)
        return True

    def _append_kept(self, entry: Entry, tables: list[list[Location | None]]) -> bool:
        """Append the blocks of a content in the kinds that keep all blocks. False if one is missing."""
        for kind in self._keeping:
            location = self.locate(BlockKey(entry, kind))
            if location is None:
                return False
            tables[kind].append(location)
        return True

    def _missing_block(self, entries: Items[Entry], count: int) -> int | None:
        """Return the index of a block that a hit of `count` blocks needs and that is not cached, or None. The hit must
        end before this block. Kinds that keep all blocks are not searched."""
        for place, kind in self._dropping:
            for index in reversed(kind.needed(count, self.block_size)):
                if self.locate(BlockKey(entries[index], place)) is None:
                    return index
        return None

    def _with_partial(self, hit: Hit, parent: PrefixParent, tokens: tuple[int, ...]) -> Hit:
        """Return a hit with the cached block after it that has the longest common prefix with `tokens`, if any. The
        device is preferred to the host if both are equal."""
        best = hit
        for pool in (self.pool, self.host):
            block, length = (pool and pool.indexes[0].nearest_child(parent, tokens)) or (-1, 0)
            if pool and length > best.partial_tokens:
                entry = pool.entry(block)
                assert entry
                others = [self.locate(BlockKey(entry, kind)) for kind in range(1, len(self.layout.kinds))]
                partial = [location for location in (Location(block, pool is self.host), *others) if location]
                if len(partial) == len(self.layout.kinds):
                    best = replace(hit, partial=tuple(partial), partial_tokens=length)
        return best

    def _grow(self, sequence: Sequence, more: int) -> None:
        for kind, table in enumerate(sequence.tables[: self._num_token_kinds]):
            table.extend(self.pool.claim(more, kind, after=_last_of(table)))
        if self.states and more:
            self.states.resize(sequence)

    def cache(self, block: int, entry: Entry) -> None:
        """Index a block, unless another one has the same content."""
        if self.pool.index(block, entry) and self.host:
            self._unspilled[block] = None

    def forget(self, key: BlockKey, *, on_host: bool = True) -> None:
        """Remove a content from the prefix cache. on_host: on the host too."""
        block = self.pool.find(*key)
        if block is not None:
            self.pool.forget(block)
            self._unspilled.pop(block, None)
        of_host = self.host.find(*key) if self.host and on_host else None
        if self.host and of_host is not None:
            self.host.forget(of_host)

    def _cache_last(self, sequence: Sequence) -> None:
        """Index the last block of a sequence that ends within it. Not if its content may not be there yet, if another
        sequence may write to it, if a cached block has the same tokens, or for a beam, of which most are dropped."""
        index, count = divmod(sequence.committed, self.block_size)
        if not self.caching or not count or sequence.on_host or self.states:
            return
        if sequence.committed <= sequence.placed or sequence.request.sampling.beam_width > 1:
            return
        last = [table[index] for table in sequence.tables]
        if any(map(self.pool.is_shared, last)):
            return
        tokens = tuple(sequence.tokens[sequence.committed - count : sequence.committed])
        parent = self.entry(sequence, index - 1) if index else sequence.chain.origin
        _, length = self.pool.indexes[0].nearest_child(parent, tokens) or (-1, 0)
        if length < count:
            entry = self.contents.intern(parent, tokens)
            for block in last:
                self.pool.index(block, entry)

    def _offload(self, block: int) -> None:
        """Move a cached block that is about to be evicted to the host, if it has room."""
        if self.host and self.host.caching:
            self._copy_out(block)
        self._unspilled.pop(block, None)

    def _copy_out(self, block: int) -> int | None:
        """Plan a copy of a cached block on the host, which stays cached there. None if the host has no room."""
        assert self.host
        target = self.ledger.move_out(block)
        if target is not None:
            self.host.free(target)
        return target

    def _lock(self, block: int, *, on_host: bool) -> None:
        pool = self.host if on_host else self.pool
        assert pool
        pool.lock(block)

    def _move_out(self, table: Items[int], targets: dict[int, int]) -> list[int]:
        """Return a block table of the host in place of one of the device. targets: blocks of the host, by those of the
        device, of all tables so far."""
        assert self.host
        swapped: list[int] = []
        for block in table:
            if block in targets:
                self.host.touch(targets[block])
            elif block != NULL:
                target = self.ledger.move_out(block, after=_last_of(swapped))
                assert target is not None, "pages that were counted available are not"
                targets[block] = target
            swapped.append(targets.get(block, NULL))
        return swapped

    def _held(self, sequence: Sequence, place: int) -> list[int]:
        """Return the blocks of one kind that a sequence holds."""
        table, size = sequence.tables[place], self.block_size
        return [table[at] for at in self.layout.kinds[place].held(sequence.committed // size, len(table), size)]

    def _sizes(self, sequences: Items[Sequence]) -> tuple[list[int], list[int], int]:
        """Return the number of blocks of each sequence, the number of its tokens that are not committed, and the number
        of full prompt blocks, which all sequences share."""
        blocks = [self.layout.blocks_for(len(sequence.tokens)) for sequence in sequences]
        pending = [len(sequence.tokens) - sequence.committed for sequence in sequences]
        return blocks, pending, sequences[0].num_prompt // self.block_size


class Pins:
    """The pinned block tables of each session, the least recently used first.

    The least recently used session is unpinned when the limit is exceeded or when a request needs its blocks. They are
    then cached and may be evicted.
    """

    def __init__(self, blocks: BlockManager, limit: int):
        """limit: maximum number of pinned pages; a block that several sessions pin counts once."""
        self._blocks = blocks
        self._limit = limit
        self._pinned: OrderedDict[Hashable, list[list[int]]] = OrderedDict()
        self._counts: Counter[int] = Counter()
        self.num_pages = 0  # pinned pages

    @property
    def counts(self) -> Mapping[int, int]:
        """The number of sessions that pin each block."""
        return self._counts

    def __contains__(self, name: Hashable) -> bool:
        """Return whether blocks of a session are pinned."""
        return name in self._pinned

    @property
    def tables(self) -> list[list[int]]:
        """The pinned block tables of all sessions and kinds of layers."""
        return [table for tables in self._pinned.values() for table in tables]

    def pin_and_free(self, name: Hashable, sequence: Sequence) -> None:
        """Pin the full blocks of an ended sequence for a session, in place of its former blocks, and free the other
        blocks of the sequence."""
        blocks = self._blocks
        full = sequence.committed // blocks.block_size
        tables = [table[:full] for table in sequence.tables]
        if full and blocks.states:  # the sequence may have left the state behind
            state = blocks.pool.find(blocks.entry(sequence, full - 1), blocks.states.kind)
            tables[blocks.states.kind][-1] = NULL if state is None else state
        for block in _blocks_of(tables):
            blocks.pool.touch(block)
        self.drop(name)
        self._pinned[name] = tables
        for block in _blocks_of(tables):
            self._counts[block] += 1
            if self._counts[block] == 1:
                self.num_pages += len(blocks.pool.pages_of(block))
        while self.num_pages > self._limit:
            self.drop_oldest()
        blocks.free(sequence)

    def drop(self, name: Hashable) -> None:
        """Unpin the blocks of a session, if it has any."""
        tables = self._pinned.pop(name, [])
        for block in _blocks_of(tables):
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]
                self.num_pages -= len(self._blocks.pool.pages_of(block))
        for table in tables:
            self._blocks.pool.free_table(table)

    def drop_oldest(self) -> bool:
        """Unpin the blocks of the least recently used session. False if there is none."""
        if not self._pinned:
            return False
        self.drop(next(iter(self._pinned)))
        return True


def _last_of(table: Items[int]) -> int:
    return table[-1] if table else NULL


def _blocks_of(tables: list[list[int]]) -> list[int]:
    return [block for table in tables for block in table if block != NULL]
