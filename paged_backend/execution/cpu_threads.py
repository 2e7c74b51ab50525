"""The number of threads of the CPU kernels, which follows what the process may use."""

from __future__ import annotations

import os
import threading
import time

from paged_backend.utils.machine import busy_seconds, usable_cores, use_single_thread
from paged_kernels.cpu import native

INTERVAL = 1.0  # seconds between two looks at the limits and the load; one takes about 0.1 ms
FIRST_INTERVAL = 0.1  # the same after a pause, during which the load may have been another one


def count_threads(processes: int = 1, taken: float = 0.0) -> int:
    """Return the number of threads for one of several processes.

    These are the cores of the CPU affinity that no other process keeps busy and one more, within the cgroup quota, and
    at most OMP_NUM_THREADS if it is set. A thread on a core that another process uses still gets its share of it, and
    no thread waits for it (see pool.h): with one of two cores taken, two threads generate 1.26 times the tokens of one
    for 32 streams, and as many for one stream (AMD EPYC, Zen 5).

    Args:
        processes: the number of processes that share the cores evenly.
        taken: the average number of cores that all other processes keep busy.
    """
    requested = os.environ.get("OMP_NUM_THREADS", "")
    limit = int(requested) if requested.isdecimal() and int(requested) else usable_cores()
    free = len(os.sched_getaffinity(0)) - round(taken)
    return max(1, min(limit, usable_cores() // processes, free + 1))


class OtherLoad:
    """Measures how many cores other processes keep busy."""

    def __init__(self) -> None:
        self._last = self._read()

    def measure(self) -> float:
        """Return the average number of cores since the last call; 0 where the system does not tell."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None or self._last[0] <= before[0]:
            return 0.0
        seconds, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        return max(0.0, busy - own) / seconds

    def _read(self) -> tuple[float, float, float] | None:
        try:
            return time.monotonic(), busy_seconds(), time.process_time()
        except (OSError, ValueError):  # not Linux's format, as in some sandboxes
            return None


class CpuThreads:
    """Sets the number of threads while steps run."""

    def __init__(self, processes: int, *, is_native: bool) -> None:
        """processes: that share the cores. is_native: whether the C++ kernels compute whole layers; what remains for
        PyTorch is too small for several threads, which would wait for each other."""
        self._processes = processes
        self._is_native = is_native
        self._load = OtherLoad()
        self._next = 0.0  # time.monotonic() of the next look
        self._prepared = threading.local()  # has `done` in a thread that has run a step; identifiers are reused

    def update(self) -> None:
        """Adapt the number of threads to the limits and the load, at most once a second.

        Called by the thread that runs a step.
        """
        if self._is_native and not hasattr(self._prepared, "done"):
            self._prepared.done = True
            use_single_thread()
        now = time.monotonic()
        if now < self._next:
            return
        taken, has_paused = self._load.measure(), now > self._next + INTERVAL
        self._next = now + (FIRST_INTERVAL if has_paused else INTERVAL)
        native.set_threads(count_threads(self._processes, 0.0 if has_paused else taken))
