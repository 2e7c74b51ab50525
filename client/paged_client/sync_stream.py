"""The stream of the synchronous client, and the interface of its transports."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from paged_client.stream import Cancellable, StreamBase
from paged_client.types import Delta, PagedError
from paged_client.wire import Fields, Values


class Responses(Cancellable, Protocol):
    def next(self) -> Fields | None:
        """Wait for the next response; None after the last. Raises PagedError."""


class Stream(StreamBase):
    """A streaming request: an iterator of Delta, and a context manager that cancels the request on exit.

    The request is sent when the stream is created. Leaving the `with` block, `cancel()` and dropping the last
    reference cancel it on the server. One thread iterates; any thread may cancel.
    """

    def __init__(self, responses: Responses) -> None:
        super().__init__(responses)
        self._next = responses.next

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        """Return the next delta. Raises PagedError once if the request failed; a cancelled stream just ends."""
        self.peek()
        try:
            return self._deltas.popleft()
        except IndexError:  # the end, or another thread has cancelled the request
            raise StopIteration from None

    def peek(self) -> None:
        """Wait until the next delta or the end has arrived. Raises PagedError as iterating does."""
        while not self._deltas and not self._ended:
            fields = self._receive()
            if fields is not None:
                self._deltas.extend(self._transcript.add(fields))

    def _receive(self) -> Fields | None:
        try:
            fields = self._next()
        except PagedError as error:
            self._end(error)
            return None
        if fields is None:
            self._end()
        return fields

    def close(self) -> None:
        self.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Transport(Protocol):
    """Sends requests to one model of one server over one protocol."""

    must_stream: bool  # whether `generate` has to stream internally, so that it can be cancelled

    def open(self, values: Values, request_id: str, timeout: float | None) -> Responses: ...

    def close(self) -> None: ...
