"""Streaming responses as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paged_client.openai.answers import ResponseBuilder, RunningUsage
from paged_client.openai.concurrency import ClientDisconnected, run_while_connected
from paged_client.openai.engine_calls import MergedStream
from paged_client.openai.errors import ApiError
from paged_client.openai.metrics import Metrics
from paged_client.openai.schema import StreamOptions
from paged_client.types import Completion, Delta


class EventStream(Response):
    """A streaming response. It is created with the first delta, so that errors before it have their own HTTP status.

    Args:
        count: called with the completions at the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Delta,
        stream: MergedStream,
        builder: ResponseBuilder,
        *,
        options: StreamOptions,
        count: Callable[[Sequence[Completion]], None],
        metrics: Metrics,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Request-Id": builder.id})
        del self.headers["content-length"]
        self._first = first
        self._stream = stream
        self._builder = builder
        self._include_usage = options.include_usage
        self._running_usage = RunningUsage() if options.continuous_usage_stats else None
        self._count = count
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._metrics.open_stream():
                await run_while_connected(receive, self._send(send))
        except ClientDisconnected:
            pass
        finally:
            self._stream.cancel()
            self._count(self._stream.completions)

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
        except ApiError as error:
            yield _json(error.body)
            return
        if self._include_usage:
            yield _json(self._builder.usage_chunk(self._stream.completions))
        yield "[DONE]"

    def _chunks(self, delta: Delta) -> Iterator[str]:
        """Yield the chunk of a delta. With include_usage it has the usage so far, or null, as in OpenAI's API."""
        usage = self._running_usage.add(delta) if self._running_usage else None
        chunk = self._builder.chunk(delta)
        if chunk is not None:
            yield _json(chunk | ({"usage": usage} if self._include_usage else {}))


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
