"""Round trips to the server process, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

HELPERS = 4  # threads beside those that have something to ask or to answer
HELPED = 16  # items that each goes through by itself

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class RoundTrips:
    """Threads that wait beside the one that asks. Between a round trip's end and the next one's begin a thread waits
    for its turn with the interpreter, which is longer than the round trip itself while the engine computes: several
    wait at the same time."""

    def __init__(self, threads: int = HELPERS, batch: int = HELPED):
        """batch: items that whoever asks goes through by itself; from there on others help."""
        self._batch = batch
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._threads = threads
        for number in range(threads):
            threading.Thread(target=self._run, name=f"round-trips-{number}", daemon=True).start()

    def each(self, ask: Callable[[Item], Answer], items: Sequence[Item]) -> list[tuple[Item, Answer | Exception]]:
        """What `ask` says of each, or raises, in no order. Returns when all have been asked: an item is one thread's
        at a time."""
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
        """Once all that was asked is answered."""
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
    """In the place of a job."""
