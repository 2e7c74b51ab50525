"""Usable memory and cores within a container's limits, in both versions of cgroups, and OpenMP threads."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_backend.utils import machine

GIB = 2**30


@pytest.fixture
def cgroups(monkeypatch, tmp_path):
    """A function that fakes /proc/self/cgroup and the cgroup file system."""

    def lay(of_process, files):
        monkeypatch.setattr(machine, "CGROUPS", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
        read = Path.read_text
        proc = "MemAvailable: 104857600 kB\n"
        fake = {"/proc/self/cgroup": of_process, "/proc/meminfo": proc}
        monkeypatch.setattr(Path, "read_text", lambda path: fake[str(path)] if str(path) in fake else read(path))
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content + "\n")

    return lay


def test_without_cgroup_limits_the_machine_counts(cgroups):
    cgroups("0::/user.slice/a.scope\n", {"user.slice/a.scope/cpu.max": "max 100000", "memory.max": "max"})
    assert machine.usable_cores() == 64
    assert machine.available_memory() == 100 * GIB


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2), ("250000", 2), ("50000", 1), ("9900000", 64)])
def test_container_cpu_quota_is_respected(cgroups, quota, cores):
    cgroups("0::/\n", {"cpu.max": f"{quota} 100000"})
    assert machine.usable_cores() == cores


def test_tightest_enclosing_cgroup_limit_applies(cgroups):
    files = {
        "pod/box/cpu.max": "800000 100000",
        "pod/cpu.max": "300000 100000",
        "pod/box/memory.max": str(4 * GIB),
        "pod/box/memory.current": str(GIB),
        "pod/memory.max": str(3 * GIB),
        "pod/memory.current": str(2 * GIB),
    }
    cgroups("0::/pod/box\n", files)
    assert machine.usable_cores() == 3
    assert machine.available_memory() == GIB


def test_cgroups_version_1(cgroups):
    files = {
        "cpu/docker/box/cpu.cfs_quota_us": "400000",
        "cpu/docker/box/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": str(6 * GIB),
        "memory/memory.usage_in_bytes": str(GIB),
    }
    cgroups("5:memory:/docker/not-mounted-here\n4:cpu,cpuacct:/docker/box\n0::/\n", files)
    assert machine.usable_cores() == 4
    assert machine.available_memory() == 5 * GIB


@pytest.mark.parametrize(
    ("cores", "include_nice", "ticks"),
    [({1}, False, 10 + 3 + 2 + 1 + 4), ({1}, True, 10 + 500 + 3 + 2 + 1 + 4), ({0, 1}, False, 20 + 5 * 7)],
)
def test_busy_time_is_that_of_the_given_cores(monkeypatch, cores, include_nice, ticks):
    stat = "cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 7 7 7 7 7 7 7 7 0 0\ncpu1 10 500 3 900 50 2 1 4 0 0\nintr 5\n"
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(Path, "read_text", lambda path: {"/proc/stat": stat}[str(path)])
    assert machine.busy_seconds(cores, include_nice=include_nice) == ticks / 100


@pytest.mark.parametrize(
    ("value", "expected"), [(None, None), ("", None), (" ", None), ("3", 3), (" 2 ", 2), ("4,2", 4), ("1, 1", 1)]
)
def test_omp_num_threads_is_read_as_openmp_does(monkeypatch, value, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert machine.omp_num_threads() == expected


@pytest.mark.parametrize(("configured", "threads"), [(None, [2]), ("", [2]), ("1", [])])
def test_torch_threads_follow_usable_cores_unless_configured(monkeypatch, configured, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if configured is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", configured)
    found = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=found.append))
    monkeypatch.setattr(machine, "usable_cores", lambda: 5)
    machine.limit_torch_threads(2)
    assert found == threads


@pytest.mark.parametrize(("visible", "limit"), [(None, 2), ("0", 1), ("GPU-1,GPU-2, GPU-3", 3)])
def test_number_of_gpus_is_limited_by_devices_or_names(monkeypatch, tmp_path, visible, limit):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "Path", lambda *parts: tmp_path if parts == ("/dev",) else Path(*parts))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpu_limit() == limit


def test_openmp_teams_of_threads():
    """release_openmp_threads ends the team of the calling thread; a thread of use_single_thread gets none."""
    code = """
import os, threading, torch
from paged_backend.utils import machine
from paged_backend.utils.machine import release_openmp_threads, use_single_thread
def count(): return len(os.listdir("/proc/self/task"))
machine.usable_cores = lambda: 2
machine.limit_torch_threads()
before = count()
torch.ones(1 << 20).sum()
computing = count()
release_openmp_threads()
print(before, computing, count())
def copy():
    use_single_thread()
    before = count()
    torch.ones(1 << 20).sum()
    print(count() - before, torch.get_num_threads())
thread = threading.Thread(target=copy)
thread.start()
thread.join()
while os.path.exists(f"/proc/self/task/{thread.native_id}"):
    pass  # has ended for Python, but maybe not yet for the kernel
before = count()
total = torch.ones(1 << 20).sum().item()
print(count() - before, torch.get_num_threads(), total)
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    first, single, last = (line.split() for line in ran.stdout.splitlines())
    before, computing, after = map(int, first)
    assert (computing, after) == (before + 1, before), ran.stderr
    assert single == ["0", "1"]
    assert last == ["1", "2", str(float(1 << 20))]
