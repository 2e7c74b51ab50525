"""The state slots of models with recurrent layers: one per sequence that computes. Integers only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paged_backend.scheduling.sequence import Sequence


class StateCopy(NamedTuple):
    """Copy the state in slot `source` to slot `target`, in every layer, before the next step."""

    key: int  # of the request whose sequence forks
    source: int
    target: int


class StateSlots:
    """Assigns the slots of a fixed number to sequences. There are enough for all sequences that may run.

    A slot need not be cleared: a sequence that starts at position 0 does not read it. Without slots, for a model
    without recurrent layers, nothing is assigned.
    """

    def __init__(self, count: int):
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._copies: list[StateCopy] = []  # for the next step

    def assign(self, sequence: Sequence) -> None:
        """Give a sequence a slot if it has none."""
        if self._count and sequence.state_slot is None:
            assert self._free, "not enough state slots for the sequences that run"
            assert not sequence.computed, "a sequence with computed tokens, but without a state"
            sequence.state_slot = self._free.pop()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child a slot, to which the parent's state is copied before the next step."""
        if self._count:
            assert self._free, "not enough state slots for the sequences that run"
            assert parent.state_slot is not None and child.state_slot is None
            child.state_slot = self._free.pop()
            self._copies.append(StateCopy(parent.key, parent.state_slot, child.state_slot))

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence, if it has one. A copy to it is not made any more."""
        slot = sequence.state_slot
        if slot is not None:
            self._free.append(slot)
            sequence.state_slot = None
            self._copies = [copy for copy in self._copies if copy.target != slot]

    def take_copies(self) -> tuple[StateCopy, ...]:
        """Return the copies to make before the next step, and forget them."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert every invariant. For tests and idle moments."""
        held = [sequence.state_slot for sequence in sequences if sequence.state_slot is not None]
        assert sorted(held + self._free) == list(range(self._count)), "a state slot is lost, or used twice"
