"""Repeats runs while other processes keep cores busy."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from paged_backend.utils.machine import busy_seconds

MAX_LOAD = 0.25  # average number of cores that other processes may keep busy during a run
ATTEMPTS = 3  # number of times that a run is made at most

T = TypeVar("T")


def least_disturbed(run: Callable[[], T], child: int | None = None) -> tuple[T, float]:
    """Run up to ATTEMPTS times, until other processes keep at most MAX_LOAD cores busy.

    Returns the result of the run with the least load of other processes, and this load: an average number of cores, 0
    where the system does not tell.

    child: the process that computes, if it is not this one.
    """
    best: tuple[float, T] | None = None
    for _ in range(ATTEMPTS):
        started, before = time.monotonic(), other_cpu_seconds(child)
        result = run()
        elapsed, after = time.monotonic() - started, other_cpu_seconds(child)
        load = 0.0 if before is None or after is None else max(0.0, after - before) / max(elapsed, 1e-9)
        if best is None or load < best[0]:
            best = load, result
        if load <= MAX_LOAD:
            break
        print(f"other processes used {load:.2g} cores ...", end=" ", file=sys.stderr, flush=True)
    assert best is not None
    return best[1], best[0]


def other_cpu_seconds(child: int | None) -> float | None:
    """Return the CPU time that processes other than this one and `child` have used on the cores of the CPU affinity.

    Returns None where the system does not tell. Processes with a positive nice value count only if this one has one.
    """
    try:
        busy = busy_seconds(os.sched_getaffinity(0), include_nice=os.nice(0) > 0)
        return busy - time.process_time() - (_cpu_seconds(child) if child is not None else 0.0)
    except (OSError, ValueError):
        return None


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time
