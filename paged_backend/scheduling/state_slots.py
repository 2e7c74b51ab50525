"""The state slots of models with recurrent layers: one per sequence that computes, and checkpoints of prefixes.

    slots       0 sequence 7    1 sequence 8    2 checkpoint of 512 tokens    3 checkpoint of 48 tokens    4 free
    host        0 sequence 3    1 free                                        states of swapped-out sequences

A state cannot go back by a token. A step with draft tokens therefore stores the state after each of them in a slot of
its own, and the sequence continues in the slot of the last one that is accepted:

    tokens      t    g1   g2   g3       the chunk: the last token, then the draft tokens
    slots       0    5    6    7        g1 is accepted: the sequence has slot 5 from now on, and 0, 6 and 7 are free

Integers only, no tensors. Checkpoints are in state_checkpoints.py, the slots of the host in host_states.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

from paged_backend.scheduling.block_pool import BlockPool, allocate_counted
from paged_backend.scheduling.content import Contents, Entry
from paged_backend.scheduling.host_states import HostStates
from paged_backend.scheduling.prefix_cache import CacheHit
from paged_backend.scheduling.sequence import Sequence
from paged_backend.scheduling.state_checkpoints import StateCheckpoints


class StateCopy(NamedTuple):
    """Copy the state in slot `source` to slot `target`, in every layer, before the next step.

    All copies within the device read before any copy writes, so a source may be freed and used again in the same step.
    """

    source: int
    target: int
    key: int | None = None  # of the request whose sequence gets the state; None: the target is a checkpoint
    entry: Entry | None = None  # of a checkpoint: the content of the last block before it
    from_host: bool = False  # whether `source` is a slot of the host, which is free after the copy


def num_draft_slots(max_num_seqs: int, max_num_batched_tokens: int, max_draft_tokens: int) -> int:
    """Return how many draft tokens a step may have, each of which needs a slot. max_draft_tokens: of a sequence."""
    return min(max_num_seqs * max_draft_tokens, max_num_batched_tokens)


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
        host: HostStates | None = None,
        num_draft_slots: int = 0,
    ):
        """num_slots: 0 for a model without recurrent layers, else at least `max_num_seqs + num_draft_slots`; the others
        are for checkpoints. contents: the entries of the prefix cache. caching: whether prefixes are cached. host: the
        slots of the host; by default none. num_draft_slots: slots that are reserved for draft tokens."""
        assert not num_slots or num_slots >= max_num_seqs + num_draft_slots
        self.pool = BlockPool(num_slots, caching=caching) if num_slots else None  # None: no recurrent layers
        self.num_slots = num_slots
        self.num_held = 0  # slots of sequences
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._caching = caching
        self.host = host or HostStates()
        self.checkpoints = StateCheckpoints(
            self.pool,
            Contents() if contents is None else contents,
            block_size,
            lambda: self._num_spare,
            caching=caching,
        )
        self._num_draft_slots = num_draft_slots
        self._drafts: set[int] = set()  # slots for draft tokens of the step in flight
        self._copies: list[StateCopy] = []  # for the next step
        self._written: set[int] = set()  # slots of checkpoints whose copies are not finished
        self._arriving: list[StateCopy] = []  # copies to slots of sequences that are not finished
        self._latest: dict[int, Entry] = {}  # by slot of a sequence, its latest checkpoint in the output

    @property
    def num_checkpoints(self) -> int:
        """The number of checkpoints: of the prefix cache, and of sessions."""
        if self.pool is None:
            return 0
        pinned = self.pool.num_used - self.num_held - len(self._drafts) - len(self._written)
        return self.pool.num_cached + pinned

    def chunk_length(self, start: int, length: int, total: int) -> int:
        """Return how many of `length` tokens from `start` to compute in one chunk, so that it ends where a checkpoint
        is useful: at a block boundary, the last one before the end of `total` tokens if that is in reach."""
        if not self._caching or self.pool is None:
            return length
        end = min(start + length, total - 1) // self._block_size * self._block_size
        return end - start if start < end else length

    def assign(self, sequence: Sequence) -> None:
        """Give a sequence a slot if it has none."""
        if self.pool and sequence.state_slot is None:
            assert not sequence.computed, "a sequence with computed tokens, but without a state"
            self._take_slot(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child a slot, to which the parent's state is copied before the next step."""
        if self.pool:
            assert parent.state_slot is not None and child.state_slot is None
            self._copies.append(StateCopy(parent.state_slot, self._take_slot(child), parent.key))

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence, if it has one, on the device or on the host. At a block boundary, its state on
        the device becomes a checkpoint. A copy to the slot is not made any more."""
        if sequence.host_state_slot is not None:
            self.host.free(sequence.host_state_slot)
            sequence.host_state_slot = None
        dropped = self._release_slot(sequence)
        if dropped and dropped.from_host:
            self.host.free(dropped.source)

    def take_draft_slots(self, count: int) -> tuple[int, ...]:
        """Return slots for the states after each of `count` draft tokens, until `free_draft_slots`. There are enough
        for a step. None without recurrent layers."""
        if self.pool is None:
            return ()
        assert len(self._drafts) + count <= self._num_draft_slots, "more draft tokens than a step may have"
        slots = allocate_counted(self.pool, count)
        self._drafts.update(slots)
        return tuple(slots)

    def accept(self, sequence: Sequence, draft_slots: tuple[int, ...], num_accepted: int) -> None:
        """Continue a sequence, whose tokens were committed, from the state after the last accepted draft token. The
        state at a block boundary before it becomes a checkpoint."""
        own = sequence.state_slot
        if self.pool is None or own is None:
            return
        slots = (own, *draft_slots)
        kept = sequence.state_slot = slots[num_accepted]
        if own in self._latest:
            self._latest[kept] = self._latest.pop(own)
        position = sequence.committed // self._block_size * self._block_size
        index = num_accepted - (sequence.committed - position)
        if self._caching and 0 <= index < num_accepted:
            entry = self.checkpoints.entry(sequence, position)
            if self.pool.index.add(slots[index], entry):
                self._replace_latest(kept, entry)
        self._drafts.difference_update(draft_slots)
        for slot in slots:
            if slot != kept:
                self.pool.free(slot)

    def free_draft_slots(self) -> None:
        """Free the slots for draft tokens of sequences that have ended before the step."""
        for slot in self._drafts:
            assert self.pool
            self.pool.free(slot)
        self._drafts.clear()

    def swap_out(self, sequences: Items[Sequence]) -> None:
        """Move the states of sequences to the host and free their slots. The caller has checked that the host has
        room."""
        for sequence in sequences:
            slot = sequence.state_slot
            if slot is None:
                continue
            dropped = self._release_slot(sequence)
            if dropped and dropped.from_host:
                sequence.host_state_slot = dropped.source  # the state has not left the host yet
            else:
                sequence.host_state_slot = self.host.move_out(dropped.source if dropped else slot)

    def swap_in(self, sequences: Items[Sequence]) -> None:
        """Give swapped-out sequences slots, to which their states are copied before the next step."""
        for sequence in sequences:
            source = sequence.host_state_slot
            if source is not None:
                self._copies.append(StateCopy(source, self._take_slot(sequence), sequence.key, from_host=True))
                sequence.host_state_slot = None

    def adopt(self, sequence: Sequence, hit: CacheHit) -> None:
        """Give a sequence a slot, to which the checkpoint at the end of its cache hit is copied before the next
        step."""
        if self.pool and hit.blocks:
            checkpoint = self.pool.index.find(sequence.chain.entries[len(hit.blocks) - 1])
            assert checkpoint is not None, "a hit without its checkpoint"
            self._copies.append(StateCopy(checkpoint, self._take_slot(sequence), sequence.key))

    def save(self, sequence: Sequence) -> None:
        """Copy the state of a sequence to a checkpoint before the next step, if the sequence is at a block boundary and
        a slot is to spare. A checkpoint in the output takes the place of the one before."""
        position, slot = sequence.computed, sequence.state_slot
        if self.pool is None or not self._caching or slot is None or not position or position % self._block_size:
            return
        entry = self.checkpoints.entry(sequence, position)
        if self.pool.index.find(entry) is not None:
            return
        if any(slot == copy.target or entry is copy.entry for copy in self._copies):
            return  # the slot waits for its own copy, or another sequence saves the same state
        if position > sequence.num_prompt:
            self._replace_latest(slot, entry)
        if self._num_spare > 0:
            target = allocate_counted(self.pool, 1)[0]
            self._written.add(target)
            self._copies.append(StateCopy(slot, target, entry=entry))

    def take_copies(self) -> tuple[StateCopy, ...]:
        """Return the copies to make before the next step, and forget them."""
        copies, self._copies = tuple(self._copies), []
        self._arriving += [copy for copy in copies if copy.entry is None]
        return copies

    def finish(self, copies: Iterable[StateCopy], *, done: bool = True) -> None:
        """End copies. If they were done, their checkpoints can be found from now on."""
        for copy in copies:
            if copy.entry is None:
                self._arriving.remove(copy)
                if copy.from_host:
                    self.host.free(copy.source)
            elif self.pool:
                if done:
                    self.pool.index.add(copy.target, copy.entry)
                self._written.remove(copy.target)
                self.pool.free(copy.target)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert every invariant. For tests and idle moments."""
        sequences = list(sequences)
        held = [sequence.state_slot for sequence in sequences if sequence.state_slot is not None]
        assert len(held) == len(set(held)) == self.num_held <= self._max_num_seqs, "a state slot is used twice"
        on_host = [sequence.host_state_slot for sequence in sequences if sequence.host_state_slot is not None]
        on_host += [copy.source for copy in (*self._copies, *self._arriving) if copy.from_host]
        assert len(on_host) == len(set(on_host)) == self.host.num_used, "a state slot of the host is used twice or lost"
        if self.pool:
            self.pool.check([held, list(self._written), list(self._drafts), self.checkpoints.pinned])
            assert self._num_spare >= 0, "not enough state slots for the sequences that may run"
            for sequence in sequences:
                slots = (sequence.state_slot, sequence.host_state_slot)
                assert None in slots, "a state is on the device and on the host"
                assert not sequence.computed or slots != (None, None), "a sequence with computed tokens has no state"

    @property
    def _num_spare(self) -> int:
        """The number of available slots that no sequence and no draft token will need."""
        assert self.pool
        needed = self._max_num_seqs - self.num_held + self._num_draft_slots - len(self._drafts)
        return self.pool.num_available - needed

    def _take_slot(self, sequence: Sequence) -> int:
        assert self.pool
        slot = allocate_counted(self.pool, 1)[0]
        sequence.state_slot = slot
        self.num_held += 1
        return slot

    def _replace_latest(self, slot: int, entry: Entry) -> None:
        """Store the latest checkpoint in the output of the sequence with this slot, and forget the one before."""
        assert self.pool
        before = self._latest.get(slot)
        if before is not None:
            self.pool.forget(before)
        self._latest[slot] = entry

    def _release_slot(self, sequence: Sequence) -> StateCopy | None:
        """Free the slot of a sequence on the device, if it has one. Return the copy to it that is not made any more."""
        slot = sequence.state_slot
        if self.pool is None or slot is None:
            return None
        sequence.state_slot = None
        self.num_held -= 1
        self._latest.pop(slot, None)
        dropped = next((copy for copy in self._copies if copy.target == slot), None)
        if dropped:
            self._copies.remove(dropped)
        position = sequence.committed
        has_arrived = not dropped and all(copy.target != slot for copy in self._arriving)
        is_complete = position == sequence.computed and has_arrived
        if self._caching and is_complete and position and not position % self._block_size:
            self.pool.index.add(slot, self.checkpoints.entry(sequence, position))
        self.pool.free(slot)
        return dropped
