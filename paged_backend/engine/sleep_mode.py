"""Sleep mode: releases the memory of a model that serves no requests, so that another model can use it.

`paged sleep` and `paged wake` call `SleepMode` on a thread of the local socket. The engine's thread releases and
restores the memory, between two steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from paged_backend.api.errors import ASLEEP, ErrorCode, ModelAsleep, RequestError
from paged_backend.api.sizes import GIB
from paged_backend.engine.core import Commit, EngineCore
from paged_backend.engine.model_memory import MemoryShortage, ReleasedMemory

log = logging.getLogger("paged_llm")

GOING_TO_SLEEP = "the model is about to sleep; wake it with `paged wake`"
WAKING = "the model is being woken by `paged wake`; send the request again later"
DRAIN_POLL_SECONDS = 0.05  # time between two checks whether requests are open
REPLY_POLL_SECONDS = 1.0  # time between two checks whether the engine lives

T = TypeVar("T")


@dataclass(frozen=True)
class Transition:
    """What `sleep` or `wake` did."""

    changed: bool  # False: the model was asleep, or awake, already
    memory: ReleasedMemory  # memory of rank 0; zeros if nothing changed
    seconds: float  # without the time for open requests to end


NOTHING = Transition(False, ReleasedMemory(0, 0, 0), 0.0)


class SleepMode:
    """Puts an engine to sleep and wakes it. The methods may be called from any thread."""

    def __init__(self, core: EngineCore, is_alive: Callable[[], bool]):
        """is_alive: returns whether the engine still runs steps."""
        self._core = core
        self._is_alive = is_alive
        self._busy = threading.Lock()
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """Why no request is admitted; None if the model is awake."""
        return self._problem

    def check(self) -> None:
        """Raise ModelAsleep unless the model is awake."""
        if self._problem:
            raise ModelAsleep(self._problem)

    def sleep(self, timeout: float, report: Callable[[int], None] = lambda open_requests: None) -> Transition:
        """Reject new requests, wait for open ones to end, and release the memory.

        timeout: seconds to wait. report: called from time to time with the number of open requests; an error that it
        raises ends the wait. Raises RequestError, with nothing changed, if requests are still open after the timeout,
        if the host cannot hold the weights, or if another call is in progress.
        """
        with self._only_call():
            if self._problem:
                return NOTHING
            self._problem = GOING_TO_SLEEP
            try:
                memory, seconds = self._drain_and_release(timeout, report)
            except BaseException:
                self._problem = None
                raise
            self._problem = ASLEEP
            log.info("the model is asleep: freed %.2f GiB in %.2f s", memory.total / GIB, seconds)
            return Transition(True, memory, seconds)

    def wake(self) -> Transition:
        """Restore the memory and admit requests again. Raises RequestError, and the model stays asleep, if the memory
        does not fit."""
        with self._only_call():
            if self._problem is None:
                return NOTHING
            self._problem = WAKING
            began = time.monotonic()
            try:
                memory = self._ask(self._core.wake)
            except BaseException:
                self._problem = ASLEEP
                raise
            self._problem, seconds = None, time.monotonic() - began
            log.info("the model is awake: restored %.2f GiB in %.2f s", memory.total / GIB, seconds)
            return Transition(True, memory, seconds)

    def _drain_and_release(self, timeout: float, report: Callable[[int], None]) -> tuple[ReleasedMemory, float]:
        deadline = time.monotonic() + timeout
        while True:
            began = time.monotonic()
            reply = self._ask(self._core.sleep)
            if isinstance(reply, ReleasedMemory):
                return reply, time.monotonic() - began
            if began >= deadline:
                reason = f"requests are still open after {timeout:g} s: {reply}; nothing was changed"
                raise RequestError(ErrorCode.DEADLINE_EXCEEDED, reason)
            report(reply)
            time.sleep(min(DRAIN_POLL_SECONDS, deadline - began))

    def _ask(self, change: Callable[[], T]) -> T:
        """Return the result of a change on the engine's thread. Raises RequestError without enough memory, or if the
        engine has stopped. Any other error of the change ends the engine."""
        replies: SimpleQueue[T | RequestError] = SimpleQueue()

        def apply() -> bool:
            try:
                replies.put(change())
            except MemoryShortage as error:
                replies.put(RequestError(ErrorCode.UNAVAILABLE, str(error)))
            return True

        self._core.post(apply, commit=Commit.IF_IDLE)
        while True:
            try:
                reply = replies.get(timeout=REPLY_POLL_SECONDS)
            except Empty:
                if self._is_alive():
                    continue
                raise RequestError(ErrorCode.UNAVAILABLE, "the engine has stopped; reload the model") from None
            if isinstance(reply, RequestError):
                raise reply
            return reply

    @contextmanager
    def _only_call(self) -> Iterator[None]:
        """Raise RequestError if another call is in progress."""
        if not self._busy.acquire(blocking=False):
            reason = "another `paged sleep` or `paged wake` is in progress; try again when it has ended"
            raise RequestError(ErrorCode.UNAVAILABLE, reason)
        try:
            yield
        finally:
            self._busy.release()
