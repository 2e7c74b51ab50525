"""A conversation that the server remembers, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Any

from client.conversation import RETRY_INTERVAL, SESSION_NOT_FOUND, ConversationBase
from client.types import Completion, PagedError
from client.wire import Fields, Message, Prompt, Values

if TYPE_CHECKING:
    from client.async_client import AsyncClient, AsyncResponses, AsyncStream, AsyncTransport


class AsyncConversation(ConversationBase):
    """A session, as `Conversation`: an asynchronous context manager that ends it."""

    def __init__(self, client: AsyncClient, sampling: Mapping[str, Any]) -> None:
        super().__init__(sampling)
        self._client = copy(client)
        self._client._transport = _Patient(client._transport, self._should_retry)

    async def generate(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Completion:
        """The whole answer to the next turn. Arguments and errors are those of `AsyncClient.generate`."""
        turn = self._turn(sampling)
        with self._track_turn():
            return await self._client.generate(prompt, messages=messages, **turn)

    def stream(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> AsyncStream:
        """The next turn, piece by piece. Arguments and errors are those of `AsyncClient.stream`."""
        self._last = stream = self._client.stream(prompt, messages=messages, **self._turn(sampling))
        return stream

    async def close(self) -> None:
        """Let the server forget it."""
        end = self._end()
        if end:
            try:
                await self._client.generate("", **end)
            except PagedError as error:
                if SESSION_NOT_FOUND not in error.message:  # it has expired
                    raise

    async def __aenter__(self) -> AsyncConversation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        with suppress(PagedError):  # the error that is under way says more
            await self.close()


class _Patient:
    """A transport that asks again where `again` says so of the error that came first."""

    def __init__(self, transport: AsyncTransport, again: Callable[[PagedError], bool]) -> None:
        self.must_stream = transport.must_stream
        self.close = transport.close
        self._transport = transport
        self._should_retry = again

    def open(self, values: Values, request_id: str, timeout: float | None) -> AsyncResponses:
        return _PatientResponses(lambda: self._transport.open(values, request_id, timeout), self._should_retry)


class _PatientResponses:
    def __init__(self, ask: Callable[[], AsyncResponses], again: Callable[[PagedError], bool]) -> None:
        self._ask = ask
        self._should_retry = again
        self._responses = ask()
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
                self._responses = self._ask()
        return None

    def cancel(self) -> None:
        self._cancelled = True
        self._responses.cancel()
