"""The routes of the gateway. It holds counters and a connection to the server, and nothing of any request."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from client.openai import embeddings, keys, metrics, schema, translation
from client.openai.answers import ChatResponseBuilder, CompletionResponseBuilder, ResponseBuilder
from client.openai.asking import Streams, ask
from client.openai.chat_schema import ChatRequest
from client.openai.chat_template import ChatTemplate
from client.openai.concurrency import ClientDisconnected, run_while_connected
from client.openai.errors import ApiError, from_engine, no_such_model
from client.openai.servers import Servers
from client.openai.streaming import EventStream
from client.openai.tool_calls import ToolCallFormat
from client.openai.tools import tool_use
from client.openai.translation import EngineRequest
from client.types import PagedError

HEALTH_TIMEOUT = 10.0  # seconds; the engine answers between two steps
READ = ["GET", "HEAD"]  # load balancers ask for the second
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}  # of errors, by status
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class GatewayLimits:
    """The most that a request may have. Each is an option of `paged openai`, of this name."""

    max_open_requests: int  # of all clients; more are not read
    max_request_bytes: int  # of a body
    max_prompts: int  # of a request for completions
    max_inputs: int  # of one for embeddings
    body_timeout: float  # seconds in which a body has to be there, whole

    def check(self, option: str, field: str, count: int, what: str) -> None:
        """Raises ApiError where that is more than the option allows."""
        most = getattr(self, option)
        if count > most:
            raise ApiError(400, f"{field}: has {count} {what}; must be at most {most} ({flag(option)})", param=field)


def flag(option: str) -> str:
    """As it is on the command line."""
    return "--" + option.replace("_", "-")


@dataclass(frozen=True)
class Settings:
    """How one gateway was started.

    Args:
        urls, model: the servers' gRPC endpoints, None for the usual one, and their model's name, which is the name
            here, too.
        template: of the gateway's own; without one the server applies the model's.
        api_keys: one of which a request must bring; empty: none is asked for.
        caps: of requests.
        tool_format: how the model writes calls of tools.
        access_log: takes a line for each request; None: there is none.
    """

    urls: Sequence[str | None]
    model: str
    template: ChatTemplate | None
    api_keys: Sequence[str]
    limits: GatewayLimits
    tool_format: ToolCallFormat
    access_log: Callable[[str], object] | None


class Gateway:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._servers = Servers(settings.urls, settings.model)
        self._started = int(time.time())
        self.metrics = metrics.Metrics()

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with self._servers:
            yield

    async def completions(self, request: Request) -> Response:
        body = schema.parse(schema.CompletionRequest, await self._read(request))
        self._settings.limits.check("max_prompts", "prompt", len(body.prompts), "prompts")
        asked = translation.from_completion(body, self._adapter(body))
        return await self._answer(request, body, asked, CompletionResponseBuilder(body, _request_id(request)))

    async def chat_completions(self, request: Request) -> Response:
        body = schema.parse(ChatRequest, await self._read(request))
        settings = self._settings
        use = tool_use(body, settings.tool_format)
        asked = await translation.from_chat(body, self._adapter(body), use, settings.tool_format, settings.template)
        return await self._answer(request, body, [asked], ChatResponseBuilder(body, _request_id(request), use))

    async def _answer(
        self, request: Request, body: schema.GenerateBody, asked: Sequence[EngineRequest], answer: ResponseBuilder
    ) -> Response:
        if not body.stream:
            work = ask(self._servers, asked, answer.id)
            completions = await run_while_connected(request.receive, work)
            self.metrics.count_tokens(request.url.path, completions)
            return JSONResponse(answer.whole(completions), headers={"X-Request-Id": answer.id})
        streams = Streams(self._servers, asked, answer.id, samples=body.n or 1)
        try:
            first = await run_while_connected(request.receive, streams.first())
        except BaseException:
            streams.cancel()
            raise
        options = body.stream_options or schema.StreamOptions()
        return EventStream(first, streams, answer, options=options, route=request.url.path, metrics=self.metrics)

    async def embeddings(self, request: Request) -> Response:
        body = schema.parse(embeddings.EmbeddingRequest, await self._read(request))
        self._settings.limits.check("max_inputs", "input", len(body.inputs), "inputs")
        work = embeddings.embed_all(self._servers, body, self._adapter(body))
        found = await run_while_connected(request.receive, work)
        self.metrics.count_embedded(request.url.path, found)
        return JSONResponse(embeddings.answer(body, found))

    def _adapter(self, body: schema.Body) -> str | None:
        """A request names the model, or one of its adapters, of which the server knows."""
        return None if body.model == self._settings.model else body.model

    async def models(self) -> dict[str, Any]:
        """The model, then its adapters. Raises ApiError where no server tells which there are."""
        try:
            adapters = await self._servers.adapters(timeout=HEALTH_TIMEOUT)
        except PagedError as error:
            raise from_engine(error, {}) from None
        model = self._settings.model
        named = [self._card(one.name) | {"parent": model} for one in adapters if one.error is None]
        return {"object": "list", "data": [self._card(model), *named]}

    async def model(self, name: str) -> dict[str, Any]:
        for card in (await self.models())["data"]:
            if card["id"] == name:
                return dict(card)
        raise no_such_model(name)

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "paged"}

    async def health(self) -> dict[str, str]:
        """A map of the pool comes from the engine's own loop: who gets one can have tokens."""
        try:
            await self._servers.pool_map(timeout=HEALTH_TIMEOUT)
        except PagedError as error:
            raise ApiError(503, f"the model is not ready: {error}", code="unavailable") from None
        return {"status": "ok"}

    async def live(self) -> dict[str, str]:
        """Whatever becomes of the servers."""
        return {"status": "ok"}

    async def show_metrics(self) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type=metrics.CONTENT_TYPE)

    async def check_key(self, request: Request) -> None:
        if not self._settings.api_keys:
            return
        if not keys.is_authorized(request.headers.get("Authorization", ""), self._settings.api_keys):
            raise ApiError(401, "Authorization: must be 'Bearer' and a known API key", code="invalid_api_key")

    async def _read(self, request: Request) -> bytes:
        """The body, none of which is waited for where its headers say that it will not do."""
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(415, f"Content-Encoding: {encoding[:80]}: not served; send the JSON as it is")
        self._check_size(int(request.headers.get("Content-Length", 0)))
        seconds = self._settings.limits.body_timeout
        try:
            return await asyncio.wait_for(self._whole(request), seconds)
        except asyncio.TimeoutError:
            message = f"the body has not come within {seconds:g} s, which is the limit ({flag('body_timeout')})"
            raise ApiError(408, message, code="request_timeout") from None
        except ClientDisconnect:
            raise ClientDisconnected from None

    async def _whole(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            self._check_size(len(body))
        return bytes(body)

    def _check_size(self, size: int) -> None:
        most = self._settings.limits.max_request_bytes
        if size > most:
            message = f"the body has more than {most} bytes, which is the limit ({flag('max_request_bytes')})"
            raise ApiError(413, message, code="request_too_large")


class Places:
    """ASGI middleware that lets so many requests for tokens in at a time, whose bodies it then has to hold."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._taken = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in READ:
            return await self._app(scope, receive, send)
        if self._taken >= self._most:
            message = f"{self._taken} requests are open, the most that may be ({flag('max_open_requests')}); try again"
            error = ApiError(503, message, code="unavailable")
            return await JSONResponse(error.body, error.status)(scope, receive, send)
        self._taken += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._taken -= 1


def _request_id(request: Request) -> str:
    """The caller's own, or one that nobody else has."""
    given = request.headers.get("X-Request-Id")
    if given is not None and not _REQUEST_ID.fullmatch(given):
        raise ApiError(400, "X-Request-Id: must be 1..128 letters, digits or any of -_.:")
    return given or uuid.uuid4().hex


def create_app(settings: Settings) -> FastAPI:
    """Raises ValueError for a URL that gRPC cannot take."""
    gateway = Gateway(settings)
    # Without a description of the interface: OpenAI's is the one that holds.
    app = FastAPI(lifespan=gateway.lifespan, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Places, most=settings.limits.max_open_requests)
    app.add_middleware(metrics.RequestMetricsMiddleware, metrics=gateway.metrics, log=settings.access_log)
    _add_error_handlers(app)
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(gateway.check_key)])
    v1.add_api_route("/models", gateway.models, methods=READ)
    v1.add_api_route("/models/{name:path}", gateway.model, methods=READ)
    v1.add_api_route("/completions", gateway.completions, methods=["POST"], response_model=None)
    v1.add_api_route("/chat/completions", gateway.chat_completions, methods=["POST"], response_model=None)
    v1.add_api_route("/embeddings", gateway.embeddings, methods=["POST"], response_model=None)
    app.include_router(v1)
    app.add_api_route("/health", gateway.health, methods=READ)
    app.add_api_route("/live", gateway.live, methods=READ)
    app.add_api_route("/metrics", gateway.show_metrics, methods=READ, response_model=None)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, _HEADERS.get(error.status))

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnected)
    async def gone(request: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=metrics.CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, f"{type(error).__name__}: {error}").body, 500)
