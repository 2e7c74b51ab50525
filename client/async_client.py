"""The asyncio client: the same methods, requests and errors as the synchronous one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from client.async_conversation import AsyncConversation
from client.stream import Cancellable, StreamBase
from client.sync_client import DEFAULT_URLS
from client.types import Adapter, Completion, Delta, Embedding, PagedError, PoolMap
from client.wire import (
    ADAPTERS_REQUEST,
    POOL_MAP_REQUEST,
    STOP_REQUEST,
    Fields,
    Message,
    Prompt,
    Values,
    check_request_id,
    check_timeout,
    embedding_values,
    may_stream,
    read_adapters,
    read_embedding,
    read_num_stopped,
    read_pool_map,
    request_values,
)


class AsyncResponses(Cancellable, Protocol):
    async def next(self) -> Fields | None:
        """Wait for the next response; None after the last. Raises PagedError."""


class AsyncStream(StreamBase):
    """One streaming request: an asynchronous iterator of Delta, and a context manager that cancels.

    The request is sent when the iteration starts. Leaving the `async with` block, `cancel()`, cancelling the
    task that iterates and dropping the last reference (a `break` out of `async for`) end it on the server.
    """

    def __init__(self, responses: AsyncResponses) -> None:
        super().__init__(responses)
        self._next = responses.next

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        """Raises PagedError, once, where the request failed; a cancelled stream just ends."""
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
            if self.completion is None:  # the task was cancelled; else it is how cancel() wakes the reader
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
    """One protocol's way to one model of one server. Connects when first used, in that event loop."""

    must_stream: bool  # even where the whole answer is wanted at once

    def open(self, values: Values, request_id: str, timeout: float | None) -> AsyncResponses: ...

    async def close(self) -> None: ...


def _transport(url: str, model: str, protocol: str) -> AsyncTransport:
    # Imported on use: either takes longer to load than all the rest.
    if protocol == "grpc":
        from client.async_grpc import GrpcTransport

        return GrpcTransport(url, model)
    from client.async_http import HttpTransport

    return HttpTransport(url, model)


class AsyncClient:
    """A client of one served model, for one event loop and any number of concurrent requests.

    Args:
        url, model, protocol: as for Client.
    """

    def __init__(self, url: str | None = None, model: str = "paged_llm", protocol: str = "grpc") -> None:
        if protocol not in DEFAULT_URLS:
            raise ValueError(f"protocol={protocol!r}: must be one of {', '.join(DEFAULT_URLS)}")
        self._transport = _transport(url or DEFAULT_URLS[protocol], model, protocol)

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> Completion:
        """The whole answer; see Client.generate."""
        values = request_values(prompt, messages, sampling, stream=self._transport.must_stream and may_stream(sampling))
        async with self._open(values, request_id, timeout) as stream:
            async for _ in stream:
                pass
            completion = stream.completion
            assert completion is not None  # a stream that failed has raised
            return completion

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> AsyncStream:
        """A request whose answer arrives piece by piece; see Client.stream. Sent when iterated."""
        return self._open(request_values(prompt, messages, sampling, stream=True), request_id, timeout)

    def conversation(self, **sampling: object) -> AsyncConversation:
        """A session of its own on the server; see Client.conversation."""
        return AsyncConversation(self, sampling)

    async def pool_map(self, *, timeout: float | None = None) -> PoolMap:
        """See Client.pool_map."""
        return read_pool_map(await self._ask(POOL_MAP_REQUEST, "", timeout))

    async def cancel(self, request_id: str, *, timeout: float | None = None) -> int:
        """See Client.cancel."""
        return read_num_stopped(await self._ask(STOP_REQUEST, check_request_id(request_id), timeout))

    async def adapters(self, *, timeout: float | None = None) -> tuple[Adapter, ...]:
        """See Client.adapters."""
        return read_adapters(await self._ask(ADAPTERS_REQUEST, "", timeout))

    async def embed(
        self,
        input: str | Sequence[int],
        *,
        dimensions: int | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> Embedding:
        """See Client.embed."""
        return read_embedding(await self._ask(embedding_values(input, dimensions, sampling), request_id, timeout))

    async def _ask(self, values: Values, request_id: str, timeout: float | None) -> Fields | None:
        responses = self._transport.open(values, request_id, check_timeout(timeout))
        try:
            answer = await responses.next()
            with suppress(PagedError):
                await responses.next()
        finally:
            responses.cancel()
        return answer

    def _open(self, values: Values, request_id: str, timeout: float | None) -> AsyncStream:
        return AsyncStream(self._transport.open(values, request_id, check_timeout(timeout)))

    async def close(self) -> None:
        """Let go of the connection. Streams that are still open end."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
