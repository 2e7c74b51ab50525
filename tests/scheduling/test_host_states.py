"""Slots of the host for states: assigned once, and no moves to freed ones."""

import pytest

from paged_backend.scheduling.host_states import HostStates, StateMove


def test_slots_are_assigned_until_there_are_none():
    host = HostStates(2)
    assert host.has_room(2)
    targets = [host.move_out(source) for source in (7, 5)]
    assert sorted(targets) == [0, 1]
    assert host.num_used == 2
    assert not host.has_room(1)
    assert host.take_moves_out() == tuple(map(StateMove, (7, 5), targets))
    assert host.take_moves_out() == ()
    host.free(targets[0])
    assert host.has_room(1)
    assert host.move_out(3) == targets[0]


def test_move_to_a_freed_slot_is_not_made():
    """The slot may be the target of another move in the same step."""
    host = HostStates(2)
    first, second = host.move_out(7), host.move_out(5)
    host.free(first)
    assert host.take_moves_out() == (StateMove(5, second),)


def test_slot_that_is_not_in_use_is_not_freed():
    host = HostStates(2)
    slot = host.move_out(7)
    host.free(slot)
    with pytest.raises(AssertionError, match=f"state slot {slot} of the host: freed, but not in use"):
        host.free(slot)


def test_without_slots_there_is_room_for_nothing():
    assert HostStates().has_room(0)
    assert not HostStates().has_room(1)
