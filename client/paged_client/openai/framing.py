"""Limits of connections, before a request is understood: their number, the time for headers, ambiguous lengths."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from paged_client.openai.errors import ApiError

_BOTH = {"content-length", "transfer-encoding"}


class FramingCheck:
    """ASGI middleware that rejects a request with both Content-Length and Transfer-Encoding, and closes its connection.

    A proxy in front may have taken the other of the two for the end of the request (RFC 9112, 6.3): what follows would
    be a request that the proxy has not seen.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and set(Headers(scope=scope)) >= _BOTH:
            error = ApiError(400, "Content-Length: cannot be combined with Transfer-Encoding; send one of them")
            return await JSONResponse(error.body, error.status, {"Connection": "close"})(scope, receive, send)
        await self._app(scope, receive, send)


def bounded_protocol(max_connections: int, header_timeout: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with two limits, which it lacks. Connections beyond them are closed without an answer.

    Args:
        max_connections: maximum open connections. Each takes a file descriptor, and without free ones nothing else
            works either.
        header_timeout: seconds within which the headers of a request must be complete.
    """

    class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
            else:
                self._wait_for_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            elif self._timer is None:
                self._wait_for_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait_for_headers(self) -> None:
            self._timer = self.loop.call_later(header_timeout, self.transport.abort)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return BoundedProtocol
