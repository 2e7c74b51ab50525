"""Sends the engine requests of one HTTP request, which may have several prompts, and merges their outputs.

All prompts are sent at once. Samples are numbered across prompts: all samples of the first prompt come first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from paged_client.async_client import AsyncClient
from paged_client.async_stream import AsyncStream
from paged_client.openai.concurrency import cancel_and_wait, gather_or_cancel
from paged_client.openai.errors import ApiError, from_engine
from paged_client.openai.translation import EngineRequest
from paged_client.types import Completion, Delta, PagedError


async def generate_all(client: AsyncClient, requests: Sequence[EngineRequest], request_id: str) -> list[Completion]:
    """Return the completions of all requests, in order. Raises ApiError if one fails, which cancels the others."""
    return await gather_or_cancel(
        _generate(client, request, engine_id) for request, engine_id in _with_ids(requests, request_id)
    )


async def _generate(client: AsyncClient, request: EngineRequest, engine_id: str) -> Completion:
    try:
        return await client.generate(request_id=engine_id, **request.arguments)
    except (PagedError, ValueError) as error:
        raise _api_error(error, request) from None


def _with_ids(requests: Sequence[EngineRequest], request_id: str) -> list[tuple[EngineRequest, str]]:
    """Pair each engine request with its id for the server."""
    if len(requests) == 1:
        return [(requests[0], request_id)]
    return [(request, f"{request_id}-{index}") for index, request in enumerate(requests)]


def _api_error(error: PagedError | ValueError, request: EngineRequest) -> ApiError:
    if isinstance(error, ValueError):  # rejected by the client library
        error = PagedError("INVALID_ARGUMENT", str(error))
    return from_engine(error, request.names)


class MergedStream:
    """The deltas of all requests as they arrive: an asynchronous iterator that can be iterated once.

    Args:
        samples: number of samples of each request.

    Raises ApiError for a request that cannot be sent.
    """

    def __init__(
        self, client: AsyncClient, requests: Sequence[EngineRequest], request_id: str, *, samples: int
    ) -> None:
        self._requests = requests
        self._samples = samples
        self._streams: list[AsyncStream] = []
        try:
            for request, engine_id in _with_ids(requests, request_id):
                self._streams.append(_stream(client, request, engine_id))
        except BaseException:
            self.cancel()
            raise
        self._deltas = self._merge() if len(requests) > 1 else self._deltas_of(0)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    async def first(self) -> Delta:
        """Return the first delta. Raises ApiError if a request fails before it."""
        return await self._deltas.__anext__()

    @property
    def completions(self) -> list[Completion]:
        """The completions of all requests that did not fail, once the iteration has ended."""
        completions = [stream.completion for stream in self._streams]
        return [completion for completion in completions if completion is not None]

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def _deltas_of(self, index: int) -> AsyncIterator[Delta]:
        try:
            async for delta in self._streams[index]:
                yield delta
        except PagedError as error:
            raise _api_error(error, self._requests[index]) from None

    async def _merge(self) -> AsyncIterator[Delta]:
        pending = {self._start_next(index): index for index in range(len(self._streams))}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=pending.__getitem__):
                    index, delta = pending.pop(task), task.result()
                    if delta is not None:
                        yield replace(delta, index=index * self._samples + delta.index)
                        pending[self._start_next(index)] = index
        finally:
            await cancel_and_wait(*pending)

    def _start_next(self, index: int) -> asyncio.Task[Delta | None]:
        return asyncio.ensure_future(self._next_delta(index))

    async def _next_delta(self, index: int) -> Delta | None:
        """Return the next delta of a request, None after its last one."""
        try:
            return await anext(self._streams[index], None)
        except PagedError as error:
            raise _api_error(error, self._requests[index]) from None


def _stream(client: AsyncClient, request: EngineRequest, engine_id: str) -> AsyncStream:
    try:
        return client.stream(request_id=engine_id, **request.arguments)
    except ValueError as error:
        raise _api_error(error, request) from None
