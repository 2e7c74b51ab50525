"""Empty first responses for streams that wait long for their first token.

Triton notices that an HTTP client has disconnected only when it sends to it, so a waiting stream gets one response
without text.
"""

from __future__ import annotations

from collections import deque

from paged_backend.server.open_streams import OpenStreams
from paged_backend.server.streams.stream import Stream


class FirstResponses:
    """Streaming requests that have not been sent a response yet, in order of arrival."""

    def __init__(self, streams: OpenStreams, seconds: float | None):
        """seconds: time from the arrival of a stream to its empty response; None: never."""
        self._streams = streams
        self._seconds = seconds
        self._waiting: deque[Stream] = deque()

    def add(self, stream: Stream) -> None:
        if stream.call.stream and self._seconds is not None:
            self._waiting.append(stream)

    def send_due(self, now: float) -> None:
        """Send an empty response on each stream that has waited this long."""
        while self._waiting:
            stream = self._waiting[0]
            needs_response = not stream.sent and self._streams.is_open(stream)
            if needs_response and now < stream.arrived + (self._seconds or 0.0):
                return
            self._waiting.popleft()
            if needs_response:
                self._streams.guarded(stream, lambda stream: self._streams.send(stream, even_if_empty=True))
