"""The number of threads of the CPU kernels, which follows what the process may use."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from paged_backend.utils.machine import busy_seconds, omp_num_threads, usable_cores, use_single_thread
from paged_kernels.cpu import native

INTERVAL = 1.0  # seconds between two readings of the limits and the load; one takes about 0.1 ms
FIRST_INTERVAL = 0.1  # the same after a pause, since the load during the pause does not count
PAUSE = 1.0  # seconds without a step that count as a pause


def count_threads(processes: int = 1, taken: float = 0.0) -> int:
    """Return the number of threads for one of several processes.

    The number is one more than the cores of the CPU affinity that no other process keeps busy. It is limited by the
    affinity, the cgroup quota and OMP_NUM_THREADS.

    The additional thread shares a core with another process. It helps, because no thread waits for it (see pool.h):
    with one of two cores busy, two threads generate 1.26 times the tokens of one thread for 32 streams, and as many for
    one stream (AMD EPYC, Zen 5).

    Args:
        processes: the number of processes that share the cores evenly.
        taken: the average number of cores that all other processes keep busy.

    Raises ValueError if OMP_NUM_THREADS is not a positive integer.
    """
    usable = usable_cores()
    free = len(os.sched_getaffinity(0)) - math.floor(taken + 0.5)
    return max(1, min(omp_num_threads() or usable, usable // processes, free + 1))


class _Reading(NamedTuple):
    """CPU times at some time, in seconds."""

    time: float
    busy: float  # CPU time of all processes that count, on the cores of the affinity
    own: float  # CPU time of this process
    counted: tuple[frozenset[int], bool]  # the cores, and whether processes with a positive nice value count


class OtherLoad:
    """Measures how many cores of the CPU affinity other processes keep busy.

    Processes with a positive nice value count only if this process has one too: otherwise they take little from it.
    """

    def __init__(self) -> None:
        self._last = self._read()

    def measure(self) -> float:
        """Return the average number of cores since the last call.

        Returns 0 where the system does not tell, and if the affinity or the nice value has changed in the meantime.
        """
        before, now = self._last, self._read()
        self._last = now
        if before is None or now is None or now.time <= before.time or now.counted != before.counted:
            return 0.0
        return max(0.0, now.busy - before.busy - (now.own - before.own)) / (now.time - before.time)

    def _read(self) -> _Reading | None:
        cores, include_nice = frozenset(os.sched_getaffinity(0)), os.nice(0) > 0
        try:
            busy = busy_seconds(cores, include_nice=include_nice)
            return _Reading(time.monotonic(), busy, time.process_time(), (cores, include_nice))
        except (OSError, ValueError):  # not Linux's format, as in some sandboxes
            return None


class CpuThreads:
    """Sets the number of threads while steps run."""

    def __init__(self, processes: int, *, is_native: bool) -> None:
        """processes: number of processes that share the cores. is_native: whether the C++ kernels compute whole layers.

        If they do, what remains for PyTorch is too small for several threads, which would wait for each other.
        """
        self._processes = processes
        self._is_native = is_native
        self._load = OtherLoad()
        self._next = 0.0  # time.monotonic() of the next reading
        self._last_end = -math.inf  # time.monotonic() of the end of the last step
        self._prepared = threading.local()  # has `done` in a thread that has run a step; identifiers are reused

    def start_step(self) -> None:
        """Adapt the number of threads to the limits and the load, at most once a second.

        Called by the thread that runs the step.
        """
        if self._is_native and not hasattr(self._prepared, "done"):
            self._prepared.done = True
            use_single_thread()
        now = time.monotonic()
        if now < self._next:
            return
        taken, has_paused = self._load.measure(), now - self._last_end > PAUSE
        self._next = now + (FIRST_INTERVAL if has_paused else INTERVAL)
        with suppress(OSError):  # no file descriptor is left; the number stays
            native.set_threads(count_threads(self._processes, 0.0 if has_paused else taken))

    def end_step(self) -> None:
        """Note that a step has ended: a pause begins, unless the next step follows."""
        self._last_end = time.monotonic()
