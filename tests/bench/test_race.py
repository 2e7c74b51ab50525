"""The order in which functions are timed, and the number of copies of their inputs."""

import torch

from paged_bench import _race
from paged_bench._race import CACHES, race, rotations

CPU = torch.device("cpu")


def test_each_round_starts_with_another_function():
    order = []
    timers = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    seconds = race(timers, 3)
    assert "".join(order) == "abcbcacab"
    assert seconds == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_copies_do_not_fit_into_the_cache(monkeypatch):
    monkeypatch.setattr(_race, "cache_bytes", lambda device: 1000)
    assert rotations(100, CPU) == 10 * CACHES
    assert rotations(100 * CACHES + 1, CPU) == 10
    assert rotations(1, CPU) == 64, "at most"
    assert rotations(10**6, CPU) == 1, "at least"
    assert rotations(100, CPU, most_bytes=250) == 2
