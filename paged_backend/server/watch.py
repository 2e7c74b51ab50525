"""Notices whose clients have gone: asks all that is open in turn, beside the thread that answers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from paged_backend.server.channel import Channel
from paged_backend.server.round_trips import RoundTrips

log = logging.getLogger("paged_llm")

SECONDS = 0.05  # between two rounds
BATCH = 48  # asked in a round, of those that hold blocks and of those that wait for some


class Pollable(Protocol):
    @property
    def channel(self) -> Channel: ...

    @property
    def entered(self) -> float | None:
        """When it got its first blocks; None: it waits for some, or nobody here knows."""


One = TypeVar("One", bound=Pollable)


@dataclass(frozen=True)
class PollResult(Generic[One]):
    """Of those that were asked."""

    gone: list[One] = field(default_factory=list)  # whose clients have left, or called them off
    stopped: list[One] = field(default_factory=list)  # that are to end with what they have
    failed: list[tuple[One, Exception]] = field(default_factory=list)  # that could not be asked

    def __bool__(self) -> bool:
        return bool(self.gone or self.stopped or self.failed)


class CancellationPoller(Generic[One]):
    """`tell` gets what was found, on the watch's thread. Where one has gone the next are asked at once: others of the
    same client may have."""

    def __init__(
        self, is_open: Callable[[One], bool], round_trips: RoundTrips, tell: Callable[[PollResult[One]], None]
    ) -> None:
        self._is_open, self._round_trips, self._tell = is_open, round_trips, tell
        self._waiting: deque[One] = deque()  # and some that have entered, or ended
        self._running: deque[One] = deque()  # and some that have ended
        self._some = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Once those that are being asked have answered."""
        self._stopping.set()
        self._some.set()
        self._thread.join()

    def add(self, one: One) -> None:
        self._waiting.append(one)
        self._some.set()

    def enter(self, one: One) -> None:
        """It has its first blocks. They are the fewer, and asked the more often."""
        self._running.append(one)
        self._some.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._some.clear()
            if not (self._waiting or self._running or self._stopping.is_set()):
                self._some.wait()
            began, found = time.monotonic(), PollResult[One]()
            try:
                found = self._ask()
                if found:
                    self._tell(found)
            except Exception:  # nobody else would notice who has gone
                log.exception("a round of asking after clients went wrong")
            if not found.gone and (self._waiting or self._running):
                took = time.monotonic() - began
                self._stopping.wait(max(SECONDS - took, took))

    def _ask(self) -> PollResult[One]:
        found: PollResult[One] = PollResult()
        asked = self._next(self._running) + self._next(self._waiting)
        for (turn, one), answer in self._round_trips.each(_is_cancelled, asked):
            if isinstance(answer, Exception):
                found.failed.append((one, answer))
            elif answer:
                found.gone.append(one)
            else:
                turn.append(one)
                if one.channel.stopped:
                    found.stopped.append(one)
        return found

    def _next(self, turn: deque[One]) -> list[tuple[deque[One], One]]:
        found: list[tuple[deque[One], One]] = []
        for _ in range(len(turn)):
            one = turn.popleft()
            entered = one.entered is not None
            if self._is_open(one) and entered == (turn is self._running):
                found.append((turn, one))
            if len(found) == BATCH:
                break
        return found


def _is_cancelled(asked: tuple[deque[One], One]) -> bool:
    _, one = asked
    return one.channel.is_cancelled()
