"""Answers as server-sent events, and what becomes of a request whose client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from client.async_client import AsyncStream
from client.openai.answers import Answer
from client.openai.errors import from_engine
from client.openai.metrics import Metrics
from client.types import Delta, PagedError

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Cancels it and raises ClientGone where the client goes away before. The request's body must
    have been read."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream whose first piece has come, so that what the engine refuses had a status of its own.

    Args:
        names: the caller's own names of fields, as for `from_engine`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Delta,
        stream: AsyncStream,
        answer: Answer,
        *,
        include_usage: bool,
        names: Mapping[str, str],
        metrics: Metrics,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._stream = stream
        self._answer = answer
        self._include_usage = include_usage
        self._names = names
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._metrics.open_stream():
                await while_connected(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            self._stream.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[str]:
        try:
            for chunk in self._chunks(self._first):
                yield chunk
            async for delta in self._stream:
                for chunk in self._chunks(delta):
                    yield chunk
        except PagedError as error:
            yield _json(from_engine(error, self._names).body)
            return
        if self._include_usage:
            assert self._stream.completion is not None  # a stream that failed has raised
            yield _json(self._answer.usage_chunk(self._stream.completion))
        yield "[DONE]"

    def _chunks(self, delta: Delta) -> Iterator[str]:
        """With usage asked for, every chunk before the last says that it has none."""
        chunk = self._answer.chunk(delta)
        if chunk is not None:
            yield _json(chunk | ({"usage": None} if self._include_usage else {}))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
