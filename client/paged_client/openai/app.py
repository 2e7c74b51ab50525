"""The routes of the OpenAI-compatible gateway. It keeps counters and connections, but no request state."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_client.openai import keys, metrics, schema, tokenization, translation
from paged_client.openai.answers import ChatResponseBuilder, CompletionResponseBuilder, ResponseBuilder
from paged_client.openai.chat_schema import ChatRequest
from paged_client.openai.chat_template import ChatTemplate
from paged_client.openai.concurrency import READ, ClientDisconnected, ConcurrencyLimiter, run_while_connected
from paged_client.openai.engine_calls import MergedStream, generate_all
from paged_client.openai.errors import ApiError
from paged_client.openai.framing import FramingCheck
from paged_client.openai.health import Health
from paged_client.openai.limits import SMALL_BYTES, GatewayLimits, flag
from paged_client.openai.models import Choice, Models
from paged_client.openai.pooling import PoolingBody, ask_all
from paged_client.openai.pooling_routes import POOLING_ROUTES
from paged_client.openai.streaming import EventStream
from paged_client.openai.tool_calls import ToolCallFormat
from paged_client.openai.tools import ToolUse, detect_format, tool_use
from paged_client.openai.translation import EngineRequest
from paged_client.types import Completion
from paged_client.wire import TRACE_CONTEXT

T = TypeVar("T")
HEALTH_TIMEOUT = 10.0  # seconds; the engine responds between two steps
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}  # headers of errors, by status
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

log = logging.getLogger("paged_client")


@dataclass(frozen=True)
class Settings:
    """The settings of a gateway.

    Args:
        url: gRPC endpoint of the server; None is the default one.
        models: names of the models at the start, which are also their names in the gateway.
        are_models_fixed: whether these are all models to serve; otherwise all that the server has are.
        templates: chat templates to apply in the gateway, by model; None is the only model. The server applies others.
        api_keys: accepted API keys; if empty, no key is required.
        limits: limits of requests.
        tool_format: format of the models' tool calls; None: as in the chat template, if the gateway applies it.
        access_log: called with a line for each request; None disables the log.
        retry_seconds: time for which a request without output is tried again while the server fails.
        allowed_origins: origins of web pages that may send requests; "*" is any.
        root_path: path prefix at which a proxy publishes the gateway, like "/llm". Requests may have it.
    """

    url: str | None
    models: Sequence[str]
    are_models_fixed: bool
    templates: Mapping[str | None, ChatTemplate]
    api_keys: Sequence[str]
    limits: GatewayLimits
    tool_format: ToolCallFormat | None
    access_log: Callable[[str], object] | None
    retry_seconds: float = 0.0
    allowed_origins: Sequence[str] = ()
    root_path: str = ""


class Gateway:
    """The route handlers. Raises ValueError for an invalid server URL."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._models = Models(
            settings.url,
            settings.models,
            are_fixed=settings.are_models_fixed,
            templates=settings.templates,
            retry_seconds=settings.retry_seconds,
        )
        self._health = Health(lambda: self._models.up_to_date(lambda: self._models.pool_map(timeout=HEALTH_TIMEOUT)))
        self.metrics = metrics.Metrics()
        self._parsing = asyncio.Lock()  # held while a large body is parsed

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with self._models:
            yield

    async def completions(self, request: Request) -> Response:
        body = await self._parse(request, partial(schema.parse, schema.CompletionRequest))
        self._settings.limits.check("max_prompts", "prompt", len(body.prompts), "prompts")
        builder = CompletionResponseBuilder(body, _request_id(request))

        async def respond(choice: Choice) -> Response:
            engine_requests = translation.from_completion(body, choice.adapter)
            return await self._respond(request, body, engine_requests, builder, choice)

        return await self._with_model(request, body.model, respond)

    async def chat_completions(self, request: Request) -> Response:
        body = await self._parse(request, partial(schema.parse, ChatRequest))
        request_id = _request_id(request)

        async def respond(choice: Choice) -> Response:
            engine_request, use = await self._from_chat(body, choice)
            builder = ChatResponseBuilder(body, request_id, use)
            return await self._respond(request, body, [engine_request], builder, choice)

        return await self._with_model(request, body.model, respond)

    async def _from_chat(self, body: ChatRequest, choice: Choice) -> tuple[EngineRequest, ToolUse]:
        template = self._models.template(choice.model)
        tool_format = self._settings.tool_format or detect_format(template.text if template else None)
        use = tool_use(body, tool_format)
        return await translation.from_chat(body, choice.adapter, use, tool_format, template), use

    async def _with_model(self, request: Request, name: str | None, work: Callable[[Choice], Awaitable[T]]) -> T:
        """Return what `work` returns for the model or adapter that a request names. Raises ApiError.

        name: the request's `model`; None: the only model.
        """

        async def choose_and_work() -> T:
            choice = await self._models.choose(name)
            request.scope[metrics.MODEL] = choice.model.name
            return await work(choice)

        try:
            return await self._models.up_to_date(choose_and_work)
        except ApiError as error:
            raise await self._models.with_names(error) from None

    async def _respond(
        self,
        request: Request,
        body: schema.GenerateBody,
        engine_requests: Sequence[EngineRequest],
        builder: ResponseBuilder,
        choice: Choice,
    ) -> Response:
        builder.model = choice.name
        context, client = _trace_context(request), choice.model.client
        engine_requests = [
            replace(engine_request, sampling=engine_request.sampling | context) for engine_request in engine_requests
        ]
        if not body.stream:
            work = generate_all(client, engine_requests, builder.id)
            completions = await run_while_connected(request.receive, work)
            self.metrics.count_tokens(_route(request), choice.model.name, completions)
            return JSONResponse(builder.whole(completions), headers={"X-Request-Id": builder.id})
        stream = MergedStream(client, engine_requests, builder.id, samples=body.n or 1)
        try:
            first = await run_while_connected(request.receive, stream.first())
        except BaseException:
            stream.cancel()
            raise
        options = body.stream_options or schema.StreamOptions()
        count = partial(self.metrics.count_tokens, _route(request), choice.model.name)
        return EventStream(first, stream, builder, options=options, count=count, metrics=self.metrics)

    async def pooling(self, request: Request, kind: type[PoolingBody[Any]]) -> Response:
        """Answer a request for embeddings, classes, scores or a ranking: one engine request for each input."""
        body = await self._parse(request, partial(schema.parse, kind))
        request_id = _request_id(request)
        self._settings.limits.check("max_inputs", body.list_field, len(body.calls), "inputs")

        async def ask(choice: Choice) -> Response:
            work = ask_all(choice.model.client, body, choice.adapter, _trace_context(request))
            computed = await run_while_connected(request.receive, work)
            self.metrics.count_prompts(_route(request), choice.model.name, computed)
            return JSONResponse(body.response(computed, request_id, choice.name))

        return await self._with_model(request, body.model, ask)

    async def models(self) -> dict[str, Any]:
        """Return the models and their adapters. Raises ApiError if the server cannot be reached."""
        return {"object": "list", "data": await self._models.cards()}

    async def model(self, name: str) -> dict[str, Any]:
        return await self._models.card(name)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a prompt or a conversation. The server computes the prompt, too."""
        body = await self._parse(request, tokenization.parse)

        async def ask(choice: Choice) -> Response:
            if isinstance(body, ChatRequest):
                asked, _ = await self._from_chat(body, choice)
            else:
                (asked,) = translation.from_completion(body, choice.adapter)
            completion = await self._echo(request, choice, replace(asked, sampling=tokenization.sampling(asked)))
            length = await choice.model.context_length()
            return JSONResponse(tokenization.tokens_body(completion.prompt_token_ids or (), length))

        return await self._with_model(request, body.model, ask)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        body = await self._parse(request, partial(schema.parse, tokenization.DetokenizeRequest))

        async def ask(choice: Choice) -> Response:
            sampling = tokenization.detokenize_sampling(choice.adapter)
            names = dict.fromkeys(translation.PROMPT_FIELDS, "tokens")
            completion = await self._echo(request, choice, EngineRequest(body.tokens, None, sampling, names))
            return JSONResponse({"prompt": completion.text})

        return await self._with_model(request, body.model, ask)

    async def _echo(self, request: Request, choice: Choice, asked: EngineRequest) -> Completion:
        """Return the completion of a request without output."""
        asked = replace(asked, sampling=asked.sampling | _trace_context(request))
        work = generate_all(choice.model.client, [asked], _request_id(request))
        (completion,) = await run_while_connected(request.receive, work)
        return completion

    async def health(self) -> dict[str, str]:
        """Check that a model is ready."""
        await self._health.check()
        return {"status": "ok"}

    async def load(self) -> dict[str, int]:
        """Return the number of open requests, as vLLM does."""
        return {"server_load": self.metrics.num_open}

    async def version(self) -> dict[str, str]:
        return {"version": version("paged-llm-triton")}

    async def live(self) -> dict[str, str]:
        """Check that the gateway runs, independent of the server."""
        return {"status": "ok"}

    async def show_metrics(self) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type=metrics.CONTENT_TYPE)

    async def check_key(self, request: Request) -> None:
        if not self._settings.api_keys:
            return
        if not keys.is_authorized(request.headers.get("Authorization", ""), self._settings.api_keys):
            raise ApiError(401, "Authorization: must be 'Bearer' and a valid API key", code="invalid_api_key")

    async def _parse(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """Read and parse the body. Large bodies are parsed on a thread, while other requests go on, and one after the
        other, because parsed messages take many times the memory of their text."""
        body = await self._read(request)
        if len(body) <= SMALL_BYTES:
            return parse(body)
        async with self._parsing:
            return await asyncio.to_thread(parse, body)

    async def _read(self, request: Request) -> bytes:
        """Read the body. A body that its headers show to be invalid is rejected without reading it."""
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(415, f"Content-Encoding: {encoding[:80]}: not supported; send uncompressed JSON")
        self._check_size(int(request.headers.get("Content-Length", 0)))
        seconds = self._settings.limits.body_timeout
        try:
            return await asyncio.wait_for(self._read_chunks(request), seconds)
        except asyncio.TimeoutError:
            message = f"the body was not fully received within the limit of {seconds:g} s ({flag('body_timeout')})"
            raise ApiError(408, message, code="request_timeout") from None
        except ClientDisconnect:
            raise ClientDisconnected from None

    async def _read_chunks(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            self._check_size(len(body))
        return bytes(body)

    def _check_size(self, size: int) -> None:
        limit = self._settings.limits.max_request_bytes
        if size > limit:
            message = f"the body exceeds the limit of {limit} bytes ({flag('max_request_bytes')})"
            raise ApiError(413, message, code="request_too_large")


def _request_id(request: Request) -> str:
    """Return the id in the request's headers, or a new one."""
    given = request.headers.get("X-Request-Id")
    if given is not None and not _REQUEST_ID.fullmatch(given):
        raise ApiError(400, "X-Request-Id: must be 1..128 letters, digits or any of -_.:")
    return given or uuid.uuid4().hex


def _route(request: Request) -> str:
    """Return the path of a request, without the prefix of a proxy."""
    return str(request.scope["route"].path_format)


def _trace_context(request: Request) -> dict[str, str]:
    """Return the headers of the W3C trace context, which the server gets as parameters."""
    return {name: request.headers[name] for name in TRACE_CONTEXT if name in request.headers}


class RootPath:
    """ASGI middleware that says which prefix the path of a request may have. Routes are matched without it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path  # not in a copy: the router adds to this one what the metrics need
        await self._app(scope, receive, send)


def create_app(settings: Settings) -> FastAPI:
    """Return the gateway as an ASGI application. Raises ValueError for an invalid server URL."""
    gateway = Gateway(settings)
    # No OpenAPI schema of our own: the API is specified by OpenAI.
    app = FastAPI(lifespan=gateway.lifespan, openapi_url=None, redirect_slashes=False)
    limits = settings.limits
    app.add_middleware(ConcurrencyLimiter, limit=limits.max_open_requests, max_bytes=limits.max_open_bytes)
    app.add_middleware(FramingCheck)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(RootPath, root_path=settings.root_path)
    app.add_middleware(metrics.RequestMetricsMiddleware, metrics=gateway.metrics, log=settings.access_log)
    keyed = APIRouter(dependencies=[Depends(gateway.check_key)])
    keyed.add_api_route("/v1/models", gateway.models, methods=READ)
    keyed.add_api_route("/v1/models/{name:path}", gateway.model, methods=READ)
    keyed.add_api_route("/v1/completions", gateway.completions, methods=["POST"], response_model=None)
    keyed.add_api_route("/v1/chat/completions", gateway.chat_completions, methods=["POST"], response_model=None)
    for path, kind in POOLING_ROUTES.items():
        keyed.add_api_route(path, _pooling_route(gateway, kind), methods=["POST"], response_model=None)
    keyed.add_api_route("/tokenize", gateway.tokenize, methods=["POST"], response_model=None)
    keyed.add_api_route("/detokenize", gateway.detokenize, methods=["POST"], response_model=None)
    keyed.add_api_route("/load", gateway.load, methods=READ)
    app.include_router(keyed)
    for path in ("/health", "/health/ready", "/ping"):
        app.add_api_route(path, gateway.health, methods=[*READ, *(["POST"] if path == "/ping" else [])])
    app.add_api_route("/version", gateway.version, methods=READ)
    app.add_api_route("/live", gateway.live, methods=READ)
    app.add_api_route("/metrics", gateway.show_metrics, methods=READ, response_model=None)
    routes = [route.path.replace(":path", "") for route in (*keyed.routes, *app.routes) if isinstance(route, Route)]
    _add_error_handlers(app, list(dict.fromkeys(routes)))
    return app


def _pooling_route(gateway: Gateway, kind: type[PoolingBody[Any]]) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await gateway.pooling(request, kind)

    return handle


def _add_error_handlers(app: FastAPI, paths: Sequence[str]) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, _HEADERS.get(error.status))

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 404:
            message += f"; the paths are {', '.join(paths)}"
        return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnected)
    async def client_disconnected(request: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=metrics.CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        given = request.headers.get("X-Request-Id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        # uvicorn logs the traceback.
        log.error("request %s: internal error: %s: %s", request_id, type(error).__name__, error)
        message = f"internal error of the gateway; its log has the reason, under the request id {request_id}"
        return JSONResponse(ApiError(500, message).body, 500, {"X-Request-Id": request_id})
