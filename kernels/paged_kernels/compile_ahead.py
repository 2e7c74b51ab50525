"""Compiles the kernels that a function launches, several at a time, before they are needed.

Triton compiles a kernel when it is first launched, one after the other. Here launches are intercepted, and what they
would compile is handed to threads (`triton.AsyncCompileMode`); the compiler releases Python's lock. What is in Triton's
cache on disk is only loaded. Imports no triton without a GPU.
"""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from paged_kernels.launch import Launch, intercept_launches

MAX_THREADS = 16
Advance = Callable[[], object]  # called when a kernel has been compiled


def check_cache(device: torch.device) -> None:
    """Check that Triton can keep compiled kernels on disk. Raises ValueError that names the folder."""
    if device.type != "cuda":
        return
    from triton import knobs

    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f'TRITON_CACHE_DIR="{folder}": cannot keep compiled kernels there: {error.strerror}; set it to a folder'
            " that can be written"
        ) from error


def compile_ahead(
    device: torch.device, run: Callable[[], object], start_progress: Callable[[int], Advance] | None = None
) -> int:
    """Compile the kernels that `run` launches on a GPU, and return their number. Does nothing for another device.

    Everything else in `run` takes place, but kernels are not run: `out` of a launch is 0, and other outputs are
    undefined. A kernel that cannot be compiled raises its error when it is launched.

    Args:
        device: that `run` computes on.
        start_progress: called with the number of kernels. What it returns is called after each of them.
    """
    if device.type != "cuda":
        return 0
    return compile_launches(run, start_progress)


def compile_launches(run: Callable[[], object], start_progress: Callable[[int], Advance] | None = None) -> int:
    """Compile what `run` launches; see `compile_ahead`."""
    from triton import AsyncCompileMode

    def submit(planned: Launch) -> None:
        planned.kernel.warmup(**planned.arguments, grid=planned.grid)
        if (out := planned.arguments.get("out")) is not None:
            out.zero_()

    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True) as mode:
        with intercept_launches(submit):
            run()
        advance = start_progress(len(mode.raw_futures)) if start_progress else None
        for _ in as_completed(mode.raw_futures):
            if advance:
                advance()
        return len(mode.raw_futures)
