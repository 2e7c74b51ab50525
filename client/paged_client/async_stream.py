"""The stream of the asyncio client, and the interface of its transports."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol

from paged_client.stream import Cancellable, StreamBase
from paged_client.types import Delta, PagedError
from paged_client.wire import Fields, Values


class AsyncResponses(Cancellable, Protocol):
    async def next(self) -> Fields | None:
        """Wait for the next response; None after the last. Raises PagedError."""


class AsyncStream(StreamBase):
    """A streaming request: an asynchronous iterator of Delta, and a context manager that cancels the request on exit.

    The request is sent when the iteration starts. Leaving the `async with` block, `cancel()`, cancelling the
    task that iterates and dropping the last reference (a `break` out of `async for`) cancel it on the server.
    """

    def __init__(self, responses: AsyncResponses) -> None:
        super().__init__(responses)
        self._next = responses.next

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        """Return the next delta. Raises PagedError once if the request failed; a cancelled stream just ends."""
        while not self._deltas:
            fields = None if self._ended else await self._receive()
            if fields is None:
                raise StopAsyncIteration
            self._deltas.extend(self._transcript.add(fields))
        return self._deltas.popleft()

    async def _receive(self) -> Fields | None:
        try:
            fields = await self._next()
        except PagedError as error:
            self._end(error)
            return None
        except asyncio.CancelledError:
            if self.completion is None:  # the task was cancelled; otherwise cancel() has woken the reader
                self.cancel()
                raise
            return None
        if fields is None:
            self._end()
        return fields

    async def aclose(self) -> None:
        self.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncTransport(Protocol):
    """Sends requests to one model of one server over one protocol. Connects on first use, in that event loop."""

    must_stream: bool  # whether `generate` has to stream internally, so that it can be cancelled

    def open(self, values: Values, request_id: str, timeout: float | None) -> AsyncResponses: ...

    async def close(self) -> None: ...
