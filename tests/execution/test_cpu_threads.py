"""The number of threads of the CPU kernels."""

import threading

import pytest

from paged_backend.execution import cpu_threads
from paged_backend.execution.cpu_threads import CpuThreads, OtherLoad, count_threads


@pytest.fixture
def cores(monkeypatch):
    """Sets the number of cores that the process may use: of its affinity, or of a quota. Other processes are idle."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu_threads.OtherLoad, "measure", lambda _: 0.0)

    def limit(count, affinity=None):
        monkeypatch.setattr(cpu_threads, "usable_cores", lambda: count)
        monkeypatch.setattr(cpu_threads.os, "sched_getaffinity", lambda _: set(range(affinity or count)))

    return limit


@pytest.fixture
def calls(monkeypatch):
    """The numbers of threads that the kernels are given, and "single" when PyTorch is limited to one thread."""
    made = []
    monkeypatch.setattr(cpu_threads.native, "set_threads", made.append)
    monkeypatch.setattr(cpu_threads, "use_single_thread", lambda: made.append("single"))
    return made


@pytest.mark.parametrize(
    ("usable", "processes", "variable", "expected"),
    [(8, 1, None, 8), (8, 2, None, 4), (1, 2, None, 1), (8, 1, "3", 3), (2, 1, "3", 2), (8, 4, "3", 2), (8, 1, "x", 8)],
)
def test_threads_follow_cores_processes_and_environment(cores, monkeypatch, usable, processes, variable, expected):
    cores(usable)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert count_threads(processes) == expected


@pytest.mark.parametrize(
    ("usable", "affinity", "taken", "expected"),
    [
        (2, 2, 0.3, 2),
        (2, 2, 1.4, 2),
        (2, 2, 1.7, 1),
        (2, 2, 2.0, 1),
        (8, 8, 3.6, 5),
        (4, 64, 30.0, 4),
        (4, 64, 62.0, 3),
    ],
)
def test_threads_leave_all_but_one_core_to_busy_processes(cores, usable, affinity, taken, expected):
    cores(usable, affinity)
    assert count_threads(taken=taken) == expected


def test_load_is_that_of_other_processes_since_the_last_call(monkeypatch):
    counters = iter([(10.0, 50.0, 3.0), (12.0, 53.0, 4.0), (12.0, 53.0, 4.0), (16.0, 54.0, 6.0)])
    monkeypatch.setattr(OtherLoad, "_read", lambda _: next(counters))
    load = OtherLoad()
    assert [load.measure() for _ in range(3)] == [1.0, 0.0, 0.0]


def test_load_is_zero_where_the_system_does_not_tell(monkeypatch):
    def fail():
        raise OSError("no /proc/stat")

    monkeypatch.setattr(cpu_threads, "busy_seconds", fail)
    load = OtherLoad()
    assert load.measure() == 0.0


def test_threads_follow_limits_that_change(cores, calls, monkeypatch):
    monkeypatch.setattr(cpu_threads, "INTERVAL", 0.0)
    monkeypatch.setattr(cpu_threads, "FIRST_INTERVAL", 0.0)
    threads = CpuThreads(1, is_native=False)
    for usable in (4, 1, 2):
        cores(usable)
        threads.update()
    assert calls == [4, 1, 2]


def test_load_counts_from_the_first_step_after_a_pause(cores, calls, monkeypatch):
    clock = iter([100.0, 100.05, 100.2, 100.9, 101.3, 110.0, 110.2])
    loads = iter([2.0, 2.0, 0.0, 2.0, 2.0])
    threads = CpuThreads(1, is_native=False)
    monkeypatch.setattr(cpu_threads.time, "monotonic", lambda: next(clock))
    cores(2)
    monkeypatch.setattr(OtherLoad, "measure", lambda _: next(loads))
    for _ in range(7):
        threads.update()
    assert calls == [2, 1, 2, 2, 1]


def test_limits_are_read_once_an_interval(cores, calls, monkeypatch):
    monkeypatch.setattr(cpu_threads, "INTERVAL", 3600.0)
    threads = CpuThreads(1, is_native=False)
    for usable in (4, 1, 2):
        cores(usable)
        threads.update()
    assert calls == [4]


def test_pytorch_is_limited_in_each_thread_that_runs_native_models(cores, calls, monkeypatch):
    monkeypatch.setattr(cpu_threads, "INTERVAL", 3600.0)
    cores(2)
    threads = CpuThreads(1, is_native=True)

    def update_twice():
        threads.update()
        threads.update()

    for _ in range(3):  # the system gives the identifier of a thread that has ended to the next one
        worker = threading.Thread(target=update_twice)
        worker.start()
        worker.join()
    assert calls == ["single", 2, "single", "single"]
