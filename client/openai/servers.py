"""One or several servers of the same model, as if they were one.

Requests go to each in turn, and from one that cannot be reached or lets nobody in to the next, while nothing of the
answer has been told.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from client.async_client import AsyncClient, AsyncStream
from client.types import Adapter, Completion, Delta, Embedding, PagedError, PoolMap

T = TypeVar("T")
_ELSEWHERE = "UNAVAILABLE"  # the class of errors for which another server is asked


class Servers:
    """The methods of AsyncClient that a gateway needs. Holds connections and whose turn it is."""

    def __init__(self, urls: Sequence[str | None], model: str) -> None:
        """Raises ValueError for a URL that gRPC cannot take."""
        self._clients = [AsyncClient(url, model) for url in urls]
        self._turns = itertools.count()
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Servers:
        for client in self._clients:
            await self._open.enter_async_context(client)
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self._open.aclose()

    async def generate(self, **asked: Any) -> Completion:
        return await self._ask(lambda client: client.generate(**asked))

    async def embed(self, *asked: Any, **more: Any) -> Embedding:
        return await self._ask(lambda client: client.embed(*asked, **more))

    async def pool_map(self, *, timeout: float) -> PoolMap:
        """Of any of them."""
        return await self._ask(lambda client: client.pool_map(timeout=timeout))

    async def adapters(self, *, timeout: float) -> tuple[Adapter, ...]:
        """Of any of them, which should have the same."""
        return await self._ask(lambda client: client.adapters(timeout=timeout))

    def stream(self, **asked: Any) -> ServerStream:
        return ServerStream(client.stream(**asked) for client in self._in_turn())

    async def _ask(self, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
        *clients, last = self._in_turn()
        for client in clients:
            try:
                return await work(client)
            except PagedError as error:
                if error.code != _ELSEWHERE:
                    raise
        return await work(last)

    def _in_turn(self) -> list[AsyncClient]:
        first = next(self._turns) % len(self._clients)
        return self._clients[first:] + self._clients[:first]


class ServerStream:
    """As AsyncStream, from the first server that begins to answer.

    Args:
        streams: one of each server; only one is open at a time.
    """

    def __init__(self, streams: Iterator[AsyncStream]) -> None:
        self._others = streams
        self._stream = next(streams)
        self._begun = False

    @property
    def completion(self) -> Completion | None:
        return self._stream.completion

    def cancel(self) -> None:
        self._others = iter(())
        self._stream.cancel()

    def __aiter__(self) -> ServerStream:
        return self

    async def __anext__(self) -> Delta:
        while True:
            try:
                delta = await self._stream.__anext__()
            except PagedError as error:
                other = None if self._begun or error.code != _ELSEWHERE else next(self._others, None)
                if other is None:
                    raise
                self._stream = other
            else:
                self._begun = True
                return delta
