"""Notices whose clients have gone: asks every open stream in turn, beside the thread that answers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from paged_backend.frontend.round_trips import RoundTrips
from paged_backend.frontend.stream import Stream

SECONDS = 0.05  # between two rounds
BATCH = 48  # asked in a round, of those that hold blocks and of those that wait for some


_Turn = deque[Stream]


class Found(NamedTuple):
    """Of the streams that were asked."""

    gone: list[Stream]  # whose clients have left, or called them off
    stopped: list[Stream]  # that are to end with what they have
    failed: list[tuple[Stream, Exception]]  # that could not be asked


class Watch:
    """`tell` gets what was found, on the watch's thread; `streams` are those that are open, by key. Where one has gone
    the next are asked at once: others of the same client may have."""

    def __init__(self, streams: Mapping[int, Stream], round_trips: RoundTrips, tell: Callable[[Found], None]):
        self._streams, self._round_trips, self._tell = streams, round_trips, tell
        self._waiting: _Turn = deque()  # and some that have entered, or ended
        self._running: _Turn = deque()  # and some that have ended
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

    def add(self, stream: Stream) -> None:
        self._waiting.append(stream)
        self._some.set()

    def enter(self, stream: Stream) -> None:
        """It has its first blocks. They are the fewer, and asked the more often."""
        self._running.append(stream)
        self._some.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._some.clear()
            if not (self._waiting or self._running or self._stopping.is_set()):
                self._some.wait()
            began = time.monotonic()
            found = self._ask()
            if any(found):
                self._tell(found)
            if not found.gone and (self._waiting or self._running):
                took = time.monotonic() - began
                self._stopping.wait(max(SECONDS - took, took))

    def _ask(self) -> Found:
        found = Found([], [], [])
        asked = self._next(self._running) + self._next(self._waiting)
        for (turn, stream), answer in self._round_trips.each(_is_cancelled, asked):
            if isinstance(answer, Exception):
                found.failed.append((stream, answer))
            elif answer:
                found.gone.append(stream)
            else:
                turn.append(stream)
                if stream.channel.stopped:
                    found.stopped.append(stream)
        return found

    def _next(self, turn: _Turn) -> list[tuple[_Turn, Stream]]:
        found: list[tuple[_Turn, Stream]] = []
        for _ in range(len(turn)):
            stream = turn.popleft()
            entered = stream.entered is not None
            if stream.request.key in self._streams and entered == (turn is self._running):
                found.append((turn, stream))
            if len(found) == BATCH:
                break
        return found


def _is_cancelled(asked: tuple[_Turn, Stream]) -> bool:
    _, stream = asked
    return stream.channel.is_cancelled()
