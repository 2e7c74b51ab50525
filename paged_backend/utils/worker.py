"""Calls on other threads: one after the other in the background, or with a time limit."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

log = logging.getLogger("paged_llm")

Result = TypeVar("Result")


class CallTimeout(Exception):
    """A call took too long; the message has the limit."""


class BackgroundWorker:
    """Runs calls in order on a daemon thread, which, unlike the threads of an executor, does not keep the process alive
    while a call hangs."""

    def __init__(self, name: str, begin: Callable[[], object] = lambda: None):
        """begin: called once, when the thread starts."""
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, args=[begin], name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., object], *arguments: Any) -> None:
        """Queue a call. An exception in it is logged."""
        self._calls.put(functools.partial(call, *arguments))

    def stop(self, seconds: float) -> None:
        """Drop queued calls and wait at most `seconds` for the current one."""
        self._stopped = True
        self._calls.put(None)
        self._thread.join(max(0.0, seconds))

    def _run(self, begin: Callable[[], object]) -> None:
        begin()
        while (call := self._calls.get()) is not None and not self._stopped:
            try:
                call()
            except Exception:
                log.exception("%s: a call failed", self._thread.name)
            del call  # its arguments may be large, and the next one may be long in coming


def call_with_timeout(call: Callable[[], Result], seconds: float, name: str) -> Result:
    """Return the result of a call, or raise its exception. Raises CallTimeout if it takes longer; the call then goes on
    in a thread that is abandoned. name: name of the thread."""
    answer: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

    def run() -> None:
        try:
            answer.put((True, call()))
        except Exception as error:
            answer.put((False, error))

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        succeeded, result = answer.get(timeout=seconds)
    except Empty:
        raise CallTimeout(f"takes more than {seconds:g} s") from None
    if not succeeded:
        raise result
    return cast(Result, result)
