"""Sessions of the asyncio client: conversations whose messages and KV cache the server keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from paged_client.async_stream import AsyncResponses, AsyncStream, AsyncTransport
from paged_client.conversation import RETRY_INTERVAL, SESSION_NOT_FOUND, ConversationBase
from paged_client.types import Completion, PagedError
from paged_client.wire import Fields, Message, Prompt, Values


class AsyncGenerator(Protocol):
    """The methods of AsyncClient that a session uses."""

    async def generate(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Completion: ...

    def stream(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> AsyncStream: ...

    def with_transport(self, wrap: Callable[[AsyncTransport], AsyncTransport]) -> AsyncGenerator: ...


class AsyncConversation(ConversationBase):
    """A session, like `Conversation`: an asynchronous context manager that ends the session on exit."""

    def __init__(self, client: AsyncGenerator, sampling: Mapping[str, Any]) -> None:
        super().__init__(sampling)
        self._client = client.with_transport(lambda transport: _RetryingTransport(transport, self._should_retry))

    async def generate(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Completion:
        """Run the next turn and return its completion. Arguments and errors as for `AsyncClient.generate`."""
        turn = self._next_turn(sampling)
        with self._track_turn():
            return await self._client.generate(prompt, messages=messages, **turn)

    def stream(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> AsyncStream:
        """Run the next turn as a stream. Arguments and errors as for `AsyncClient.stream`."""
        self._last = stream = self._client.stream(prompt, messages=messages, **self._next_turn(sampling))
        return stream

    async def close(self) -> None:
        """End the session on the server."""
        end = self._end_parameters()
        if end:
            try:
                await self._client.generate("", **end)
            except PagedError as error:
                if SESSION_NOT_FOUND not in error.message:  # an expired session does not have to be ended
                    raise

    async def __aenter__(self) -> AsyncConversation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        with suppress(PagedError):  # the exception that is propagating is more informative
            await self.close()


class _RetryingTransport:
    """A transport that sends a request again if `should_retry` returns true for its error."""

    def __init__(self, transport: AsyncTransport, should_retry: Callable[[PagedError], bool]) -> None:
        self.must_stream = transport.must_stream
        self.close = transport.close
        self._transport = transport
        self._should_retry = should_retry

    def open(self, values: Values, request_id: str, timeout: float | None) -> AsyncResponses:
        return _RetryingResponses(lambda: self._transport.open(values, request_id, timeout), self._should_retry)


class _RetryingResponses:
    def __init__(self, send: Callable[[], AsyncResponses], should_retry: Callable[[PagedError], bool]) -> None:
        self._send = send
        self._should_retry = should_retry
        self._responses = send()
        self._cancelled = False

    async def next(self) -> Fields | None:
        while not self._cancelled:
            try:
                return await self._responses.next()
            except PagedError as error:
                if not self._should_retry(error):
                    raise
            await asyncio.sleep(RETRY_INTERVAL)
            if not self._cancelled:
                self._responses.cancel()
                self._responses = self._send()
        return None

    def cancel(self) -> None:
        self._cancelled = True
        self._responses.cancel()
