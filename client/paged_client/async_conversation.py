"""Sessions of the asyncio client: conversations whose messages and KV cache the server keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from paged_client.async_retry import RetryingTransport
from paged_client.async_stream import AsyncStream, AsyncTransport
from paged_client.conversation import RETRY_INTERVAL, SESSION_NOT_FOUND, ConversationBase
from paged_client.types import Completion, PagedError
from paged_client.wire import Message, Prompt


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
        self._client = client.with_transport(
            lambda transport: RetryingTransport(transport, lambda error, _: self._should_retry(error), RETRY_INTERVAL)
        )

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
