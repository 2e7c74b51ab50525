"""Runs round trips to the server process concurrently."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

HELPERS = 4  # threads in addition to the calling one
BATCH = 16  # maximum items per thread

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class RoundTrips:
    """A small thread pool for round trips.

    Between two round trips a thread waits for the GIL, which takes longer than the round trip itself while the engine
    computes. Several threads wait at the same time.
    """

    def __init__(self, threads: int = HELPERS, batch: int = BATCH):
        """threads: number of threads besides the calling one. batch: items that the calling thread handles alone."""
        self._batch = batch
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._threads = threads
        for number in range(threads):
            threading.Thread(target=self._run, name=f"round-trips-{number}", daemon=True).start()

    def each(self, ask: Callable[[Item], Answer], items: Sequence[Item]) -> list[tuple[Item, Answer | Exception]]:
        """Call `ask` once for each item, and return what it returned or raised, in no particular order."""
        done: SimpleQueue[list[Any]] = SimpleQueue()
        helpers = min(self._threads, len(items) // (self._batch + 1))
        shares = [list(islice(items, start, None, helpers + 1)) for start in range(helpers + 1)]
        for share in shares[1:]:
            self._jobs.put(lambda share=share: done.put(_ask_all(ask, share)))  # type: ignore[misc]
        answers = _ask_all(ask, shares[0])
        for _ in range(helpers):
            answers += done.get()
        return answers

    def stop(self) -> None:
        """End the threads after the calls in progress."""
        for _ in range(self._threads):
            self._jobs.put(_end)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not _end:
            job()


def _ask_all(ask: Callable[[Item], Answer], items: Sequence[Item]) -> list[tuple[Item, Answer | Exception]]:
    answers: list[tuple[Item, Answer | Exception]] = []
    for item in items:
        try:
            answers.append((item, ask(item)))
        except Exception as error:
            answers.append((item, error))
    return answers


def _end() -> None:
    """Ends a thread; never called."""
