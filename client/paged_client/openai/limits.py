"""Limits of the gateway: of one request, and of all open ones."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_client.openai.errors import ApiError

READ = ["GET", "HEAD"]  # methods that need no limit; some load balancers use HEAD


@dataclass(frozen=True)
class GatewayLimits:
    """Limits of requests. Each field is an option of `paged openai` with the same name."""

    max_open_requests: int  # concurrent requests of all clients
    max_request_bytes: int  # size of a body
    max_prompts: int  # prompts of a completion request
    max_inputs: int  # inputs of a request for embeddings, classes, scores or a ranking
    body_timeout: float  # seconds within which a body must be fully received

    def check(self, option: str, field: str, count: int, what: str) -> None:
        """Raises ApiError if `count` exceeds the option."""
        limit = getattr(self, option)
        if count > limit:
            raise ApiError(400, f"{field}: has {count} {what}; must be at most {limit} ({flag(option)})", param=field)


def flag(option: str) -> str:
    """Return the command-line flag of an option."""
    return "--" + option.replace("_", "-")


class ConcurrencyLimiter:
    """ASGI middleware that limits concurrent POST requests, and with them the memory for request bodies."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in READ:
            return await self._app(scope, receive, send)
        if self._num_open >= self._limit:
            message = f"{self._num_open} requests are open, the limit ({flag('max_open_requests')}); retry later"
            error = ApiError(503, message, code="unavailable")
            return await JSONResponse(error.body, error.status)(scope, receive, send)
        self._num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1
