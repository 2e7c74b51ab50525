"""Runs that are repeated because of other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged_bench import _disturbance
from paged_bench._disturbance import ATTEMPTS, MAX_LOAD, least_disturbed, other_cpu_seconds
from tests.support.waiting import until


def with_loads(monkeypatch, loads):
    """Make each run take a second, during which other processes use so many cores."""
    times, used = iter(range(100)), [0.0]
    for load in loads:
        used += [used[-1] + load] * 2
    readings = iter(used)
    monkeypatch.setattr(_disturbance.time, "monotonic", lambda: float(next(times)))
    monkeypatch.setattr(_disturbance, "other_cpu_seconds", lambda child: next(readings))


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([0.1], (1, 0.1)),
        ([1.5, MAX_LOAD], (2, MAX_LOAD)),
        ([1.5, 0.5, 1.0], (2, 0.5)),  # the least of all attempts
    ],
)
def test_disturbed_runs_are_repeated(loads, expected, monkeypatch):
    assert len(loads) <= ATTEMPTS
    with_loads(monkeypatch, loads)
    numbers = iter(range(1, 10))
    result, load = least_disturbed(lambda: next(numbers))
    assert (result, load) == (expected[0], pytest.approx(expected[1]))
    assert next(numbers) == len(loads) + 1


def test_a_system_that_does_not_tell_counts_as_idle(monkeypatch):
    monkeypatch.setattr(_disturbance, "other_cpu_seconds", lambda child: None)
    assert least_disturbed(lambda: "result") == ("result", 0.0)


def test_time_of_a_process_that_does_not_exist_is_unknown():
    assert other_cpu_seconds(2**30) is None


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="only on Linux")
def test_time_of_other_processes_is_known_on_linux():
    """The time of a process of our own is not counted."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            until(lambda: cpu_seconds(child.pid) > 0.3)
            without_child = other_cpu_seconds(child.pid)
            assert other_cpu_seconds(None) - without_child > 0.2
        finally:
            child.kill()


def cpu_seconds(process):
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
