"""Times functions on a device, with inputs that are not in any cache.

On a GPU every contestant is captured in a CUDA graph, which keeps Python and kernel launches out of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from paged_backend.execution.graphs import forbid_synchronization

Call = Callable[[int], object]  # calls the kernel with the given copy of its inputs

CACHES = 3  # size of all copies of the inputs, relative to the last-level cache
MIN_SECONDS = {"cpu": 0.02, "cuda": 0.01}  # minimum duration of one timing


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache: L2 of a GPU, L3 of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text.rstrip("KM")) << (20 if text.endswith("M") else 10))
    return max(sizes, default=32 << 20)


def rotations(nbytes: int, device: torch.device, most_bytes: int | None = None) -> int:
    """Return how many copies of inputs it takes until a copy has left the cache when it is used again.

    Args:
        nbytes: size of a copy.
        most_bytes: limit of the size of all copies.
    """
    wanted = -(-CACHES * cache_bytes(device) // max(1, nbytes))
    if most_bytes is not None:
        wanted = min(wanted, most_bytes // max(1, nbytes))
    return max(1, min(wanted, 64))


def timer(call: Call, count: int, device: torch.device) -> Callable[[], float]:
    """Return a function that measures the seconds of one `call`, with all `count` copies of its inputs.

    Raises the exception of the first call, if it has one.
    """
    call(0)
    run = _captured(call, count) if device.type == "cuda" else lambda: [call(index) for index in range(count)]
    repeats = max(1, round(MIN_SECONDS[device.type] / _seconds(run, 1, device)))
    return lambda: _seconds(run, repeats, device) / repeats / count


def _captured(call: Call, count: int) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm up: kernels may compile or allocate in their first call
        for index in range(count):
            call(index)
        with forbid_synchronization():
            call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            call(index)

    def replay(kept: Call = call) -> None:  # keeps the inputs alive: the graph has only their addresses
        graph.replay()

    replay()
    return replay


def _seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return time.perf_counter() - started
