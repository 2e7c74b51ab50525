"""The host's slots for the states of recurrent layers, to which preempted requests are swapped out. Integers only."""

from __future__ import annotations

from typing import NamedTuple


class StateMove(NamedTuple):
    """Copy the state in slot `source` of the device to slot `target` of the host, in every layer, before anything else
    of the next step."""

    source: int
    target: int


class HostStates:
    """Assigns a fixed number of slots of the host to the states of swapped-out sequences."""

    def __init__(self, num_slots: int = 0):
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._moves_out: list[StateMove] = []  # for the next step

    @property
    def num_used(self) -> int:
        """The number of slots in use: of swapped-out sequences, and of moves to the device that are not finished."""
        return self.num_slots - len(self._free)

    def has_room(self, count: int) -> bool:
        """Return whether `count` states fit."""
        return count <= len(self._free)

    def move_out(self, source: int) -> int:
        """Return a slot to which the state in slot `source` of the device is moved before the next step. The caller has
        checked that there is room."""
        target = self._free.pop()
        self._moves_out.append(StateMove(source, target))
        return target

    def free(self, slot: int) -> None:
        """Free a slot. A move to it is not made any more."""
        assert slot not in self._free, f"state slot {slot} of the host: freed, but not in use"
        self._moves_out = [move for move in self._moves_out if move.target != slot]
        self._free.append(slot)

    def take_moves_out(self) -> tuple[StateMove, ...]:
        """Return the moves to make before anything else of the next step, and forget them."""
        moves, self._moves_out = tuple(self._moves_out), []
        return moves
