"""Instruction sets ("levels" of the C++ kernels) and threads that the engines of a benchmark are limited to."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paged_bench._harness import InvalidArgument, Option
from paged_kernels.cpu import native
from paged_kernels.cpu.build import supported

LIMITS = {  # limits of PyTorch, oneDNN and MKL, by level
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512_vnni": ("avx512", "AVX512_CORE_VNNI", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
    "amx": ("avx512", "AVX512_CORE_AMX", "AVX512"),
}
THREADS = "OMP_NUM_THREADS"
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def level_option() -> Option:
    """Return the option `--level`."""
    names = f"of {', '.join(LIMITS)} (default: all instructions of the processor)"
    return Option("--level", f"instruction set of all engines, {names}", type=_level, metavar="LEVEL")


def limit(level: str) -> dict[str, str]:
    """Limit the engine and PyTorch to a level, in this process and its child processes. Return the settings.

    It must be called before anything is computed. Raises InvalidArgument if the kernels of the level are not compiled.
    """
    settings = dict(zip(VARIABLES, LIMITS[level], strict=True)) | {native.LEVEL: level}
    os.environ.update(settings)
    try:
        used = native.level()
    except ValueError as error:
        raise InvalidArgument(f"argument --level: {error}") from error
    assert used == level
    return settings


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Limit the threads of PyTorch in this process, and of every engine that is started meanwhile."""
    before, variable = torch.get_num_threads(), os.environ.pop(THREADS, None)
    torch.set_num_threads(threads)
    os.environ[THREADS] = str(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        del os.environ[THREADS]
        if variable is not None:
            os.environ[THREADS] = variable


def is_limit(level: str | None) -> bool:
    """Return whether a level leaves out instructions of this processor."""
    return level is not None and level != supported()[0]


def _level(text: str) -> str:
    usable = [level for level in supported() if level in LIMITS]
    if text not in usable:
        raise ArgumentTypeError(f"{text!r}: must be one of {', '.join(usable)}, which this processor has")
    return text
