"""Concurrent round trips: one call per item, and isolated errors."""

from collections import Counter
from threading import Barrier

import pytest

from paged_backend.server.round_trips import RoundTrips
from tests.support.in_process import WAIT


@pytest.fixture
def round_trips():
    made = RoundTrips(threads=3, batch=4)
    yield made
    made.stop()


@pytest.mark.parametrize("count", [0, 1, 4, 5, 9, 100])
def test_each_item_is_handled_once_and_errors_stay_separate(round_trips, count):
    asked = Counter()

    def ask(item):
        asked[item] += 1
        if item % 3 == 0:
            raise ValueError(item)
        return item * 10

    answers = dict(round_trips.each(ask, range(count)))
    assert asked == Counter(range(count))
    assert answers.keys() == asked.keys()
    for item, answer in answers.items():
        assert isinstance(answer, ValueError) if item % 3 == 0 else answer == item * 10


def test_round_trips_run_concurrently(round_trips):
    """A single thread would wait forever for the others."""
    together = Barrier(4)
    answers = round_trips.each(lambda _: together.wait(WAIT), range(16))
    assert not any(isinstance(answer, Exception) for _, answer in answers)
