"""Balances requests over several servers of the same model.

The router chooses the server of a request (routing.py). If a server is unreachable, its queue is full or its engine has
died, the request goes to the next one, as long as no output has been returned. If all servers fail, a request may wait
for one of them to be restarted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from paged_client.async_client import AsyncClient
from paged_client.async_stream import AsyncStream
from paged_client.discovery import find_model
from paged_client.openai.concurrency import cancel_and_wait
from paged_client.openai.kv_index import KvIndex
from paged_client.openai.routing import Route, Router
from paged_client.sync_client import DEFAULT_URLS
from paged_client.types import Adapter, Classification, Completion, Delta, Embedding, PagedError, PoolMap

T = TypeVar("T")
_FAILOVER_CODE = "UNAVAILABLE"  # the error class for which the next server is tried
# Texts of other errors for which the next server is tried, because the server has failed, not the request. They are the
# engine's, and tritonserver's, whose process for the engine has ended or hangs.
_FAILOVER_TEXTS = ("the engine died", "is not healthy")
# Limits that errors of this class name. A server that is at the first has not failed, and no server exceeds the second.
TENANT_LIMIT, OUTPUT_LIMIT = "(max_tenant_requests)", "max_response_mib"
PAUSE_SECONDS = 0.5  # time after which servers that have all failed are tried again
FIND_SECONDS = 3.0  # time for a server to name its model


class Servers:
    """The methods of AsyncClient that the gateway uses, over several servers.

    Args:
        urls: gRPC endpoints; None is the default one.
        model: name of the model.
        is_fixed: whether the user has chosen the name; then `find_names` does not change it.
        retry_seconds: time for which a request is tried again while all servers fail; 0: each server is tried once.
        routing: one of routing.POLICIES, or LEAST_LOADED.
        index: knows what each server has cached, if given.

    Raises ValueError for an invalid URL.
    """

    def __init__(
        self,
        urls: Sequence[str | None],
        model: str,
        *,
        is_fixed: bool,
        retry_seconds: float = 0.0,
        routing: str = "prefix",
        index: KvIndex | None = None,
    ) -> None:
        self._urls = urls
        self._retry_seconds = retry_seconds
        self._clients = [AsyncClient(url, model) for url in urls]
        self._names = (model,) * len(urls)
        self._is_fixed = is_fixed
        self._finding = asyncio.Lock()
        self._router = Router([url or DEFAULT_URLS["grpc"] for url in urls], routing)
        self._index = index
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Servers:
        for client in self._clients:
            await self._open.enter_async_context(client)
        if self._index is not None:
            self._open.callback(self._index.close)
            self._open.push_async_callback(cancel_and_wait, asyncio.ensure_future(self._index.run(self._pool)))
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
                names = await asyncio.gather(*(asyncio.to_thread(_find, url) for url in self._urls))
                self._names = tuple(new or old for new, old in zip(names, self._names, strict=True))
                for index, name in enumerate(self._names):
                    if name != outdated[index]:
                        client = AsyncClient(self._urls[index], name)
                        # The client before it may still have streams; it is closed at the end, too.
                        self._clients[index] = await self._open.enter_async_context(client)
            return self._names != outdated

    async def cached(self, prompt: str | Sequence[int] | None, sampling: Mapping[str, Any]) -> Sequence[float]:
        """Return the share of a prompt that each server has cached; empty if it is not known.

        Args:
            prompt: text or token ids; None for a conversation whose template the server applies.
            sampling: sampling parameters, by the engine's names.
        """
        if self._index is None or prompt is None or "lora_name" in sampling:  # adapters have caches of their own
            return ()
        return await self._index.cached(prompt, special_tokens=sampling.get("add_special_tokens", True))

    async def _pool(self, server: int) -> PoolMap:
        return await self._clients[server].pool_map(timeout=FIND_SECONDS)

    async def generate(self, *, route: Route | None = None, **arguments: Any) -> Completion:
        """Return a completion. route: determines the server; None: any."""
        return await self._call(lambda client: client.generate(**arguments), route)

    async def embed(self, *arguments: Any, **keywords: Any) -> Embedding:
        return await self._call(lambda client: client.embed(*arguments, **keywords))

    async def classify(self, **keywords: Any) -> Classification:
        return await self._call(lambda client: client.classify(**keywords))

    async def pool_map(self, *, timeout: float) -> PoolMap:
        """Return the block pool of the first server that answers and is awake, or of one that sleeps if all do.

        All are asked once, at the same time.
        """
        asked = [asyncio.ensure_future(client.pool_map(timeout=timeout)) for client in self._clients]
        errors: list[PagedError] = []
        asleep: PoolMap | None = None
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    pool = await answer
                except PagedError as error:
                    errors.append(error)
                    continue
                if not pool.sleeping:
                    return pool
                asleep = pool
        finally:
            await cancel_and_wait(*asked)
        if asleep is not None:
            return asleep
        raise min(errors, key=_can_fail_over)  # an error that says more than that a server cannot be reached

    async def adapters(self, *, timeout: float) -> tuple[Adapter, ...]:
        """Return the adapters of one of the servers, each of which is asked once. All should have the same."""
        return await self._call(lambda client: client.adapters(timeout=timeout), retry_seconds=0.0)

    def stream(self, *, route: Route | None = None, **arguments: Any) -> FailoverStream:
        """Return a stream. route: as in `generate`."""
        return FailoverStream(lambda client: client.stream(**arguments), self._attempts(route))

    async def _call(
        self,
        method: Callable[[AsyncClient], Awaitable[T]],
        route: Route | None = None,
        retry_seconds: float | None = None,
    ) -> T:
        attempts = self._attempts(route, retry_seconds)
        try:
            while True:
                try:
                    return await method(attempts.client)
                except PagedError as error:
                    if not await attempts.advance(error):
                        raise
        finally:
            attempts.close()

    def _attempts(self, route: Route | None, retry_seconds: float | None = None) -> Attempts:
        seconds = self._retry_seconds if retry_seconds is None else retry_seconds
        return Attempts(self._clients, self._router, route, seconds)


class Attempts:
    """The servers that a request is sent to, one after the other, until `close`."""

    def __init__(
        self, clients: Sequence[AsyncClient], router: Router, route: Route | None, retry_seconds: float
    ) -> None:
        self._clients = clients
        self._router = router
        self._route = route
        self._deadline = time.monotonic() + retry_seconds
        self._order = router.order(route)
        self._server: int | None = self._order.pop(0)  # the server that has the request now
        router.open(self._server)

    @property
    def client(self) -> AsyncClient:
        """The client of the server to try now."""
        assert self._server is not None
        return self._clients[self._server]

    async def advance(self, error: PagedError) -> bool:
        """Go to the next server, after a pause if all have been tried. error: the error of the last attempt.

        Return whether another server may run the request, and there is time for that.
        """
        if not _can_fail_over(error):
            return False
        self.close(failed=TENANT_LIMIT not in str(error))
        if not self._order:
            if time.monotonic() + PAUSE_SECONDS > self._deadline:
                return False
            await asyncio.sleep(PAUSE_SECONDS)
            self._order = self._router.order(self._route)
        self._server = self._order.pop(0)
        self._router.open(self._server)
        return True

    def close(self, *, failed: bool = False) -> None:
        """End the attempt. failed: whether the server could not run the request. May be called repeatedly."""
        server, self._server = self._server, None
        if server is not None:
            self._router.close(server, failed=failed)


def _can_fail_over(error: PagedError) -> bool:
    """Return whether another server, or the same one after a restart, may be able to run the request."""
    if OUTPUT_LIMIT in str(error):
        return False
    return error.code == _FAILOVER_CODE or any(text in str(error) for text in _FAILOVER_TEXTS)


def _find(url: str | None) -> str | None:
    try:
        return find_model(url or DEFAULT_URLS["grpc"], "grpc", FIND_SECONDS)
    except PagedError:
        return None


class FailoverStream:
    """A stream like AsyncStream, from the first server that returns output. Only one stream is open at a time.

    Args:
        create: opens a stream.
        attempts: the servers to try.
    """

    def __init__(self, create: Callable[[AsyncClient], AsyncStream], attempts: Attempts) -> None:
        self._create = create
        self._attempts = attempts
        try:
            self._stream = create(attempts.client)
        except BaseException:
            attempts.close()
            raise
        self._has_output = False
        self._cancelled = False

    @property
    def completion(self) -> Completion | None:
        return self._stream.completion

    def cancel(self) -> None:
        self._cancelled = True
        self._stream.cancel()
        self._attempts.close()

    def __aiter__(self) -> FailoverStream:
        return self

    async def __anext__(self) -> Delta:
        while True:
            try:
                delta = await self._stream.__anext__()
            except PagedError as error:
                can_retry = not (self._has_output or self._cancelled)
                if not (can_retry and await self._attempts.advance(error)) or self._cancelled:
                    self._attempts.close()
                    raise
                self._stream = self._create(self._attempts.client)
            except BaseException:  # also StopAsyncIteration, at the end
                self._attempts.close()
                raise
            else:
                self._has_output = True
                return delta
