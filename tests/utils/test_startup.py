"""Progress lines in the log."""

import logging

import pytest

from paged_backend.utils import startup
from paged_backend.utils.startup import PROGRESS, Progress


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "paged_llm.startup")
    return lambda: [record.getMessage() for record in caplog.records]


def test_first_and_last_are_logged_and_between_them_two_per_second(lines, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(startup.time, "monotonic", lambda: now[0])
    progress = Progress("loading weights", 100, "tensors")
    for _ in range(100):
        now[0] += 0.01
        progress.advance()
    assert lines() == [f"progress: loading weights {done}/100 tensors" for done in (0, 50, 100)]
    assert all(PROGRESS.fullmatch(line) for line in lines())


def test_a_growing_total(lines):
    progress = Progress("downloading owner/model", unit="B")
    assert lines() == []
    progress.update(0, 10)
    progress.update(10, 10)
    progress.update(10, 10)
    progress.update(20, 20)
    assert [line.split()[2] for line in lines()] == ["owner/model"] * 3
    assert [line.split()[3] for line in lines()] == ["0/10", "10/10", "20/20"]
