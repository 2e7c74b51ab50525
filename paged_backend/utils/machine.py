"""What of the machine this process may use: what is there, or less where its cgroups (a container's limits) say so."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

CGROUPS = Path("/sys/fs/cgroup")
OPENMP = ("libgomp", "libomp", "libiomp5")
OMP_PAUSE_SOFT = 1
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


class MemoryUsage(NamedTuple):
    """Bytes that a process has in use."""

    cpu: int
    gpu: int  # in tensors
    pinned: int  # of the host's memory, for blocks: a GPU reaches it by itself


def find_python() -> str:
    """A Python like this one. In the server's stub, a program of its own, sys.executable need not be one. Raises
    OSError."""
    beside = [str(Path(prefix, "bin", VERSION)) for prefix in (sys.prefix, sys.base_prefix)]
    own = [sys.executable] if Path(sys.executable or "").name == VERSION else []
    for candidate in (*own, *beside, shutil.which(VERSION)):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise OSError(f"a process of its own needs {VERSION}; not in {sys.prefix}, not on PATH")


def available_memory() -> int:
    """Bytes that this process can still take."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return min([free, *_rooms()])


def resident_memory() -> int:
    """Bytes of memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def usable_cores() -> int:
    """Cores that this process may keep busy: a quota of 2.5 is 2, for a thread that is stopped holds up the others."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas()])))


def limit_torch_threads(processes: int = 1) -> None:
    """Have PyTorch compute with as many threads as there are cores for each of `processes`, unless OMP_NUM_THREADS says
    how many. By itself it counts the machine's, whatever a container may use of them."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // processes))


def trim_memory() -> None:
    """Give the system back what was freed: glibc keeps pieces below its threshold, of which loading a model leaves
    hundreds of megabytes."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def release_openmp_threads() -> None:
    """End the threads that compute for the calling one, before another thread computes: OpenMP keeps a team for each
    thread that ever asked for one, and where teams have more threads than there are cores, none waits awake for its
    next piece of work. A decode step then took half as long again. (`omp_pause_resource_all` of OpenMP 5.0; the next
    one who computes gets new threads.)"""
    _tell_openmp("omp_pause_resource_all", OMP_PAUSE_SOFT)


def use_single_thread() -> None:
    """Have the calling thread compute by itself, without a team: one that only copies, beside the one that computes."""
    torch.get_num_threads()  # else PyTorch would set the number later, when this thread first computes
    _tell_openmp("omp_set_num_threads", 1)


def _tell_openmp(function: str, argument: int) -> None:
    mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    for path in {fields[5] for fields in mapped if len(fields) == 6}:
        if Path(path).name.startswith(OPENMP) and (found := getattr(ctypes.CDLL(path), function, None)):
            found(argument)


def _rooms() -> Iterator[int]:
    for limit, used in (
        *_read("memory", "memory.max", "memory.current"),
        *_read("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        if limit.isdigit():
            yield max(0, int(limit) - int(used))


def _quotas() -> Iterator[float]:
    for (whole,) in _read("cpu", "cpu.max"):
        quota, period = whole.split()
        if quota != "max":
            yield int(quota) / int(period)
    for quota, period in _read("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        if int(quota) > 0:
            yield int(quota) / int(period)


def _read(controller: str, *names: str) -> Iterator[tuple[str, ...]]:
    """These files of each of the process's cgroups that has them, its own and those around it; in version 1 of cgroups,
    the controller's."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # In a container the path may be the host's, which is not mounted: then the top is the container's own.
        own = CGROUPS / (controller if controllers else "") / path.lstrip("/")
        for directory in (own, *(one for one in own.parents if one.is_relative_to(CGROUPS))):
            try:
                yield tuple((directory / name).read_text().strip() for name in names)
            except OSError:
                continue
