"""The number of threads of the CPU kernels."""

import resource
import threading
from functools import partial

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
    [(8, 1, None, 8), (8, 2, None, 4), (1, 2, None, 1), (8, 1, "3", 3), (2, 1, "3", 2), (8, 4, "3", 2), (8, 1, "", 8)],
)
def test_threads_follow_cores_processes_and_environment(cores, monkeypatch, usable, processes, variable, expected):
    cores(usable)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert count_threads(processes) == expected


@pytest.mark.parametrize(
    ("usable", "affinity", "taken", "expected"),
    [
        (2, 2, 0.3, 2),
        (2, 2, 1.4, 2),
        (2, 2, 1.5, 1),
        (8, 8, 2.5, 6),
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


@pytest.mark.parametrize("value", ["x", "0", "-1", "1.5", ",2", "\N{SUPERSCRIPT TWO}"])
def test_an_invalid_omp_num_threads_is_rejected(cores, monkeypatch, value):
    cores(2)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(ValueError, match=f"OMP_NUM_THREADS is '{value}'; it must be a positive integer"):
        count_threads()


@pytest.fixture
def counters(monkeypatch):
    """Sets what OtherLoad reads, one after the other: the time, seconds of all processes and of this one."""

    def follow(*readings):
        values = iter(readings)
        now = []

        def read():
            now[:] = next(values)
            return now[0]

        monkeypatch.setattr(cpu_threads.os, "sched_getaffinity", lambda _: {0, 1})
        monkeypatch.setattr(cpu_threads.os, "nice", lambda _: 0)
        monkeypatch.setattr(cpu_threads, "busy_seconds", lambda cores, include_nice: read() and now[1])
        monkeypatch.setattr(cpu_threads.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(cpu_threads.time, "process_time", lambda: now[2])

    return follow


def test_load_is_that_of_other_processes_since_the_last_call(counters):
    counters((10.0, 50.0, 3.0), (12.0, 53.0, 4.0), (12.0, 53.0, 4.0), (16.0, 54.0, 6.0))
    load = OtherLoad()
    assert [load.measure() for _ in range(3)] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("name", "value"), [("sched_getaffinity", {1}), ("nice", 5)])
def test_load_is_zero_after_a_change_of_what_counts(counters, monkeypatch, name, value):
    counters((10.0, 50.0, 3.0), (12.0, 90.0, 4.0), (14.0, 93.0, 5.0))
    load = OtherLoad()
    monkeypatch.setattr(cpu_threads.os, name, lambda _: value)
    assert [load.measure() for _ in range(2)] == [0.0, 1.0]


def test_load_is_zero_where_the_system_does_not_tell(monkeypatch):
    def fail(*_, **__):
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
        threads.start_step()
    assert calls == [4, 1, 2]


def run_steps(threads, monkeypatch, *steps):
    """Run steps that start and end at these times."""
    for start, end in steps:
        monkeypatch.setattr(cpu_threads.time, "monotonic", partial(float, start))
        threads.start_step()
        monkeypatch.setattr(cpu_threads.time, "monotonic", partial(float, end))
        threads.end_step()


def test_load_during_a_pause_does_not_count(cores, calls, monkeypatch):
    loads = iter([2.0, 2.0, 0.0, 2.0, 2.0])
    threads = CpuThreads(1, is_native=False)
    cores(2)
    monkeypatch.setattr(OtherLoad, "measure", lambda _: next(loads))
    steps = [
        (100.0, 100.04),
        (100.05, 100.1),
        (100.2, 100.8),
        (100.9, 101.2),
        (101.3, 101.4),
        (110.0, 110.1),
        (110.2, 111),
    ]
    run_steps(threads, monkeypatch, *steps)
    assert calls == [2, 1, 2, 2, 1]


def test_load_during_long_steps_counts(cores, calls, monkeypatch):
    cores(2)
    threads = CpuThreads(1, is_native=False)
    monkeypatch.setattr(OtherLoad, "measure", lambda _: 2.0)
    run_steps(threads, monkeypatch, (100.0, 105.0), (105.1, 112.0), (113.5, 114.0))
    assert calls == [2, 1, 2]


def test_limits_are_read_once_an_interval(cores, calls, monkeypatch):
    monkeypatch.setattr(cpu_threads, "INTERVAL", 3600.0)
    threads = CpuThreads(1, is_native=False)
    for usable in (4, 1, 2):
        cores(usable)
        threads.start_step()
    assert calls == [4]


def test_pytorch_is_limited_in_each_thread_that_runs_native_models(cores, calls, monkeypatch):
    monkeypatch.setattr(cpu_threads, "INTERVAL", 3600.0)
    cores(2)
    threads = CpuThreads(1, is_native=True)

    def start_twice():
        threads.start_step()
        threads.start_step()

    for _ in range(3):  # the system gives the identifier of a thread that has ended to the next one
        worker = threading.Thread(target=start_twice)
        worker.start()
        worker.join()
    assert calls == ["single", 2, "single", "single"]


def test_a_step_without_file_descriptors_keeps_the_number_of_threads(calls):
    """Limits are read from files; clients can use up descriptors with connections."""
    threads, (soft, hard) = CpuThreads(1, is_native=False), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        threads.start_step()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert calls == []
