"""Launches of kernels, and the device that they run on. Imports no triton.

The environment variable PAGED_GPU_FEATURES turns on features that have not run on a GPU yet, separated by commas.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paged_kernels.launch_table import power_of_two

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")  # compiler options among a launch's arguments
FEATURES = "PAGED_GPU_FEATURES"
DEPENDENT_LAUNCHES = "dependent_launches"  # `dependent_launch`
PRODUCERS = "producers"  # tiles with a producer for all chunks: `hopper_attention`
DEFAULT_MULTIPROCESSORS = 132  # multiprocessors of an H100 or H200, for runs without a GPU


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that launch shapes depend on."""

    chip: str  # name of its table: "sm_90", "gfx942"
    multiprocessors: int
    features: frozenset[str] = frozenset()  # of PAGED_GPU_FEATURES

    @property
    def is_hopper_or_later(self) -> bool:
        return self.chip.startswith(("sm_9", "sm_1"))

    @property
    def converts_fp8(self) -> bool:
        """Whether an instruction converts e4m3 to 16 bits."""
        return self.chip == "sm_89" or self.is_hopper_or_later

    @property
    def dependence(self) -> dict[str, bool]:
        """The arguments of a launch that may start before the previous one has ended; see `dependent_launch`."""
        if DEPENDENT_LAUNCHES in self.features and self.is_hopper_or_later:
            return {"DEPENDENT": True, "launch_pdl": True}
        return {"DEPENDENT": False}


@cache
def device_of(device: torch.device) -> Device:
    """Return the properties of a GPU. For the CPU, where Triton's interpreter runs kernels, return an H100's.

    Raises ValueError for an unknown feature.
    """
    chip, multiprocessors = "sm_90", DEFAULT_MULTIPROCESSORS
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hip = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
        chip = hip.split(":")[0] or f"sm_{properties.major}{properties.minor}"
        multiprocessors = properties.multi_processor_count
    return Device(chip, multiprocessors, read_features(os.environ.get(FEATURES, "")))


def read_features(names: str) -> frozenset[str]:
    """Return the features of a list. Raises ValueError for an unknown one."""
    features = frozenset(filter(None, map(str.strip, names.split(","))))
    if unknown := features - {DEPENDENT_LAUNCHES, PRODUCERS}:
        raise ValueError(f"{FEATURES}={names!r}: {min(unknown)!r} is none of {DEPENDENT_LAUNCHES!r}, {PRODUCERS!r}")
    return features


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, and its arguments and compiler options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> Any:
        """Launch the kernel. Returns the compiled kernel, or None in the interpreter and if it was intercepted."""
        if _thread.handler is not None:
            return _thread.handler(self)
        return self.kernel[self.grid](**self.arguments)


Counters = dict[tuple[torch.device, int], list[Tensor]]  # zeros by device and stream


class _Thread(threading.local):
    """What affects the launches of the current thread. Another thread may run another engine."""

    handler: Callable[[Launch], None] | None = None  # takes all launches
    counters: Counters | None = None


_thread = _Thread()
_counters: Counters = {}


@contextmanager
def intercept_launches(handler: Callable[[Launch], None]) -> Iterator[None]:
    """Hand all launches of this thread to `handler`, instead of launching them."""
    previous, _thread.handler = _thread.handler, handler
    try:
        yield
    finally:
        _thread.handler = previous


@contextmanager
def own_counters(counters: Counters) -> Iterator[None]:
    """Take the zeros of this thread's launches from `counters`. For CUDA graphs, which run on any stream later."""
    previous, _thread.counters = _thread.counters, counters
    try:
        yield
    finally:
        _thread.counters = previous


def zeros(count: int, device: torch.device) -> Tensor:
    """Return at least `count` int32 zeros, which kernels may change if they leave zeros behind.

    All launches on a stream share them, since they run one after the other; the graphs of an engine share others
    (`own_counters`). Earlier and smaller tensors are kept for the graphs that use them.
    """
    counters = _counters if _thread.counters is None else _thread.counters
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    made = counters.setdefault((device, stream), [])
    if not made or len(made[-1]) < count:
        made.append(torch.zeros(power_of_two(count), dtype=torch.int32, device=device))
    return made[-1]
