"""Answers as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from client.openai.answers import ResponseBuilder, RunningUsage
from client.openai.asking import Streams
from client.openai.concurrency import ClientDisconnected, run_while_connected
from client.openai.errors import ApiError
from client.openai.metrics import Metrics
from client.openai.schema import StreamOptions
from client.types import Delta


class EventStream(Response):
    """A stream whose first piece has come, so that what the engine refuses had a status of its own."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Delta,
        streams: Streams,
        answer: ResponseBuilder,
        *,
        options: StreamOptions,
        route: str,
        metrics: Metrics,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Request-Id": answer.id})
        del self.headers["content-length"]
        self._first = first
        self._streams = streams
        self._answer = answer
        self._include_usage = options.include_usage
        self._running = RunningUsage() if options.continuous_usage_stats else None
        self._route = route
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._metrics.open_stream():
                await run_while_connected(receive, self._send(send))
        except ClientDisconnected:
            pass
        finally:
            self._streams.cancel()
            self._metrics.count_tokens(self._route, self._streams.completions)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[str]:
        try:
            for chunk in self._chunks(self._first):
                yield chunk
            async for delta in self._streams:
                for chunk in self._chunks(delta):
                    yield chunk
        except ApiError as error:
            yield _json(error.body)
            return
        if self._include_usage:
            yield _json(self._answer.usage_chunk(self._streams.completions))
        yield "[DONE]"

    def _chunks(self, delta: Delta) -> Iterator[str]:
        """With usage asked for, every chunk before the last says that it has none, or how it is so far."""
        usage = self._running.add(delta) if self._running else None
        chunk = self._answer.chunk(delta)
        if chunk is not None:
            yield _json(chunk | ({"usage": usage} if self._include_usage else {}))


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
