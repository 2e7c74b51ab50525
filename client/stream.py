"""What the synchronous and the asyncio stream have in common: how one request ends."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from client.types import Completion, Delta, PagedError
from client.wire import Transcript


class Cancellable(Protocol):
    def cancel(self) -> None:
        """End the request, any number of times; wakes whoever waits for its next response."""


class StreamBase:
    """Open, until it ends in one of three ways: complete, cancelled by the caller, or failed."""

    def __init__(self, responses: Cancellable) -> None:
        self._responses = responses
        self._transcript = Transcript()
        self._deltas: deque[Delta] = deque()  # received, not yet handed on
        self._ended = False
        self._failed = False

    def _end(self, error: PagedError | None = None) -> None:
        """The responses ended, by themselves or with an error. Raises it where the caller must know."""
        if not self._ended and not self._transcript.complete:
            self._ended = self._failed = True
            # Only the last piece has a reason: without one, part of the answer is missing.
            raise error or PagedError("UNAVAILABLE", "the stream ended before the answer was complete")
        self._ended = True  # an error after the last piece, or after cancel(), takes nothing away

    def cancel(self) -> None:
        """End the request now; what came so far is in `completion`. Does nothing once the stream ended."""
        if not self._ended:
            self._ended = True
            self._deltas.clear()
            self._responses.cancel()

    @property
    def completion(self) -> Completion | None:
        """The answer as a whole once the stream ended or was cancelled; None before, and if it failed."""
        return self._transcript.completion() if self._ended and not self._failed else None

    def __del__(self) -> None:
        self.cancel()
