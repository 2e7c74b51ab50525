"""The memory and CPU cores that this process may use, within the limits of its cgroups (a container's limits), and the
directory for the user's files."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
OPENMP = ("libgomp", "libomp", "libiomp5")
OMP_PAUSE_SOFT = 1
GPU_FILES = ("nvidia[0-9]*", "dxg", "nvhost*", "nvmap")  # of a GPU, of Windows' Linux, and of boards with a GPU
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


class MemoryUsage(NamedTuple):
    """Bytes of memory that a process uses."""

    cpu: int
    gpu: int  # GPU memory allocated by tensors
    pinned: int  # host memory that a GPU can access directly: the host pool


def user_cache_directory() -> Path:
    """Return the directory for the user's files: $PAGED_CACHE_DIR, or paged_llm in $XDG_CACHE_HOME or ~/.cache."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "paged_llm")
    return Path(os.environ.get("PAGED_CACHE_DIR") or own).expanduser().absolute()


def has_gpu() -> bool:
    """Return whether CUDA may find a GPU: the driver has device files, and they are not hidden. Needs no torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(next(Path("/dev").glob(pattern), None) for pattern in GPU_FILES)


def gpu_limit() -> int | None:
    """Return the most GPUs that CUDA may find, if `has_gpu`; None: not known. Needs no torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return sum(1 for _ in Path("/dev").glob(GPU_FILES[0])) or None


def find_python() -> str:
    """Return the path of a Python interpreter of this version. In Triton's stub process, sys.executable may be another
    program. Raises OSError if there is none."""
    beside = [str(Path(prefix, "bin", VERSION)) for prefix in (sys.prefix, sys.base_prefix)]
    own = [sys.executable] if Path(sys.executable or "").name == VERSION else []
    for candidate in (*own, *beside, shutil.which(VERSION)):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise OSError(f"a subprocess needs {VERSION}, which is neither in {sys.prefix} nor on PATH")


def available_memory() -> int:
    """Return the bytes of memory that this process can still allocate."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return min([free, *_free_in_cgroups()])


def resident_memory() -> int:
    """Return the bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def usable_cores() -> int:
    """Return the number of cores that this process may keep busy. A quota of 2.5 counts as 2, because a throttled
    thread delays the others."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas()])))


def omp_num_threads() -> int | None:
    """Return the number of threads that OMP_NUM_THREADS requests, or None if it is not set.

    Of a list, which OpenMP reads as one number per level of nested regions, this is the first number. Raises ValueError
    if it is not a positive integer.
    """
    value = os.environ.get("OMP_NUM_THREADS", "")
    first = value.split(",")[0].strip()
    if not value.strip():
        return None
    if not (first.isascii() and first.isdigit() and int(first) > 0):
        raise ValueError(f"OMP_NUM_THREADS is {value!r}; it must be a positive integer")
    return int(first)


def busy_seconds(cores: Iterable[int], *, include_nice: bool) -> float:
    """Return the CPU time that all processes have spent on these cores since the system started.

    Args:
        cores: numbers of cores, as in `os.sched_getaffinity`.
        include_nice: whether to count processes with a positive nice value.

    Raises OSError where the system does not tell.
    """
    names = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in names:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + system + irq + softirq + steal + (nice if include_nice else 0)
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_name() -> str:
    """Return the model of the CPU, or its architecture if the system does not name the model."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def limit_torch_threads(processes: int = 1) -> None:
    """Set PyTorch's number of threads to the usable cores per process, unless OMP_NUM_THREADS is set. PyTorch's default
    is the number of cores of the machine, even in a container with a lower quota."""
    if omp_num_threads() is None:
        import torch  # imported late: the rest of this module needs no torch, which takes seconds to load

        torch.set_num_threads(max(1, usable_cores() // processes))


def trim_memory() -> None:
    """Return freed memory to the system. Loading a model leaves hundreds of megabytes in small pieces, which glibc
    keeps."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def release_openmp_threads() -> None:
    """End the calling thread's OpenMP team, before another thread computes.

    OpenMP keeps a team for each thread that ever computed. If all teams together have more threads than there are
    cores, idle threads sleep instead of spinning, and a decode step takes 50% longer. Uses `omp_pause_resource_all` of
    OpenMP 5.0; a thread that computes later gets a new team.
    """
    _call_openmp("omp_pause_resource_all", OMP_PAUSE_SOFT)


def use_single_thread() -> None:
    """Make the calling thread compute without an OpenMP team, for threads that only copy while another thread
    computes."""
    import torch

    torch.get_num_threads()  # prevents PyTorch from setting the number again when this thread first computes
    _call_openmp("omp_set_num_threads", 1)


def _call_openmp(function: str, argument: int) -> None:
    """Call a function in every OpenMP library that is loaded."""
    mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    for path in {fields[5] for fields in mapped if len(fields) == 6}:
        if Path(path).name.startswith(OPENMP) and (function_of_library := getattr(ctypes.CDLL(path), function, None)):
            function_of_library(argument)


def _free_in_cgroups() -> Iterator[int]:
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
    """Yield the content of these files for the process's cgroup and all enclosing ones, as far as they have them. In
    cgroups version 1, these are the cgroups of the controller."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # In a container the path may be the host's, which is not mounted; then the root is the container's own cgroup.
        own = CGROUPS / (controller if controllers else "") / path.lstrip("/")
        for directory in (own, *(parent for parent in own.parents if parent.is_relative_to(CGROUPS))):
            try:
                yield tuple((directory / name).read_text().strip() for name in names)
            except OSError:
                continue
