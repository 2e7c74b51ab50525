"""Compilation of launches in processes of their own, several at a time, into Triton's cache on disk.

Triton describes what a launch would compile as JSON (`specialization_data`). A process compiles just that, for the same
GPU but without using it. The launch then finds its code in the cache. A process that takes much longer than the others
is killed, since some kernels keep the compiler busy for hours. Imports no triton before it is used.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from paged_kernels.launch import Launch

SPARE_SECONDS = 5.0  # a compilation may take twice as long as the slowest one so far, and this in addition
MAX_SECONDS = 60.0  # limit of every compilation, and the only one before the first has succeeded
POLL_SECONDS = 0.1  # how often the limit is checked
ORPHAN_SECONDS = 60  # seconds after MAX_SECONDS at which a process ends itself if it was not killed
PRELOADED = ["paged_kernels.paged_attention", "paged_kernels.tuning_inputs"]  # imported once, for all processes

FAILED, TOO_LONG = "not compilable", "compiled too long"


@dataclass(frozen=True)
class Variant:
    """A kernel, and the types, constants and options that it is compiled for."""

    module: str
    name: str
    specialization_data: str

    def compile(self) -> None:
        """Compile into Triton's cache. Only for a process that does not use the GPU, as this replaces its driver."""
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        driver.set_active(_TargetDriver(GPUTarget(**json.loads(self.specialization_data)["target"])))
        getattr(import_module(self.module), self.name).preload(self.specialization_data)


@dataclass(frozen=True)
class _TargetDriver:
    """The part of Triton's driver that compiling needs."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0


def missing_variants(launches: Iterable[Launch]) -> tuple[Variant, ...]:
    """Return what these launches would compile in this process, without compiling it."""
    from triton import knobs

    found: list[Variant] = []

    def record(**details: Any) -> bool:
        function, data = details["fn"], details["compile"]["specialization_data"]
        found.append(Variant(function.module, function.name, data))
        return True  # do not compile

    previous, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, record
    try:
        for planned in launches:
            planned.kernel.warmup(**planned.arguments, grid=planned.grid)
    finally:
        knobs.runtime.jit_cache_hook = previous
    return tuple(found)


def _compile(variants: tuple[Variant, ...], results: Connection, seconds: float) -> None:
    """Compile, and send whether that succeeded. The process leads a group, so that ptxas is killed with it."""
    os.setsid()
    signal.alarm(int(seconds))
    silent = os.open(os.devnull, os.O_WRONLY)  # the compiler prints whole programs when it fails
    for descriptor in (1, 2):
        os.dup2(silent, descriptor)
    try:
        for variant in variants:
            variant.compile()
    except Exception:
        results.send(False)
    else:
        results.send(True)


class Compiler:
    """Compiles variants in up to `processes` processes. On exit, the context manager kills the running processes."""

    def __init__(
        self, processes: int, *, spare_seconds: float = SPARE_SECONDS, max_seconds: float = MAX_SECONDS
    ) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._threads = ThreadPoolExecutor(processes)  # each waits for one process at a time
        self._spare_seconds, self._max_seconds = spare_seconds, max_seconds
        self._slowest: float | None = None  # seconds of the slowest compilation that succeeded
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._futures: dict[tuple[Variant, ...], Future[str | None]] = {}

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._threads.shutdown(cancel_futures=True)

    def submit(self, variants: tuple[Variant, ...]) -> "Future[str | None]":
        """Begin to compile. The result is None, or why there is no code: FAILED or TOO_LONG.

        The same variants are compiled only once, also if that failed.
        """
        if variants not in self._futures:
            self._futures[variants] = self._threads.submit(self._run, variants)
        return self._futures[variants]

    def _run(self, variants: tuple[Variant, ...]) -> str | None:
        """Compile in a new process, and wait for it."""
        if not variants:
            return None
        results, sender = self._context.Pipe(duplex=False)
        arguments = (variants, sender, self._max_seconds + ORPHAN_SECONDS)
        process = self._context.Process(target=_compile, args=arguments, daemon=True)
        process.start()
        assert process.pid is not None
        sender.close()
        started = time.monotonic()
        try:
            while not results.poll(POLL_SECONDS):
                if self._closed.is_set() or time.monotonic() - started > self._limit():
                    with suppress(ProcessLookupError):  # it has not become the leader of its group yet
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                    return TOO_LONG
            if not results.recv():
                return FAILED
            with self._lock:
                self._slowest = max(self._slowest or 0.0, time.monotonic() - started)
            return None
        except EOFError:  # the compiler crashed
            return FAILED
        finally:
            process.join()
            results.close()

    def _limit(self) -> float:
        with self._lock:
            if self._slowest is None:
                return self._max_seconds
            return min(self._max_seconds, 2 * self._slowest + self._spare_seconds)
