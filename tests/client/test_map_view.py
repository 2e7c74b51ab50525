"""How states of the block pool are shown: kinds, colours, and the grid."""

import pytest

from paged_client.map_view import (
    KINDS,
    SHARED_COLOURS,
    Recording,
    colour_of,
    columns_for,
    kind_of,
)
from tests.support.map_views import EVERY, pool_of


def test_every_state_has_one_kind_and_its_own_colour():
    assert "".join(kind.states for kind in KINDS) == EVERY
    assert all(kind_of(state).states.count(state) == 1 for state in EVERY)
    assert len({colour_of(state) for state in EVERY}) == len(EVERY)


@pytest.mark.parametrize("blocks", [1, 7, 33, 256, 100_000])
def test_a_grid_is_wider_than_high_and_holds_every_block(blocks):
    columns = columns_for(blocks)
    rows = -(-blocks // columns)
    assert rows <= columns <= blocks


def test_a_clock_set_back_does_not_move_time_backwards():
    recording = Recording(*(pool_of(".", time=when) for when in (10.0, 12.0, 7.0, 13.0)))
    assert recording.seconds == [0, 2, 2, 3]


def test_shared_blocks_get_darker_colours():
    brightness = [sum(int(colour[at : at + 2], 16) for at in (1, 3, 5)) for colour in SHARED_COLOURS.values()]
    assert brightness == sorted(brightness, reverse=True)
