"""The engine's answers to one HTTP request, which may hold several prompts: each is a request of its own, and all are
asked at once. Their samples are numbered one prompt after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from client.openai.concurrency import cancel_and_wait, gather_or_cancel
from client.openai.errors import ApiError, from_engine
from client.openai.servers import Servers, ServerStream
from client.openai.translation import EngineRequest
from client.types import Completion, Delta, PagedError


async def ask(servers: Servers, requests: Sequence[EngineRequest], request_id: str) -> list[Completion]:
    """The whole answers. Raises ApiError where one fails, which cancels the others."""
    return await gather_or_cancel(_one(servers, request, name) for request, name in _named(requests, request_id))


async def _one(servers: Servers, request: EngineRequest, name: str) -> Completion:
    try:
        return await servers.generate(request_id=name, **request.arguments)
    except (PagedError, ValueError) as error:
        raise _refusal(error, request) from None


def _named(requests: Sequence[EngineRequest], request_id: str) -> list[tuple[EngineRequest, str]]:
    """Each with an id for the server."""
    if len(requests) == 1:
        return [(requests[0], request_id)]
    return [(request, f"{request_id}-{index}") for index, request in enumerate(requests)]


def _refusal(error: PagedError | ValueError, request: EngineRequest) -> ApiError:
    if isinstance(error, ValueError):  # what the client library cannot send
        error = PagedError("INVALID_ARGUMENT", str(error))
    return from_engine(error, request.names)


class Streams:
    """The answers piece by piece: an asynchronous iterator of Delta, to be iterated once.

    Args:
        samples: of each request.
    """

    def __init__(self, servers: Servers, requests: Sequence[EngineRequest], request_id: str, *, samples: int) -> None:
        """Raises ApiError for what cannot be sent."""
        self._requests = requests
        self._samples = samples
        self._streams = [_stream(servers, request, name) for request, name in _named(requests, request_id)]
        self._deltas = self._merged() if len(requests) > 1 else self._of(0)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    async def first(self) -> Delta:
        """Raises ApiError."""
        return await self._deltas.__anext__()

    @property
    def completions(self) -> list[Completion]:
        """Once the iteration has ended."""
        found = [stream.completion for stream in self._streams]
        return [one for one in found if one is not None]

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def _of(self, index: int) -> AsyncIterator[Delta]:
        try:
            async for delta in self._streams[index]:
                yield delta
        except PagedError as error:
            raise _refusal(error, self._requests[index]) from None

    async def _merged(self) -> AsyncIterator[Delta]:
        waiting = {self._next(index): index for index in range(len(self._streams))}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    index, delta = waiting.pop(task), task.result()
                    if delta is not None:
                        yield replace(delta, index=index * self._samples + delta.index)
                        waiting[self._next(index)] = index
        finally:
            await cancel_and_wait(*waiting)

    def _next(self, index: int) -> asyncio.Task[Delta | None]:
        return asyncio.ensure_future(self._next_of(index))

    async def _next_of(self, index: int) -> Delta | None:
        """None after the last."""
        try:
            return await anext(self._streams[index], None)
        except PagedError as error:
            raise _refusal(error, self._requests[index]) from None


def _stream(servers: Servers, request: EngineRequest, name: str) -> ServerStream:
    try:
        return servers.stream(request_id=name, **request.arguments)
    except ValueError as error:
        raise _refusal(error, request) from None
