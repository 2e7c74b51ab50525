"""The number of threads of the CPU kernels, which follows what the process may use."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from paged_backend.utils.machine import omp_num_threads, usable_cores, use_single_thread
from paged_kernels.cpu import native

INTERVAL = 1.0  # seconds between two readings of the limits; one takes about 0.1 ms


def count_threads(processes: int = 1) -> int:
    """Return the number of threads for one of several processes that share the cores evenly.

    A process gets its share of the cores in the CPU affinity, within the cgroup quota, but no more than
    OMP_NUM_THREADS. Cores that other processes keep busy count, too: no thread waits for one that lost its core (see
    pool.h).

    Raises ValueError if OMP_NUM_THREADS is not a positive integer.
    """
    usable = usable_cores()
    return max(1, min(omp_num_threads() or usable, usable // processes))


class CpuThreads:
    """Sets the number of threads while steps run."""

    def __init__(self, processes: int, *, is_native: bool) -> None:
        """processes: number of processes that share the cores. is_native: whether the C++ kernels compute whole layers.

        If they do, what remains for PyTorch is too small for several threads, which would wait for each other.
        """
        self._processes = processes
        self._is_native = is_native
        self._next = 0.0  # time.monotonic() of the next reading
        self._prepared = threading.local()  # has `done` in a thread that has run a step; identifiers are reused

    def start_step(self) -> None:
        """Adapt the number of threads to the limits, at most once a second.

        Called by the thread that runs the step.
        """
        if self._is_native and not hasattr(self._prepared, "done"):
            self._prepared.done = True
            use_single_thread()
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL
        with suppress(OSError):  # no file descriptor is left; the number stays
            native.set_threads(count_threads(self._processes))
