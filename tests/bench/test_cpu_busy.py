"""Throughput beside busy neighbours in `paged bench cpu`."""

import os
from collections import Counter

import pytest

from paged_bench import _cpu_busy
from paged_bench._cpu_busy import measure_busy, neighbours, p99_between_tokens, stream_jobs
from paged_bench._cpu_contestants import Contestants
from paged_bench._cpu_report import target_share
from paged_bench._workload import Job
from paged_bench.engine import OURS
from tests.support.benchmark_runs import run_of
from tests.support.waiting import until


def expected(nice):
    """The nice value of a neighbour, which is added to that of this process."""
    return min(19, os.nice(0) + nice)


def nice_values():
    """The nice values of the spinning processes that this process has started."""
    until(lambda: None not in _nice_values(), "the start of the neighbours")
    return _nice_values()


def _nice_values():
    """The nice value of each, or None while it starts: it is `nice` first, and has no command line during exec."""
    found = []
    for entry in os.scandir("/proc"):
        try:
            with open(f"{entry.path}/cmdline") as line, open(f"{entry.path}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
                command = line.read()
                if int(fields[1]) != os.getpid() or fields[0] == "Z":
                    continue
                if not command or command.startswith("nice\0"):
                    found.append(None)
                elif _cpu_busy.SPIN in command:
                    found.append(int(fields[16]))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 1), (4, 2)])
def test_one_process_spins_per_two_cores(monkeypatch, cores, count):
    monkeypatch.setattr(_cpu_busy, "usable_cores", lambda: cores)
    with neighbours(19):
        assert nice_values() == [19] * count
    assert not nice_values()
    with neighbours(None):
        assert not nice_values()


def test_quick_run_has_one_stream():
    assert list(stream_jobs(50, 4096, quick=True)) == ["1 stream"]
    assert [len(jobs) for jobs in stream_jobs(50, 4096, quick=False).values()] == [1, 32]


def test_every_target_has_a_record(monkeypatch):
    monkeypatch.setattr(_cpu_busy, "usable_cores", lambda: 2)
    neighbours = Counter()

    def fast(jobs):
        neighbours[tuple(nice_values())] += 1
        return run_of([1, 2, 3])

    def slow(jobs):
        return run_of([1, 2, 3], gap=4.0)

    def failing(jobs):
        raise ValueError("no room")

    contestants = Contestants({OURS: fast, "slow": slow, "failing": failing})
    records = {one.name: one for one in measure_busy(contestants, {"words": [Job([1], 3)]}, 10, rounds=2)}
    assert records["words, busy neighbour: share of idle"].value == 1.0
    best = records["words, busy neighbour: times slow, the best peer"]
    assert best.value > 1
    latency = records["words, busy neighbour: p99 between tokens"]
    assert (latency.value, target_share(latency)) == (1.0, 4.0)
    assert set(records["words, idle"].peers) == {"slow"}
    assert contestants.absent["failing"] == "ValueError: no room"
    assert neighbours == {(): 2, (expected(0),): 2, (19,): 2}


def test_p99_is_that_of_all_gaps():
    assert p99_between_tokens([run_of([1, 2, 3]), run_of([1, 2], gap=5.0)]) == 5.0


def test_every_run_has_other_tokens(monkeypatch):
    monkeypatch.setattr(_cpu_busy, "usable_cores", lambda: 1)
    prompts = []

    def recorded(jobs):
        prompts.append(tuple(jobs[0].prompt))
        return run_of([1, 2, 3])

    measure_busy(Contestants({OURS: recorded}), {"words": [Job(list(range(20)), 3)]}, 1000, rounds=3)
    assert len(set(prompts)) == len(prompts) == 9
