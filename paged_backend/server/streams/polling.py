"""Polls for client cancellation: a thread that asks the server about one open request after the other.

Triton's Python backend does not notify a model of a cancelled request; asking is a round trip to the server process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from paged_backend.server.wire.channel import Channel

log = logging.getLogger("paged_llm")

SECONDS = 0.05  # pause between two rounds
BATCH = 48  # requests per round from each of the two queues
HELPERS = 4  # threads for round trips, in addition to the calling one
SHARE = 16  # maximum round trips that the calling thread makes alone

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Pollable(Protocol):
    """An open request."""

    @property
    def channel(self) -> Channel: ...

    @property
    def scheduled_at(self) -> float | None:
        """The time when it was first part of a step; None while it waits, or if the time is not known."""


Request = TypeVar("Request", bound=Pollable)


@dataclass(frozen=True)
class PollResult(Generic[Request]):
    """The result of one round."""

    cancelled: list[Request] = field(default_factory=list)  # clients that disconnected or cancelled
    stopped: list[Request] = field(default_factory=list)  # requests to end with the output so far
    failed: list[tuple[Request, Exception]] = field(default_factory=list)  # requests that could not be polled

    def __bool__(self) -> bool:
        return bool(self.cancelled or self.stopped or self.failed)


class CancellationPoller(Generic[Request]):
    """Polls running and waiting requests from separate queues, so that requests that hold blocks are polled more often.

    After a round that found a cancelled request the next round follows at once: its client may have cancelled more.
    """

    def __init__(self, is_open: Callable[[Request], bool], report: Callable[[PollResult[Request]], None]):
        """report: called on the poller's thread with each result that is not empty."""
        self.round_trips = RoundTrips()
        self._is_open = is_open
        self._report = report
        self._waiting: deque[Request] = deque()  # waiting requests, and some that run or have ended by now
        self._running: deque[Request] = deque()  # running requests, and some that have ended by now
        self._added = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancellation-poller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current round."""
        self._stopping.set()
        self._added.set()
        self._thread.join()
        self.round_trips.stop()

    def add(self, request: Request) -> None:
        """Poll a waiting request from now on."""
        self._waiting.append(request)
        self._added.set()

    def mark_running(self, request: Request) -> None:
        """Move a request to the queue of running ones; `scheduled_at` is set."""
        self._running.append(request)
        self._added.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._added.clear()
            if not (self._waiting or self._running or self._stopping.is_set()):
                self._added.wait()
            began, result = time.monotonic(), PollResult[Request]()
            try:
                result = self._poll()
                if result:
                    self._report(result)
            except Exception:  # without this thread no cancellation would be detected
                log.exception("polling for cancellation failed")
            if not result.cancelled and (self._waiting or self._running):
                taken = time.monotonic() - began
                self._stopping.wait(max(SECONDS - taken, taken))

    def _poll(self) -> PollResult[Request]:
        result: PollResult[Request] = PollResult()
        batch = self._next(self._running) + self._next(self._waiting)
        for (queue, request), answer in self.round_trips.each(_is_cancelled, batch):
            if isinstance(answer, Exception):
                result.failed.append((request, answer))
            elif answer:
                result.cancelled.append(request)
            else:
                queue.append(request)
                if request.channel.stopped:
                    result.stopped.append(request)
        return result

    def _next(self, queue: deque[Request]) -> list[tuple[deque[Request], Request]]:
        """Take the next batch from a queue, dropping requests that have ended or moved to the other queue."""
        batch: list[tuple[deque[Request], Request]] = []
        for _ in range(len(queue)):
            request = queue.popleft()
            is_running = request.scheduled_at is not None
            if self._is_open(request) and is_running == (queue is self._running):
                batch.append((queue, request))
            if len(batch) == BATCH:
                break
        return batch


def _is_cancelled(item: tuple[deque[Request], Request]) -> bool:
    _, request = item
    return request.channel.is_cancelled()


class RoundTrips:
    """A small thread pool for round trips.

    Between two round trips a thread waits for the GIL, which takes longer than the round trip itself while the engine
    computes. Several threads wait at the same time.
    """

    def __init__(self, threads: int = HELPERS, batch: int = SHARE):
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
