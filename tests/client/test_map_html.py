"""The block pool as an HTML page."""

import json
import re
from html.parser import HTMLParser

import pytest

from paged_client import map_html
from paged_client.map_view import KINDS, Recording, colour_of, kind_of
from tests.support.map_views import EVERY, counts_in, over_time, pool_of


class Page(HTMLParser):
    """The tags, the text outside scripts, and the content of each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.scripts, self.open = [], "", [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data


@pytest.mark.parametrize("states", ["1", "12c.p+1", EVERY * 20, EVERY * 7693])
def test_the_page_holds_every_block(states):
    page = Page(map_html.page(over_time(states[::-1], states), "paged_llm at host:1"))
    data = json.loads(page.scripts[0])
    assert data["states"] == states
    assert data["colours"] == {state: colour_of(state) for state in EVERY}
    assert data["kinds"] == {state: kind_of(state).name for state in EVERY}
    assert counts_in(page.text) == {kind.name: kind.count(states) for kind in KINDS}
    assert "paged_llm at host:1" in page.text


def test_it_needs_no_network():
    text = map_html.page(over_time("1", "."), "x")
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    assert not any({"src", "href"} & attributes.keys() for _, attributes in Page(text).tags)


def test_names_are_escaped_in_html():
    text = map_html.page(over_time("1"), '</script><b>"&@@DATA@@')
    page = Page(text)
    assert '</script><b>"&@@DATA@@' in page.text
    assert text.count("</script>") == 2
    assert [tag for tag, _ in page.tags].count("b") == len(KINDS)


def test_data_cannot_close_the_script_element():
    evil = {"states": "</script><!--"}
    made = map_html._json_in_script(evil)
    assert "<" not in made
    assert json.loads(made) == evil


def test_the_curve():
    """100 pixels or so high; half used, a quarter cached, then all used."""
    recording = Recording(
        pool_of("11c.", time=100.0, tokens=16),
        pool_of("....", time=101.0, tokens=0),
        pool_of("1111", time=102.0, tokens=64),
    )
    shapes = [
        (tag, attributes) for tag, attributes in Page(map_html.page(recording, "x")).tags if "points" in attributes
    ]
    cached, used, *filled = [
        [tuple(map(float, pair.split(","))) for pair in attributes["points"].split()] for _, attributes in shapes
    ]
    low, high = 156.0, 8.0
    assert [y for _, y in used[:3]] == [(low + high) / 2, low, high]
    assert [y for _, y in cached[:3]] == [low - 0.75 * (low - high), low, high]
    assert [[y for _, y in run] for run in filled] == [[(low + high) / 2], [high]]  # none where nothing is held
    assert used[0][0] < used[1][0] < used[2][0] == used[3][0]


def test_one_sample_has_no_curve():
    assert "<svg" not in map_html.page(over_time("1"), "x")
    assert "<svg" in map_html.page(Recording(pool_of("1"), pool_of("1")), "x")  # in the same instant
