"""The share of time in which a GPU is idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from paged_bench._report import NO_GPU, Record, not_measured


def idle(name: str, device: torch.device, run: Callable[[], object]) -> Record:
    """Return the record of `gpu_idle` while a workload runs."""
    if device.type != "cuda":
        return not_measured(f"GPU idle {name}", NO_GPU)
    return Record(f"GPU idle {name}", gpu_idle(run), "%", 2.0, 0.0)


def gpu_idle(run: Callable[[], object]) -> float:
    """Return the share of the wall time of `run` without a kernel or copy on the GPU, in %, by torch.profiler.

    It is an upper bound, because the profiler slows down the host.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return 100 * (1 - _union(spans) / 1e6 / wall)


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    length, covered_to = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return length
