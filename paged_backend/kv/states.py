"""The states of recurrent layers: blocks of a kind of their own in the pool, of which a sequence holds one.

    tokens      0 1 2 3 | 4 5 6 7 | 8 9           block_size 4
    table        NULL   |  NULL   |  b8           the states after all of them
    cached               b5                       a checkpoint: the states after 8 tokens, as block 1 of the sequence

A step overwrites the states. Sequences that share a block get copies of it first, as of any other block that they write
into. A state at the end of a block can be continued by other sequences. The step that would overwrite it leaves it in
the prefix cache, if there is room, and continues in a copy.

A state cannot go back by a token. A step with draft tokens therefore stores the state after each of them in a block of
its own, and the sequence continues in the one of the last token that is accepted:

    tokens      t    g1   g2   g3       the chunk: the last token, then the draft tokens
    blocks      0    5    6    7        g1 is accepted: the sequence has block 5 from now on, and 0, 6 and 7 are free

Integers only, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np

from paged_backend.api.block_layout import BlockLayout
from paged_backend.kv.content import BlockKey, Entry
from paged_backend.kv.ledger import TransferLedger
from paged_backend.kv.pages import NULL, PagePool
from paged_backend.kv.sequence import Sequence


class CachedBlocks(Protocol):
    """What a block manager does for its `States`."""

    layout: BlockLayout
    block_size: int
    pool: PagePool
    ledger: TransferLedger

    def entry(self, sequence: Sequence, index: int) -> Entry:
        """Return the content of a full block of a sequence."""

    def cache(self, block: int, entry: Entry) -> None:
        """Index a block, unless another one has the same content."""

    def forget(self, key: BlockKey, *, on_host: bool = True) -> None:
        """Remove a content from the prefix cache."""


class States:
    """The blocks with the states of a model's recurrent layers. A part of the block manager."""

    def __init__(self, blocks: CachedBlocks, kind: int):
        """kind: the index of the kind of recurrent layers in the layout."""
        self.kind = kind
        self.pages = blocks.layout.kinds[kind].pages  # of a block
        self._blocks, self._pool, self._block_size = blocks, blocks.pool, blocks.block_size
        self._drafts: list[int] = []  # blocks for draft tokens of the step in flight

    @property
    def drafts(self) -> Items[int]:
        """The blocks for draft tokens of the step in flight."""
        return self._drafts

    @property
    def num_affordable(self) -> int:
        """The number of further blocks for which there is room."""
        return self._pool.num_available // self.pages

    def of(self, sequence: Sequence) -> int:
        """Return the block with the state of a sequence."""
        return sequence.tables[self.kind][-1]

    def resize(self, sequence: Sequence) -> None:
        """Make the block table as long as the others of a sequence, with a new block if it was empty."""
        table = sequence.tables[self.kind]
        block = table.pop() if table else self._pool.claim(1, self.kind)[0]
        del table[sequence.num_blocks - 1 :]
        table += [NULL] * (sequence.num_blocks - 1 - len(table))
        table.append(block)

    def num_pages_held(self, sequences: Iterable[Sequence]) -> int:
        """Return the number of pages with the states of sequences."""
        return self.pages * len({self.of(sequence) for sequence in sequences if sequence.num_blocks})

    def page_rows(self, blocks: Items[int]) -> np.ndarray:
        """Return the pages of blocks, [len(blocks), pages of a block] int32."""
        return self._pool.page_rows(self.kind, blocks)

    def chunk_length(self, start: int, length: int, total: int) -> int:
        """Return how many of `length` tokens from `start` to compute in one chunk, so that it ends where a cached state
        is useful: at a block boundary, the last one before the end of `total` tokens if that is in reach."""
        if not self._pool.caching:
            return length
        end = min(start + length, total - 1) // self._block_size * self._block_size
        return end - start if start < end else length

    def keep(self, sequences: Iterable[Sequence]) -> None:
        """Leave the states at block boundaries in the prefix cache, as far as there is room, and let the sequences that
        the next step computes continue in copies. Of the states in its output, a sequence keeps the latest."""
        for sequence in sequences if self._pool.caching else ():
            position, block = sequence.computed, self.of(sequence)
            if not position or position % self._block_size or self._blocks.ledger.copies_to(sequence.key, block):
                continue
            entry = self._blocks.entry(sequence, position // self._block_size - 1)
            if self._pool.find(entry, self.kind) not in (None, block):  # another sequence has left the same state
                continue
            if self.num_affordable:
                self._replace_latest(sequence, entry, position)
                self.copy(sequence, entry)
            else:
                self._blocks.forget(BlockKey(entry, self.kind), on_host=False)

    def copy(self, sequence: Sequence, entry: Entry | None = None) -> None:
        """Plan to copy the state of a sequence, which continues in the copy. entry: the content under which the
        original is cached."""
        table = sequence.tables[self.kind]
        source = table[-1]
        self._pool.lock(source)
        self._pool.free(source)
        table[-1] = self._blocks.ledger.copy(sequence.key, source, entry=entry)

    def take_drafts(self, count: int) -> tuple[int, ...]:
        """Return a block for the state after each of `count` draft tokens, until `free_drafts`. The caller has checked
        that there is room."""
        blocks = self._pool.claim(count, self.kind)
        self._drafts += blocks
        return tuple(blocks)

    def accept(self, sequence: Sequence, drafts: Items[int], num_accepted: int) -> None:
        """Continue a sequence from the state after the last accepted draft token, with which its computed tokens end.
        Cache the state at a block boundary before it."""
        table = sequence.tables[self.kind]
        blocks = (table[-1], *drafts)
        position = sequence.computed // self._block_size * self._block_size
        index = num_accepted - (sequence.computed - position)
        if self._pool.caching and 0 <= index < num_accepted:
            entry = self._blocks.entry(sequence, position // self._block_size - 1)
            if self._pool.find(entry, self.kind) is None:
                self._replace_latest(sequence, entry, position)
                self._blocks.cache(blocks[index], entry)
        if num_accepted:
            table[-1] = blocks[num_accepted]
            self._pool.touch(table[-1])
            self._pool.free(blocks[0])

    def free_drafts(self) -> None:
        """Free the blocks for draft tokens. After the step; sequences keep the states that they continue from."""
        self._pool.free_table(self._drafts)

    def _replace_latest(self, sequence: Sequence, entry: Entry, position: int) -> None:
        """Record the latest cached state of a sequence. Forget the one before if it is in the output; in the prompt,
        let it be evicted first."""
        latest, before = sequence.latest_checkpoint
        sequence.latest_checkpoint = entry, position
        if latest in (None, entry):
            return
        if before > sequence.num_prompt:
            self._blocks.forget(BlockKey(latest, self.kind))
        elif position <= sequence.num_prompt:
            self._pool.evict_first(BlockKey(latest, self.kind))
