"""When kernels are compiled: ahead of their first launch, and, by mistake, while the model serves requests.

Triton compiles a kernel when it is first launched, one after the other. `compile_ahead` compiles what a function
launches in threads, while a model loads. `Compiler` compiles in processes of their own, for the tuner: a process that
takes much longer than the others is killed, since some kernels keep the compiler busy for hours. What is in Triton's
cache on disk is only loaded. `after_ready` counts what was not compiled ahead. Imports no triton before it is used.
"""

import json
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from paged_kernels.launch import Launch, intercept_launches

log = logging.getLogger("paged_llm.kernels")

# --- in threads -------------------------------------------------------------------------------------------------------

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
        device: the device that `run` computes on.
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


# --- in processes -----------------------------------------------------------------------------------------------------

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
    specialization_data: str  # Triton's description of all of these as JSON, in which tuples have no names
    signature: dict[str, Any] = field(compare=False)
    constants: dict[Any, Any] = field(compare=False)
    attributes: dict[Any, Any] = field(compare=False)
    target: dict[str, Any] = field(compare=False)  # fields of Triton's GPUTarget

    def compile(self) -> None:
        """Compile into Triton's cache on disk, for a GPU that the process need not have."""
        import triton
        from triton.backends.compiler import GPUTarget

        data = json.loads(self.specialization_data)
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in data["options"].items()}
        kernel = getattr(import_module(self.module), self.name)
        source = source_of(kernel)(kernel, self.signature, self.constants, self.attributes)
        triton.compile(source, target=GPUTarget(**self.target), options=options)


def source_of(kernel: Any) -> Any:
    """Return the class of the kernel's source for the compiler."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    else:
        from triton.compiler import ASTSource
    return ASTSource


def missing_variants(launches: Iterable[Launch]) -> tuple[Variant, ...]:
    """Return what these launches would compile in this process, without compiling it."""
    from triton import knobs
    from triton.runtime import driver

    found: list[Variant] = []
    target = vars(driver.active.get_current_target())

    def record(**details: Any) -> bool:
        function, made = details["fn"], details["compile"]
        described = made["specialization_data"], made["signature"], made["constants"], made["configs"][0]
        found.append(Variant(function.module, function.name, *described, target))
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


# --- while serving ----------------------------------------------------------------------------------------------------


class Compilations:
    """The number of kernels that were compiled, or loaded from Triton's cache, since `watch` was called.

    Each of them delays a step, and all requests in it. The warm-up should therefore compile every kernel of a step.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: Callable[..., bool | None] | None = None  # another hook, which is still called
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Start to count, and to log the names. Called when the model is ready, once per process or more often."""
        from triton import knobs

        previous = knobs.runtime.jit_post_compile_hook
        if getattr(previous, "__self__", None) is not self:
            self._previous = previous
            knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, **details: Any) -> bool | None:
        """Count a kernel: Triton calls this after it has compiled one."""
        with self._lock:
            self.count += 1
        log.warning("a kernel was compiled after the model was ready, which delayed a step: %s", details["repr"])
        return self._previous(**details) if self._previous else None


after_ready = Compilations()
