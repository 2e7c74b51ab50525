"""Calls made one after the other, on a thread beside those that must not wait."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

log = logging.getLogger("paged_llm")


class BackgroundWorker:
    """What hangs on it is left to the end of the process, and does not keep that: an executor's threads would."""

    def __init__(self, name: str, begin: Callable[[], object] = lambda: None):
        """begin: called on the thread, before anything else."""
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, args=[begin], name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., object], *arguments: Any) -> None:
        self._calls.put(functools.partial(call, *arguments))

    def stop(self, seconds: float) -> None:
        """Drop what has not begun, and wait for what has, so many seconds at the most."""
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
