"""What a GPU does while a workload runs: the share of time in which it is idle, and the time of each kernel."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paged_bench._report import NO_GPU, Record, not_measured

MOST_KERNELS = 16  # records of a workload
LONGEST_NAME = 60  # characters; cuBLAS and PyTorch have names of thousands


def idle(name: str, device: torch.device, run: Callable[[], object]) -> Record:
    """Return the record of `gpu_idle` while a workload runs."""
    if device.type != "cuda":
        return not_measured(f"GPU idle {name}", NO_GPU)
    return Record(f"GPU idle {name}", gpu_idle(run), "%", 2.0, 0.0)


def gpu_idle(run: Callable[[], object]) -> float:
    """Return the share of the wall time of `run` without a kernel or copy on the GPU, in %, by torch.profiler.

    It is an upper bound, because the profiler slows down the host.
    """
    wall, events = _profiled(run)
    return 100 * (1 - _union([(event.time_range.start, event.time_range.end) for event in events]) / 1e6 / wall)


def kernels(name: str, steps: int, run: Callable[[], object]) -> Iterator[Record]:
    """Yield the GPU time of the kernels that take the most in `run`, per step, and how often each is launched.

    steps: of the run. Those with prompts count like the others, so that there should be few of them.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for event in _profiled(run)[1]:
        times[event.name[:LONGEST_NAME]].append(event.time_range.end - event.time_range.start)
    total, launches = sum(map(sum, times.values())), sum(map(len, times.values()))
    yield Record(f"GPU time of a step {name}", total / steps, "us", peers={"launches": launches / steps})
    for kernel in sorted(times, key=lambda one: -sum(times[one]))[:MOST_KERNELS]:
        launched = {"launches": len(times[kernel]) / steps}
        yield Record(f"GPU time of a step {name}: {kernel}", sum(times[kernel]) / steps, "us", peers=launched)


def _profiled(run: Callable[[], object]) -> tuple[float, list[Any]]:
    """Return the seconds that `run` takes, and the profiler's events of the GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    return wall, [one for one in profiler.events() if one.device_type == torch.autograd.DeviceType.CUDA]


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    length, covered_to = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return length
