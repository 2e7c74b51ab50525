"""The block pool as a PNG file."""

import numpy as np
import pytest

from paged_client import map_png
from paged_client.map_view import colour_of
from tests.support.map_views import EVERY, over_time


@pytest.fixture(autouse=True)
def matplotlib():
    pytest.importorskip("matplotlib")


def draw(tmp_path, recording):
    from matplotlib.image import imread

    map_png.draw(recording, tmp_path / "map.png", "paged_llm at $host")
    return imread(tmp_path / "map.png")


@pytest.mark.parametrize(
    "states",
    [
        pytest.param("1", id="one"),
        pytest.param("12c.p+1", id="few", marks=pytest.mark.nightly),
        pytest.param(EVERY * 20, id="some"),
        pytest.param(EVERY * 7693, id="many"),
    ],
)
def test_it_shows_all_kinds(tmp_path, states):
    from matplotlib.colors import to_rgb

    image = draw(tmp_path, over_time(states[::-1], states, states))
    found = set(map(tuple, np.unique((255 * image[..., :3]).round().astype(int).reshape(-1, 3), axis=0).tolist()))
    assert {tuple(round(255 * part) for part in to_rgb(colour_of(state))) for state in EVERY} <= found


def test_the_blocks_of_a_row_in_order(tmp_path):
    from matplotlib.colors import to_hex

    states = EVERY + "1c."
    image = draw(tmp_path, over_time(states))
    # Near the lower left corner of each cell, where no digit is: 0.3 inches each, at 120 dots an inch.
    seen = [to_hex(image[int(120 * 1.21), int(120 * (0.7 + 0.3 * block)) + 5][:3]) for block in range(len(states))]
    assert seen == [colour_of(state) for state in states]


def test_a_curve_needs_more_than_one_sample(tmp_path):
    assert draw(tmp_path, over_time("1")).shape[0] < draw(tmp_path, over_time("1", "1")).shape[0]
