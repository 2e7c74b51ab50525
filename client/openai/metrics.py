"""What the gateway counts, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

GONE = 499  # the status of a request whose client went away before its answer; nobody receives it
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._open_streams = 0

    def count(self, route: str, status: int) -> None:
        self._requests[route, status] += 1

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        self._open_streams += 1
        try:
            yield
        finally:
            self._open_streams -= 1

    def text(self) -> str:
        requests = [
            f'paged_openai_requests_total{{route="{route}",status="{status}"}} {count}'
            for (route, status), count in sorted(self._requests.items())
        ]
        lines = [
            "# HELP paged_openai_requests_total Requests answered, by route and HTTP status; 499: the client went away",
            "# TYPE paged_openai_requests_total counter",
            *requests,
            "# HELP paged_openai_open_streams Streams that are being sent",
            "# TYPE paged_openai_open_streams gauge",
            f"paged_openai_open_streams {self._open_streams}",
        ]
        return "\n".join(lines) + "\n"


class CountRequests:
    """ASGI middleware that counts each request when it ends."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = 500  # what an exception becomes

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            # Of paths that there are, so that nobody can make labels at will.
            self._metrics.count(getattr(scope.get("route"), "path", "other"), status)
