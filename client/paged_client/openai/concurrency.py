"""Limit concurrent requests, and cancel coroutines whose client disconnects or whose siblings fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_client.openai.errors import ApiError
from paged_client.openai.limits import SMALL_BYTES, flag

T = TypeVar("T")
READ = ["GET", "HEAD"]  # methods that need no limit; some load balancers use HEAD


class ConcurrencyLimiter:
    """ASGI middleware that limits concurrent POST requests, and the bytes of their bodies."""

    def __init__(self, app: ASGIApp, limit: int, max_bytes: int) -> None:
        self._app = app
        self._limit = limit
        self._max_bytes = max_bytes
        self._num_open = 0
        self._num_bytes = 0  # beyond the first SMALL_BYTES of each body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in READ:
            return await self._app(scope, receive, send)
        if self._num_open >= self._limit:
            problem = f"{self._num_open} requests are open, the limit ({flag('max_open_requests')}); retry later"
            error = ApiError(503, problem, code="unavailable")
            return await JSONResponse(error.body, error.status)(scope, receive, send)
        size = 0

        async def receive_and_count() -> Message:
            nonlocal size
            message = await receive()
            before, size = size, size + len(message.get("body", b""))
            self._num_bytes += _beyond(size) - _beyond(before)
            if _beyond(size) > _beyond(before) and self._num_bytes > self._max_bytes:
                problem = f"the bodies of open requests have {self._max_bytes} bytes, the limit"
                raise ApiError(503, f"{problem} ({flag('max_open_bytes')}); retry later", code="unavailable")
            return message

        self._num_open += 1
        try:
            await self._app(scope, receive_and_count, send)
        finally:
            self._num_open -= 1
            self._num_bytes -= _beyond(size)


def _beyond(size: int) -> int:
    return max(0, size - SMALL_BYTES)


class ClientDisconnected(Exception):
    """The client has closed its connection before the response was complete."""


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Cancels it and raises ClientDisconnected if the client disconnects first.

    The request's body must have been read already.
    """
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        await cancel_and_wait(task, disconnect)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order. The first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
