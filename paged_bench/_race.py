"""Time functions against each other on a device: in turn, with memory that no cache holds any more.

On a GPU every contestant is captured in a CUDA graph, so that neither side pays for Python or for launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from paged_backend.execution.graphs import forbid_synchronization

Call = Callable[[int], object]  # the kernel, on the inputs of this rotation

CACHES = 3  # times the last cache that rotated inputs take together
LEAST_SECONDS = {"cpu": 0.02, "cuda": 0.01}  # of one timing


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache: a GPU's L2, a CPU's L3."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text.rstrip("KM")) << (20 if text.endswith("M") else 10))
    return max(sizes, default=32 << 20)


def rotations(nbytes: int, device: torch.device, most_bytes: int | None = None) -> int:
    """How many copies of inputs of `nbytes` leave none in the cache when its turn comes again."""
    wanted = -(-CACHES * cache_bytes(device) // max(1, nbytes))
    if most_bytes is not None:
        wanted = min(wanted, most_bytes // max(1, nbytes))
    return max(1, min(wanted, 64))


def timer(call: Call, count: int, device: torch.device) -> Callable[[], float]:
    """A function that times `call` over all rotations, several times, and gives the seconds of one call. Raises what
    the first call raises."""
    call(0)
    run = _captured(call, count) if device.type == "cuda" else lambda: [call(index) for index in range(count)]
    repeats = max(1, round(LEAST_SECONDS[device.type] / _seconds(run, 1, device)))
    return lambda: _seconds(run, repeats, device) / repeats / count


def _captured(call: Call, count: int) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what compiles or allocates at its first call does so here
        for index in range(count):
            call(index)
        with forbid_synchronization():
            call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            call(index)

    def replay(of: Call = call) -> None:  # held, for its inputs: the graph keeps the addresses alone
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


def race(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, one a round, each round begun by another."""
    names = list(timers)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append(timers[name]())
    return taken
