"""Balances requests over several servers of the same model.

Requests go to the servers round-robin. If a server is unreachable or its queue is full, the request goes to the next
one, as long as no output has been returned.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from paged_client.async_client import AsyncClient
from paged_client.async_stream import AsyncStream
from paged_client.discovery import find_model
from paged_client.sync_client import DEFAULT_URLS
from paged_client.types import Adapter, Completion, Delta, Embedding, PagedError, PoolMap

T = TypeVar("T")
_FAILOVER_CODE = "UNAVAILABLE"  # the error class for which the next server is tried
FIND_SECONDS = 3.0  # for a server to name its model


class Servers:
    """The methods of AsyncClient that the gateway uses, over several servers.

    Args:
        urls: gRPC endpoints; None is the default one.
        model: name of the model.
        is_fixed: whether the user has chosen the name, so that `find_names` does not change it.

    Raises ValueError for an invalid URL.
    """

    def __init__(self, urls: Sequence[str | None], model: str, *, is_fixed: bool) -> None:
        self._urls = urls
        self._clients = [AsyncClient(url, model) for url in urls]
        self._names = (model,) * len(urls)
        self._is_fixed = is_fixed
        self._finding = asyncio.Lock()
        self._counter = itertools.count()
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Servers:
        for client in self._clients:
            await self._open.enter_async_context(client)
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self._open.aclose()

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the model at each server, as far as it is known."""
        return self._names

    async def find_names(self, outdated: tuple[str, ...]) -> bool:
        """Ask the servers again for the names of their models. Return whether `names` is now other than `outdated`.

        A server that has been restarted may serve under another name. One that does not answer keeps its name.
        """
        async with self._finding:
            if self._names == outdated and not self._is_fixed:
                found = await asyncio.gather(*(asyncio.to_thread(_find, url) for url in self._urls))
                self._names = tuple(new or old for new, old in zip(found, self._names, strict=True))
                for index, name in enumerate(self._names):
                    if name != outdated[index]:
                        client = AsyncClient(self._urls[index], name)
                        # The client before it may still have streams; it is closed at the end, too.
                        self._clients[index] = await self._open.enter_async_context(client)
            return self._names != outdated

    async def generate(self, **arguments: Any) -> Completion:
        return await self._call(lambda client: client.generate(**arguments))

    async def embed(self, *arguments: Any, **keywords: Any) -> Embedding:
        return await self._call(lambda client: client.embed(*arguments, **keywords))

    async def pool_map(self, *, timeout: float) -> PoolMap:
        """Return the block pool of one of the servers."""
        return await self._call(lambda client: client.pool_map(timeout=timeout))

    async def adapters(self, *, timeout: float) -> tuple[Adapter, ...]:
        """Return the adapters of one of the servers. All should have the same."""
        return await self._call(lambda client: client.adapters(timeout=timeout))

    def stream(self, **arguments: Any) -> FailoverStream:
        return FailoverStream(client.stream(**arguments) for client in self._rotation())

    async def _call(self, method: Callable[[AsyncClient], Awaitable[T]]) -> T:
        *clients, last = self._rotation()
        for client in clients:
            try:
                return await method(client)
            except PagedError as error:
                if error.code != _FAILOVER_CODE:
                    raise
        return await method(last)

    def _rotation(self) -> list[AsyncClient]:
        """Return all clients, starting with the next one of the round-robin."""
        first = next(self._counter) % len(self._clients)
        return self._clients[first:] + self._clients[:first]


def _find(url: str | None) -> str | None:
    try:
        return find_model(url or DEFAULT_URLS["grpc"], "grpc", FIND_SECONDS)
    except PagedError:
        return None


class FailoverStream:
    """A stream like AsyncStream, from the first server that returns output.

    Args:
        streams: one for each server, in the order in which they are tried. Only one is open at a time.
    """

    def __init__(self, streams: Iterator[AsyncStream]) -> None:
        self._others = streams
        self._stream = next(streams)
        self._has_output = False

    @property
    def completion(self) -> Completion | None:
        return self._stream.completion

    def cancel(self) -> None:
        self._others = iter(())
        self._stream.cancel()

    def __aiter__(self) -> FailoverStream:
        return self

    async def __anext__(self) -> Delta:
        while True:
            try:
                delta = await self._stream.__anext__()
            except PagedError as error:
                can_retry = not self._has_output and error.code == _FAILOVER_CODE
                other = next(self._others, None) if can_retry else None
                if other is None:
                    raise
                self._stream = other
            else:
                self._has_output = True
                return delta
