"""The states of models with recurrent layers: a slot per sequence, and checkpoints from which prefixes are continued.

    slots       0 sequence 7    1 sequences 8 and 9    2 checkpoint of 512 tokens    3 checkpoint of 48 tokens    4 free
    host        0 sequence 3    1 free                 states of swapped-out sequences

A slot belongs to one position: all tokens before it are in its state. Sequences share a slot after a fork, and with a
checkpoint that they continue from, until they compute: the next step then copies the state to a slot of their own.
Checkpoints are copies at the ends of blocks. They are cached like blocks: they are found by the content of the last
block before them, and the least recently used is evicted.

A state cannot go back by a token. A step with draft tokens therefore stores the state after each of them in a slot of
its own, and the sequence continues in the slot of the last one that is accepted:

    tokens      t    g1   g2   g3       the chunk: the last token, then the draft tokens
    slots       0    5    6    7        g1 is accepted: the sequence has slot 5 from now on, and 0, 6 and 7 are free

Integers only, no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items

from paged_backend.kv.content import Contents, Entry
from paged_backend.kv.ledger import NO_TRANSFERS, Transfer, Transfers
from paged_backend.kv.pages import PagePool
from paged_backend.kv.sequence import Sequence


def num_draft_slots(max_num_seqs: int, max_num_batched_tokens: int, max_draft_tokens: int) -> int:
    """Return how many draft tokens a step may have, each with a slot. max_draft_tokens: maximum per sequence."""
    return min(max_num_seqs * max_draft_tokens, max_num_batched_tokens)


class StateSlots:
    """Assigns a fixed number of slots to sequences and checkpoints. There are enough for all sequences that may run.

    A slot need not be cleared: a sequence that starts at position 0 does not read it. Without slots, for a model
    without recurrent layers, nothing is assigned and hits are not restricted.
    """

    def __init__(
        self,
        num_slots: int = 0,
        max_num_seqs: int = 0,
        *,
        block_size: int = 1,
        caching: bool = False,
        num_host_slots: int = 0,
        num_draft_slots: int = 0,
    ):
        """num_slots: 0 for a model without recurrent layers, else at least `max_num_seqs + num_draft_slots`; further
        slots are for checkpoints. caching: whether prefixes are cached. num_host_slots: slots of the host.
        num_draft_slots: slots that are reserved for draft tokens."""
        assert not num_slots or num_slots >= max_num_seqs + num_draft_slots
        self.pool = PagePool(num_slots, caching=caching) if num_slots else None  # None: no recurrent layers
        self.host = PagePool(num_host_slots) if num_host_slots else None
        self.contents = Contents()  # the contents of the prefix cache
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._caching = caching and num_slots > 0
        self._num_draft_slots = num_draft_slots
        self._holders: Counter[int] = Counter()  # how many sequences have each slot
        self._drafts: set[int] = set()  # slots for draft tokens of the step in flight
        self._written: set[int] = set()  # slots of checkpoints whose copies are not finished
        self._moves_out: list[Transfer] = []  # for the next step
        self._moves_in: list[Transfer] = []  # for the next step
        self._arriving: list[Transfer] = []  # moves from the host that are not finished
        self._pinned: dict[Hashable, int] = {}  # slots of checkpoints, by session

    @property
    def num_held(self) -> int:
        """The number of slots that sequences have."""
        return len(self._holders)

    @property
    def num_checkpoints(self) -> int:
        """The number of checkpoints, of the prefix cache and of sessions."""
        kept = len(set(self._pinned.values()) - self._holders.keys()) if self._pinned else 0
        return self.pool.num_cached + kept if self.pool else 0

    @property
    def num_host_used(self) -> int:
        """The number of slots of the host in use, by swapped-out sequences and by moves that are not finished."""
        return self.host.num_used if self.host else 0

    @property
    def stats(self) -> dict[str, float]:
        """The statistics of the slots, by name."""
        return {
            "state_slots_total": self.pool.num_pages if self.pool else 0,
            "state_slots_used": self.num_held,
            "state_checkpoints": self.num_checkpoints,
            "host_state_slots_total": self.host.num_pages if self.host else 0,
            "host_state_slots_used": self.num_host_used,
        }

    @property
    def pinned(self) -> list[int]:
        """The slots of the checkpoints that sessions pin."""
        return list(self._pinned.values())

    def chunk_length(self, start: int, length: int, total: int) -> int:
        """Return how many of `length` tokens from `start` to compute in one chunk, so that it ends where a checkpoint
        is useful: at a block boundary, the last one before the end of `total` tokens if that is in reach."""
        if not self._caching:
            return length
        end = min(start + length, total - 1) // self._block_size * self._block_size
        return end - start if start < end else length

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the parent's slot with the child."""
        if self.pool:
            assert parent.state_slot is not None and child.state_slot is None
            self._share(parent.state_slot, child)

    def adopt(self, sequence: Sequence, num_blocks: int) -> None:
        """Share the checkpoint at the end of its cache hit with a sequence. num_blocks: full blocks of the hit."""
        if self.pool and num_blocks:
            checkpoint = self.pool.find(sequence.chain.entries[num_blocks - 1])
            assert checkpoint is not None, "a hit without its checkpoint"
            self._share(checkpoint, sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence, if it has one, on the device or on the host. At a block boundary, its state on
        the device becomes a checkpoint. Planned moves to the slot are dropped."""
        if sequence.on_host and sequence.state_slot is not None:
            assert self.host
            slot = sequence.state_slot
            self._moves_out = [move for move in self._moves_out if move.target != slot or self.host.is_shared(slot)]
            self.host.free(slot)
            sequence.state_slot = None
        elif self.pool and sequence.state_slot is not None:
            position = sequence.committed
            is_complete = position == sequence.computed and not self._is_arriving(sequence.state_slot)
            if self._caching and is_complete and position and not position % self._block_size:
                self.pool.index(sequence.state_slot, self._entry(sequence, position))
            self._drop(sequence)

    def prepare(self, sequences: Iterable[Sequence]) -> Transfers:
        """Give the sequences that the next step computes slots of their own, and return what it has to copy. A state
        at a block boundary is also copied to a checkpoint, if a slot is to spare."""
        if self.pool is None:
            return NO_TRANSFERS
        copies: list[Transfer] = []
        saved: set[Entry] = set()
        for sequence in sequences:
            if sequence.state_slot is None:
                assert not sequence.computed, "a sequence with computed tokens, but without a state"
                self._hold(sequence, self.pool.claim(1)[0])
                continue
            self._save(sequence, copies, saved)
            source = sequence.state_slot
            is_shared = self.pool.is_shared(source)
            if is_shared or (self.pool.entry(source) and self._num_spare > 0):
                target = self.pool.claim(1)[0]
                self._drop(sequence)
                self._hold(sequence, target)
                copies.append(Transfer(source, target))
            elif self.pool.entry(source):
                self.pool.forget(source)  # the sequence overwrites the checkpoint that it continues from
        moves_out, self._moves_out = tuple(self._moves_out), []
        moves_in, self._moves_in = tuple(self._moves_in), []
        return Transfers(moves_out, moves_in, tuple(copies))

    def finish(self, copies: Transfers, *, done: bool = True) -> None:
        """End the copies of a step. If they were done, their checkpoints can be found from now on."""
        for move in copies.moves_in:
            assert self.host
            self._arriving.remove(move)
            self.host.free(move.source)
        for copy in copies.copies:
            if copy.entry and self.pool:
                if done:
                    self.pool.index(copy.target, copy.entry)
                self._written.remove(copy.target)
                self.pool.free(copy.target)

    def take_draft_slots(self, count: int) -> tuple[int, ...]:
        """Return a slot for the state after each of `count` draft tokens; empty without recurrent layers. They are
        reserved until `accept` or `free_draft_slots`."""
        if self.pool is None:
            return ()
        assert len(self._drafts) + count <= self._num_draft_slots, "more draft tokens than a step may have"
        slots = self.pool.claim(count)
        self._drafts.update(slots)
        return tuple(slots)

    def accept(self, sequence: Sequence, draft_slots: tuple[int, ...], num_accepted: int) -> None:
        """Continue a sequence, whose tokens were committed, from the state after the last accepted draft token. The
        state at a block boundary before it becomes a checkpoint."""
        own = sequence.state_slot
        if self.pool is None or own is None:
            return
        slots = (own, *draft_slots)
        position = sequence.committed // self._block_size * self._block_size
        index = num_accepted - (sequence.committed - position)
        if self._caching and 0 <= index < num_accepted:
            entry = self._entry(sequence, position)
            if self.pool.index(slots[index], entry):
                self._replace_latest(sequence, entry)
        kept = slots[num_accepted]
        self._drafts.difference_update(draft_slots)
        if kept != own:
            self._drop(sequence)
            self._hold(sequence, kept)
        for slot in draft_slots:
            if slot != kept:
                self.pool.free(slot)

    def free_draft_slots(self) -> None:
        """Free the slots for draft tokens of sequences that have ended before the step."""
        for slot in self._drafts:
            assert self.pool
            self.pool.free(slot)
        self._drafts.clear()

    def can_swap_out(self, sequences: Items[Sequence]) -> bool:
        """Return whether the states of sequences are on the device, and the host has room for them."""
        slots = {sequence.state_slot for sequence in sequences if sequence.state_slot is not None}
        room = self.host.num_available if self.host else 0
        return len(slots) <= room and not any(map(self._is_arriving, slots))

    def swap_out(self, sequences: Items[Sequence]) -> None:
        """Move the states of sequences to the host and free their slots. The caller has checked `can_swap_out`."""
        targets: dict[int, int] = {}
        for sequence in sequences:
            slot = sequence.state_slot
            if slot is None:
                continue
            assert self.host
            if slot in targets:
                self.host.touch(targets[slot])
            else:
                targets[slot] = self.host.claim(1)[0]
                self._moves_out.append(Transfer(slot, targets[slot]))
            self._drop(sequence)
            sequence.state_slot = targets[slot]

    def swap_in(self, sequences: Items[Sequence]) -> None:
        """Give swapped-out sequences slots, to which their states are moved before the next step. A slot of the host
        is freed when its move is finished."""
        targets: dict[int, int] = {}
        for sequence in sequences:
            source = sequence.state_slot
            if source is None:
                continue
            assert self.pool and self.host
            if source in targets:
                self.host.free(source)
                self._share(targets[source], sequence)
            else:
                targets[source] = self.pool.claim(1)[0]
                self._hold(sequence, targets[source])
                move = Transfer(source, targets[source])
                self._moves_in.append(move)
                self._arriving.append(move)

    def has_checkpoint(self, entry: Entry) -> bool:
        """Return whether there is a checkpoint after this content."""
        return self.pool is not None and self.pool.find(entry) is not None

    def add_checkpoint(self, entry: Entry) -> int | None:
        """Return the slot of a new checkpoint, whose state the caller writes at once. None if there is one already, or
        no slot to spare."""
        if not self.pool or not self._caching or self.pool.find(entry) is not None or self._num_spare <= 0:
            return None
        slot = self.pool.claim(1)[0]
        self.pool.index(slot, entry)
        self.pool.free(slot)
        return slot

    def forget_checkpoints(self, sequence: Sequence) -> None:
        """Remove the checkpoints within the tokens of a sequence."""
        if self.pool:
            for entry in sequence.chain.entries:
                self._forget(entry)

    def pin(self, name: Hashable, sequence: Sequence) -> None:
        """Keep the checkpoint at the end of a sequence's full blocks for a session, in place of its former one."""
        self.unpin(name)
        full = sequence.committed // self._block_size
        if self.pool and self._caching and full:
            slot = self.pool.find(self._entry(sequence, full * self._block_size))
            if slot is not None and self._num_spare >= (slot not in self._pinned.values()):
                self.pool.touch(slot)
                self._pinned[name] = slot

    def unpin(self, name: Hashable) -> None:
        """Release the checkpoint of a session, if it has one."""
        slot = self._pinned.pop(name, None)
        if self.pool and slot is not None:
            self.pool.free(slot)

    def clear(self) -> None:
        """Forget all checkpoints, including pinned ones. No sequence may have a slot."""
        for name in list(self._pinned):
            self.unpin(name)
        if self.pool:
            self.pool.forget_all()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert every invariant. For tests and idle moments."""
        sequences = list(sequences)
        slots = [(sequence.state_slot, sequence.on_host) for sequence in sequences if sequence.state_slot is not None]
        held = [slot for slot, on_host in slots if not on_host]
        assert Counter(held) == self._holders, "a state slot is held by other sequences"
        assert len(self._holders) <= self._max_num_seqs, "more state slots than sequences that may run"
        if self.host:
            self.host.check([[slot for slot, on_host in slots if on_host], [move.source for move in self._arriving]])
        if self.pool:
            self.pool.check([held, list(self._written), list(self._drafts), self.pinned])
            assert self._num_spare >= 0, "not enough state slots for the sequences that may run"
            for sequence in sequences:
                assert not sequence.computed or sequence.state_slot is not None, (
                    "a sequence with computed tokens has no state"
                )

    @property
    def _num_spare(self) -> int:
        """The number of available slots that no sequence and no draft token will need. A sequence that shares a slot
        with a session, or with another sequence, needs a slot of its own."""
        assert self.pool
        own = len(self._holders.keys() - set(self._pinned.values())) if self._pinned else len(self._holders)
        return self.pool.num_available - (self._max_num_seqs - own) - (self._num_draft_slots - len(self._drafts))

    def _is_arriving(self, slot: int) -> bool:
        return any(move.target == slot for move in self._arriving)

    def _entry(self, sequence: Sequence, position: int) -> Entry:
        """Return the content of the full block that ends at `position`."""
        count = position // self._block_size
        return self.contents.extend(sequence.chain, sequence.tokens, count, self._block_size)

    def _hold(self, sequence: Sequence, slot: int) -> None:
        """Give a sequence a slot whose reference it takes over."""
        sequence.state_slot = slot
        self._holders[slot] += 1

    def _share(self, slot: int, sequence: Sequence) -> None:
        assert self.pool
        self.pool.touch(slot)
        self._hold(sequence, slot)

    def _drop(self, sequence: Sequence) -> None:
        """Drop the slot of a sequence. If no other sequence has it, also drop the planned move to it."""
        slot = sequence.state_slot
        assert self.pool and slot is not None
        sequence.state_slot = None
        self._holders[slot] -= 1
        if not self._holders[slot]:
            del self._holders[slot]
            for move in [move for move in self._moves_in if move.target == slot]:
                assert self.host
                self._moves_in.remove(move)
                self._arriving.remove(move)
                self.host.free(move.source)
        self.pool.free(slot)

    def _save(self, sequence: Sequence, copies: list[Transfer], saved: set[Entry]) -> None:
        """Copy the state of a sequence at a block boundary to a checkpoint, if a slot is to spare. A checkpoint in the
        output takes the place of the one before. saved: the contents of the checkpoints that this step writes."""
        position, slot = sequence.computed, sequence.state_slot
        assert self.pool and slot is not None
        if not self._caching or not position or position % self._block_size:
            return
        entry = self._entry(sequence, position)
        if entry in saved or self.pool.find(entry) is not None:
            return
        if position > sequence.num_prompt:
            self._replace_latest(sequence, entry)
        if self._num_spare > 0:
            target = self.pool.claim(1)[0]
            self._written.add(target)
            saved.add(entry)
            copies.append(Transfer(slot, target, entry))

    def _replace_latest(self, sequence: Sequence, entry: Entry) -> None:
        """Record the latest checkpoint in the output of a sequence, and forget the one before."""
        assert self.pool
        if sequence.latest_checkpoint is not None:
            self._forget(sequence.latest_checkpoint)
        sequence.latest_checkpoint = entry

    def _forget(self, entry: Entry) -> None:
        assert self.pool
        slot = self.pool.find(entry)
        if slot is not None:
            self.pool.forget(slot)
