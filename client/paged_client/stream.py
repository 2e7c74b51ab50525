"""The base class of the synchronous and the asyncio stream: tracks how a request ends."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from paged_client.types import Completion, Delta, PagedError
from paged_client.wire import Transcript


class Cancellable(Protocol):
    """The open responses of a request."""

    def cancel(self) -> None:
        """Cancel the request and wake a reader that waits for the next response. May be called repeatedly."""


class StreamBase:
    """A request that is open until it is complete, cancelled by the caller, or failed."""

    def __init__(self, responses: Cancellable) -> None:
        self._responses = responses
        self._transcript = Transcript()
        self._deltas: deque[Delta] = deque()  # received, not yet returned to the caller
        self._ended = False
        self._failed = False

    def _end(self, error: PagedError | None = None) -> None:
        """Record the end of the responses. Raises `error`, or PagedError, if the output is incomplete."""
        if not self._ended and not self._transcript.complete:
            self._ended = self._failed = True
            # Only the last delta has a finish reason: without one, output is missing.
            raise error or PagedError("UNAVAILABLE", "the stream ended before the output was complete")
        self._ended = True  # an error after the last delta, or after cancel(), changes nothing

    def cancel(self) -> None:
        """Cancel the request and keep the output so far in `completion`. Does nothing once the stream has ended."""
        if not self._ended:
            self._ended = True
            self._deltas.clear()
            self._responses.cancel()

    @property
    def completion(self) -> Completion | None:
        """The whole output once the stream has ended or was cancelled; None before that, and if it failed."""
        return self._transcript.completion() if self._ended and not self._failed else None

    def __del__(self) -> None:
        self.cancel()
