"""The CPU affinity and the cgroup quota of a process limit its threads."""

import multiprocessing
import os
import statistics
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

from paged_backend.execution.cpu_threads import count_threads
from paged_backend.utils.machine import usable_cores
from paged_client.serving.repository import resolve_model
from paged_kernels.cpu import native
from tests.support.waiting import until

CGROUPS = Path("/sys/fs/cgroup")
PERIOD = 100_000  # microseconds

pytestmark = pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")


@contextmanager
def quota_of_one_cpu():
    """Yield a function by which a child process limits itself to one CPU."""
    is_version_2 = (CGROUPS / "cgroup.controllers").exists()
    group = CGROUPS / ("" if is_version_2 else "cpu") / f"paged-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        if is_version_2:
            (group / "cpu.max").write_text(f"{PERIOD} {PERIOD}")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(PERIOD))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no CPU quota can be set: {error}")
    try:
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@contextmanager
def affinity_of_one_core():
    core = min(os.sched_getaffinity(0))
    yield lambda: os.sched_setaffinity(0, {core})


LIMITS = {"quota": quota_of_one_cpu, "affinity": affinity_of_one_core}


def run(limit, *arguments, **environment):
    """Return the output of Python with these arguments, under a limit."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=inherited | environment, preexec_fn=limit, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def threads_of_child(limit):
    """Return what count_threads returns in a child process, under a limit."""

    def count(sender):
        os.environ.pop("OMP_NUM_THREADS", None)
        limit()
        sender.send(count_threads())

    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=count, args=(sender,))
    child.start()
    sender.close()
    threads = receiver.recv()
    child.join()
    return threads


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_one_cpu_gets_one_thread(limit):
    with limit() as limited:
        assert threads_of_child(limited) == 1
    assert threads_of_child(lambda: None) > 1


@pytest.mark.nightly
@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_throughput_under_a_limit(limit, figures):
    """At least 0.8 of that of OMP_NUM_THREADS=1, at the median of five alternating rounds."""
    ratios, script = [], ("-m", "tests.support.cpu_throughput", str(resolve_model("demo")))
    for _ in range(5):
        single = float(run(None, *script, OMP_NUM_THREADS="1"))
        with limit() as limited:
            ratios.append(float(run(limited, *script)) / single)
    figures(f"throughput of a limited process, times that of OMP_NUM_THREADS=1: {ratios}")
    assert statistics.median(ratios) >= 0.8
