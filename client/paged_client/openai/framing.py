"""Rejects requests whose length two HTTP implementations may understand differently."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

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
