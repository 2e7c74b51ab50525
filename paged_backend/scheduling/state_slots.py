"""The state slots of models with recurrent layers: one per sequence that computes, and checkpoints of prefixes.

A state belongs to one position: the tokens before it are all in it. A prefix can therefore be continued only from a
position at which the state was copied to a slot of its own, a checkpoint. Checkpoints are cached like blocks: they are
found by the content of the last block before them, and the least recently used is evicted. Integers only, no tensors.

    slots       0 sequence 7    1 sequence 8    2 checkpoint of 512 tokens    3 checkpoint of 48 tokens    4 free
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from paged_backend.scheduling.block_pool import BlockPool, allocate_counted
from paged_backend.scheduling.content import Contents, Entry
from paged_backend.scheduling.prefix_cache import CacheHit
from paged_backend.scheduling.sequence import Sequence


class StateCopy(NamedTuple):
    """Copy the state in slot `source` to slot `target`, in every layer, before the next step.

    All copies of a step read before any of them writes, so a source may be freed and used again in the same step.
    """

    source: int
    target: int
    key: int | None = None  # of the request whose sequence gets the state; None: the target is a checkpoint
    entry: Entry | None = None  # of a checkpoint: the content of the last block before it


class StateSlots:
    """Assigns a fixed number of slots to sequences and checkpoints. There are enough for all sequences that may run.

    A slot need not be cleared: a sequence that starts at position 0 does not read it. Without slots, for a model
    without recurrent layers, nothing is assigned.
    """

    def __init__(
        self,
        num_slots: int = 0,
        max_num_seqs: int = 0,
        *,
        contents: Contents | None = None,
        block_size: int = 1,
        caching: bool = False,
    ):
        """num_slots: 0 for a model without recurrent layers, else at least `max_num_seqs`; the others are for
        checkpoints. contents: the entries of the prefix cache. caching: whether prefixes are cached."""
        assert not num_slots or num_slots >= max_num_seqs
        self._pool = BlockPool(num_slots, caching=caching) if num_slots else None
        self._max_num_seqs = max_num_seqs
        self._contents = Contents() if contents is None else contents
        self._block_size = block_size
        self._caching = caching
        self._num_held = 0  # slots of sequences
        self._pinned: dict[Hashable, int] = {}  # checkpoints of sessions
        self._copies: list[StateCopy] = []  # for the next step
        self._written: set[int] = set()  # slots of checkpoints whose copies are not finished
        self._latest: dict[int, Entry] = {}  # by slot of a sequence, its latest checkpoint in the output

    @property
    def in_use(self) -> bool:
        """Whether the model has recurrent layers."""
        return self._pool is not None

    def chunk_length(self, start: int, length: int, total: int) -> int:
        """Return how many of `length` tokens from `start` to compute in one chunk, so that it ends where a checkpoint
        is useful: at a block boundary, the last one before the end of `total` tokens if that is in reach."""
        if not self._caching or self._pool is None:
            return length
        end = min(start + length, total - 1) // self._block_size * self._block_size
        return end - start if start < end else length

    def assign(self, sequence: Sequence) -> None:
        """Give a sequence a slot if it has none."""
        if self._pool and sequence.state_slot is None:
            assert not sequence.computed, "a sequence with computed tokens, but without a state"
            self._take_slot(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child a slot, to which the parent's state is copied before the next step."""
        if self._pool:
            assert parent.state_slot is not None and child.state_slot is None
            self._copies.append(StateCopy(parent.state_slot, self._take_slot(child), parent.key))

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence, if it has one. At a block boundary, its state becomes a checkpoint. A copy to
        the slot is not made any more."""
        slot = sequence.state_slot
        if self._pool is None or slot is None:
            return
        sequence.state_slot = None
        self._num_held -= 1
        self._latest.pop(slot, None)
        copies, self._copies = self._copies, [copy for copy in self._copies if copy.target != slot]
        position = sequence.committed
        is_complete = position == sequence.computed and len(copies) == len(self._copies)
        if self._caching and is_complete and position and not position % self._block_size:
            self._pool.index.add(slot, self._entry(sequence, position))
        self._pool.free(slot)

    def restrict(self, hit: CacheHit, entries: list[Entry]) -> CacheHit:
        """Return the longest part of a hit that ends at a checkpoint, without a partial block.

        entries: the contents of the hit's blocks.
        """
        if self._pool is None:
            return hit
        for count in range(len(hit.blocks), 0, -1):
            slot = self._pool.index.find(entries[count - 1])
            if slot is not None:
                return CacheHit(hit.blocks[:count])
        return CacheHit(())

    def adopt(self, sequence: Sequence, hit: CacheHit) -> None:
        """Give a sequence a slot, to which the checkpoint at the end of its cache hit is copied before the next
        step."""
        if self._pool and hit.blocks:
            checkpoint = self._pool.index.find(sequence.chain.entries[len(hit.blocks) - 1])
            assert checkpoint is not None, "a hit without its checkpoint"
            self._copies.append(StateCopy(checkpoint, self._take_slot(sequence), sequence.key))

    def save(self, sequence: Sequence) -> None:
        """Copy the state of a sequence to a checkpoint before the next step, if the sequence is at a block boundary and
        a slot is to spare. A checkpoint in the output takes the place of the one before."""
        position, slot = sequence.computed, sequence.state_slot
        if self._pool is None or not self._caching or slot is None or not position or position % self._block_size:
            return
        entry = self._entry(sequence, position)
        if self._pool.index.find(entry) is not None:
            return
        if any(slot == copy.target or entry is copy.entry for copy in self._copies):
            return  # the slot waits for its own copy, or another sequence saves the same state
        if position > sequence.num_prompt:
            before = self._latest.get(slot)
            if before is not None:
                self._pool.forget(before)
            self._latest[slot] = entry
        if self._num_spare > 0:
            target = allocate_counted(self._pool, 1)[0]
            self._written.add(target)
            self._copies.append(StateCopy(slot, target, entry=entry))

    def take_copies(self) -> tuple[StateCopy, ...]:
        """Return the copies to make before the next step, and forget them."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def finish(self, copies: Iterable[StateCopy], *, done: bool = True) -> None:
        """End copies. If they were done, their checkpoints can be found from now on."""
        for copy in copies:
            if self._pool and copy.entry is not None:
                if done:
                    self._pool.index.add(copy.target, copy.entry)
                self._written.remove(copy.target)
                self._pool.free(copy.target)

    def forget(self, sequence: Sequence) -> None:
        """Remove the checkpoints within the tokens of a sequence."""
        if self._pool:
            for entry in sequence.chain.entries:
                self._pool.forget(entry)

    def pin(self, name: Hashable, sequence: Sequence) -> None:
        """Keep the checkpoint at the end of a sequence's full blocks for a session, in place of the one that it had."""
        self.unpin(name)
        full = sequence.committed // self._block_size
        if self._pool and self._caching and full:
            slot = self._pool.index.find(self._entry(sequence, full * self._block_size))
            if slot is not None and self._num_spare >= self._pool.is_cached(slot):
                self._pool.touch(slot)
                self._pinned[name] = slot

    def unpin(self, name: Hashable) -> None:
        """Release the checkpoint of a session, if it has one."""
        slot = self._pinned.pop(name, None)
        if self._pool and slot is not None:
            self._pool.free(slot)

    def clear(self) -> None:
        """Forget all checkpoints, also those of sessions. No sequence has a slot."""
        self.finish(self.take_copies(), done=False)
        for name in list(self._pinned):
            self.unpin(name)
        if self._pool:
            for entry in [self._pool.index.entry(slot) for slot in self._pool.index.blocks]:
                assert entry
                self._pool.forget(entry)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert every invariant. For tests and idle moments."""
        held = [sequence.state_slot for sequence in sequences if sequence.state_slot is not None]
        assert len(held) == len(set(held)) == self._num_held <= self._max_num_seqs, "a state slot is used twice"
        if self._pool:
            self._pool.check([held, list(self._written), list(self._pinned.values())])
            assert self._num_spare >= 0, "not enough state slots for the sequences that may run"

    @property
    def _num_spare(self) -> int:
        """The number of available slots that no sequence will need."""
        assert self._pool
        return self._pool.num_available - (self._max_num_seqs - self._num_held)

    def _take_slot(self, sequence: Sequence) -> int:
        assert self._pool
        slot = allocate_counted(self._pool, 1)[0]
        sequence.state_slot = slot
        self._num_held += 1
        return slot

    def _entry(self, sequence: Sequence, position: int) -> Entry:
        """Return the content of the full block that ends at `position`."""
        count = position // self._block_size
        return self._contents.extend(sequence.chain, sequence.tokens, count, self._block_size)
