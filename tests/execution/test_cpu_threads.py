"""The number of threads of the CPU kernels."""

import resource
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from paged_backend.execution import cpu_threads
from paged_backend.execution.cpu_threads import CpuThreads, count_threads
from paged_backend.utils.machine import usable_cores
from paged_bench._processes import ProcessGroup
from paged_kernels.cpu import native
from tests.support.in_process import running, tiny_assembly


@pytest.fixture
def cores(monkeypatch):
    """Sets the number of cores that the process may use."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return lambda count: monkeypatch.setattr(cpu_threads, "usable_cores", lambda: count)


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


@pytest.mark.parametrize("value", ["x", "0", "-1", "1.5", ",2", "\N{SUPERSCRIPT TWO}"])
def test_an_invalid_omp_num_threads_is_rejected(cores, monkeypatch, value):
    cores(2)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(ValueError, match=f"OMP_NUM_THREADS is '{value}'; it must be a positive integer"):
        count_threads()


def test_threads_follow_limits_that_change(cores, calls, monkeypatch):
    monkeypatch.setattr(cpu_threads, "INTERVAL", 0.0)
    threads = CpuThreads(1, is_native=False)
    for usable in (4, 1, 2):
        cores(usable)
        threads.start_step()
    assert calls == [4, 1, 2]


@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
def test_an_engine_beside_busy_processes_keeps_its_threads(tiny, monkeypatch):
    """A thread that shares its core with another process still gets a share of it, and no thread waits for it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = set()
    with ExitStack() as stack:
        engine = stack.enter_context(running(tiny_assembly(tiny[0], device="cpu")))
        for _ in range(usable_cores()):
            stack.callback(ProcessGroup([sys.executable, "-c", "while True: pass"]).end)
        end = time.monotonic() + 2.5 * cpu_threads.INTERVAL
        while time.monotonic() < end:
            engine.generate([[1, 2, 3]], max_tokens=4)
            found.add(native.threads())
    assert found == {usable_cores()}


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
