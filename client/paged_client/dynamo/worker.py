"""A Dynamo worker in front of one server: registers the server's models, and serves Dynamo's requests with them.

    Dynamo's frontend -- token ids --> worker -- gRPC --> server

Needs the extra `dynamo`. Dynamo's addresses and further settings come from its environment variables (DYN_...).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from dynamo._core import (
    Context,
    DistributedRuntime,
    Endpoint,
    get_reasoning_parser_names,
    get_tool_parser_names,
)
from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    WorkerType,
    register_model,
    unregister_model,
)
from dynamo.llm.exceptions import Cancelled, CannotConnect, EngineShutdown, InvalidArgument, Unknown

from paged_backend.api.errors import ConfigError
from paged_backend.files.tokenizer_files import templates
from paged_client.async_client import AsyncClient
from paged_client.async_stream import AsyncStream
from paged_client.connection_errors import UnreachableError
from paged_client.dynamo.settings import WorkerSettings
from paged_client.dynamo.translation import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    Chunk,
    Chunks,
    Request,
    embedding_answer,
    embedding_inputs,
    is_probe,
    parser_for,
    probe_request,
    sampling_of,
)
from paged_client.types import ModelInfo, PagedError

POLL_SECONDS = 1.0  # time between two looks at a server
POLL_TIMEOUT = 10.0  # time for its answer, after which it is taken for dead
GRACE_SECONDS = 5.0  # time for which requests may still arrive after a worker has left the discovery
WORKER_TYPES = {"aggregated": WorkerType.Aggregated, "prefill": WorkerType.Prefill, "decode": WorkerType.Decode}
NEEDS = {"aggregated": None, "prefill": [[WorkerType.Decode]], "decode": [[WorkerType.Prefill], [WorkerType.Decode]]}
# Errors of a server that has failed: the request can be run by another one.
_SERVER_FAILED = ("the engine died", "is not healthy", "the engine has stopped", "ended or cannot be reached")


def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or Ctrl-C, and return the exit code."""
    import uvloop  # a requirement of Dynamo's runtime

    return uvloop.run(_Worker(settings).run())


class _Worker:
    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        settings, loop = self._settings, asyncio.get_running_loop()
        if problem := _unknown_parser(settings):
            print(f"paged dynamo: {problem}", file=sys.stderr, flush=True)
            return 1
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        async with AsyncExitStack() as stack:
            models = []
            for name in settings.models:
                client = await stack.enter_async_context(AsyncClient(settings.url, name))
                info = await self._wait_for(client)
                if info is None:
                    return 0
                models.append((name, client, info))
            runtime = DistributedRuntime(
                loop, settings.discovery, settings.request_plane, event_plane=settings.event_plane
            )
            stack.callback(runtime.shutdown)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paged-dynamo-")))
            served = [ServedModel(settings, runtime, *model, scratch) for model in models]
            await asyncio.gather(*(model.start() for model in served))
            runtime.set_health_status(True)
            names = ", ".join(model.name for model in served)
            print(f"Serving {names} of {settings.url} as a Dynamo worker ({settings.role}).", flush=True)
            ended = [asyncio.ensure_future(model.serve()) for model in served]
            watch = asyncio.ensure_future(self._watch(runtime, served))
            stop = asyncio.ensure_future(self._stopping.wait())
            try:
                await asyncio.wait([*ended, watch, stop], return_when=asyncio.FIRST_COMPLETED)
                for task in (*ended, watch):
                    if task.done() and (error := task.exception()):
                        print(f"paged dynamo: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                        return 1
                watch.cancel()  # it would join the discovery again
                await asyncio.wait([watch])
                await self._drain(runtime, served, ended)
            finally:
                for running in (*ended, watch, stop):
                    running.cancel()
        return 0

    async def _wait_for(self, client: AsyncClient) -> ModelInfo | None:
        """Return what the server says of its model, as soon as it is ready. None if this process is to stop."""
        waiting = False
        while not self._stopping.is_set():
            try:
                return await client.model_info(timeout=POLL_TIMEOUT)
            except PagedError as error:
                if error.code not in ("UNAVAILABLE", "NOT_FOUND", "DEADLINE_EXCEEDED"):
                    raise
                if not waiting:
                    print(f"Waiting for {self._settings.url}: {error.message}", file=sys.stderr, flush=True)
                waiting = True
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), POLL_SECONDS)
        return None

    async def _watch(self, runtime: DistributedRuntime, served: list[ServedModel]) -> None:
        """Publish the load of the server, and leave Dynamo's discovery while it does not answer."""
        while True:
            ready = all(await asyncio.gather(*(model.poll() for model in served)))
            runtime.set_health_status(ready)
            await asyncio.sleep(POLL_SECONDS)

    async def _drain(
        self, runtime: DistributedRuntime, served: list[ServedModel], ended: Sequence[asyncio.Future[None]]
    ) -> None:
        """Leave the discovery, and wait for open requests."""
        print("Stopping. Open streams may finish first.", file=sys.stderr, flush=True)
        await asyncio.gather(*(model.leave() for model in served))
        grace = float(os.environ.get("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS") or GRACE_SECONDS)
        if any(model.num_open for model in served):
            await asyncio.sleep(grace)
        while any(model.num_open for model in served):
            await asyncio.sleep(0.05)
        runtime.shutdown()
        await asyncio.wait(ended, timeout=grace)


class ServedModel:
    """One model of a server, as a Dynamo endpoint."""

    def __init__(
        self,
        settings: WorkerSettings,
        runtime: DistributedRuntime,
        model: str,
        client: AsyncClient,
        info: ModelInfo,
        scratch: Path,
    ) -> None:
        self.name = settings.served_name or model
        self.num_open = 0
        self._settings, self._client, self._info = settings, client, info
        self._scratch = scratch
        self._role = settings.role
        component = settings.component or ("prefill" if self._role == "prefill" else "backend")
        endpoint = "generate" if model == settings.models[0] else re.sub(r"[^a-z0-9_-]", "_", model.lower())
        self._endpoint: Endpoint = runtime.endpoint(f"{settings.namespace}.{component}.{endpoint}")
        self._load = WorkerMetricsPublisher()
        self._events: KvEventPublisher | None = None
        self._adapters: set[str] = set()
        self._present = True

    @property
    def _generates(self) -> bool:
        return "generate" in self._info.tasks

    async def start(self) -> None:
        """Publish load and events."""
        if not self._settings.publishes:
            return
        await self._load.create_endpoint(self._endpoint)
        source = self._info.kv_events or {}
        address = self._settings.kv_events or source.get("endpoint", "").replace("*", "127.0.0.1")
        if address and self._generates:
            self._events = KvEventPublisher(
                self._endpoint,
                kv_block_size=self._info.block_size,
                zmq_endpoint=address,
                zmq_topic=source.get("topic", ""),
                enable_local_indexer=self._role != "decode",
            )

    async def serve(self) -> None:
        """Register the model, and serve requests until the runtime is shut down."""
        handler = self.generate if self._generates else self.embed
        probe = probe_request(1) if self._generates else None
        serving = asyncio.ensure_future(
            self._endpoint.serve_endpoint(
                handler,
                graceful_shutdown=True,
                metrics_labels=[("model", self.name)],
                health_check_payload=probe,
            )
        )
        try:
            await self._register()
            await serving
        except BaseException:
            serving.cancel()
            raise

    async def _register(self, adapter: str | None = None) -> None:
        info = self._info
        config = ModelRuntimeConfig()
        config.context_length = info.max_model_len
        config.total_kv_blocks = info.num_blocks
        config.max_num_seqs = info.max_num_seqs
        config.max_num_batched_tokens = info.max_num_batched_tokens
        config.tool_call_parser = self._parser(self._settings.tool_call_parser, TOOL_CALL_PARSERS)
        config.reasoning_parser = self._parser(self._settings.reasoning_parser, REASONING_PARSERS)
        config.kv_event_publishing_enabled = self._events is not None
        config.enable_local_indexer = self._role != "decode"
        path = str(self._settings.model_path or info.path)
        await register_model(
            ModelInput.Tokens if self._generates else ModelInput.Text,
            self._model_type(),
            self._endpoint,
            path,
            adapter or self.name,
            worker_type=WORKER_TYPES[self._role],
            kv_cache_block_size=info.block_size,
            runtime_config=config,
            custom_template_path=self._template_file(Path(path)),
            lora_name=adapter,
            base_model_path=path if adapter else None,
            max_gpu_lora_count=info.max_loras or None,
            needs=NEEDS[self._role],
            ignore_weights=True,
        )

    def _model_type(self) -> ModelType:
        if not self._generates:
            return ModelType.Embedding
        if self._role == "prefill":
            return ModelType.Prefill
        return ModelType.Chat | ModelType.Completions if self._info.chat_template else ModelType.Completions

    def _parser(self, wanted: str | None, known: Any) -> str | None:
        if wanted is not None:
            return None if wanted == "none" else wanted
        return parser_for(self._info.chat_template, known)

    def _template_file(self, directory: Path) -> str | None:
        """Return a file with the chat template that the server uses. None if it is the one of the model's directory,
        which a frontend on another machine can read."""
        if not self._info.chat_template or _has_template(directory, self._info.chat_template):
            return None
        file = self._scratch / f"{self.name.replace('/', '_')}.jinja"
        file.write_text(self._info.chat_template, encoding="utf-8")
        return str(file)

    async def poll(self) -> bool:
        """Publish the load, and follow the server's adapters. Return whether the server can answer requests."""
        try:
            pool = await self._client.pool_map(timeout=POLL_TIMEOUT)
            if pool.sleeping:
                await self.leave()
                return False
            if self._settings.publishes:
                self._load.publish(0, kv_used_blocks=pool.used + pool.pinned)
            if self._info.max_loras and self._generates:
                await self._follow_adapters()
        except PagedError:
            await self.leave()
            return False
        if not self._present:
            await self._endpoint.register_endpoint_instance()
            if self._role == "prefill":
                await self._register()
            self._present = True
        return True

    async def _follow_adapters(self) -> None:
        listed = {adapter.name for adapter in await self._client.adapters(timeout=POLL_TIMEOUT) if not adapter.error}
        for name in listed - self._adapters:
            await self._register(name)
            self._adapters.add(name)
        for name in self._adapters - listed:
            await unregister_model(self._endpoint, name)
            self._adapters.discard(name)

    async def leave(self) -> None:
        """Leave the discovery, so that no further requests arrive."""
        if self._present:
            self._present = False
            await self._endpoint.unregister_endpoint_instance()
            if self._role == "prefill":  # decode workers then compute prompts themselves
                await unregister_model(self._endpoint)

    async def generate(self, request: Request, context: Context) -> AsyncIterator[Chunk]:
        """Yield the chunks of a request."""
        try:
            sampling = sampling_of(request)
            if (name := request.get("model")) in self._adapters:
                sampling.setdefault("lora_name", name)
            prefill = self._role == "prefill" and not is_probe(request)
            if prefill:
                sampling = _prefill_sampling(sampling)
            sampling |= {"return_token_ids": True, **_trace_context(context)}
            stream = self._client.stream(request["token_ids"], request_id=context.id(), **sampling)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        chunks = Chunks(sampling.get("n", 1), sampling.get("logprobs"))
        async with _OpenRequest(self, stream, context):
            try:
                async for delta in stream:
                    chunk = chunks.add(delta)
                    if chunk is not None:
                        yield chunk
            except PagedError as error:
                failure = _dynamo_error(error)
                if isinstance(failure, EngineShutdown):
                    await self.leave()  # until the server answers again
                    if chunks.are_mixed:  # Dynamo would continue from all tokens, as if they were of one sample
                        failure = Unknown(str(error))
                raise failure from None
            if stream.completion is not None and (chunk := chunks.last(stream.completion)) is not None:
                if prefill:
                    stored = (stream.completion.receipt or {}).get("stored_tokens", 0)
                    chunk["disaggregated_params"] = {"stored_tokens": stored}
                yield chunk  # before the request counts as ended, so that a worker that drains sends it

    async def embed(self, request: Request, context: Context) -> AsyncIterator[Chunk]:
        """Yield the answer to an embedding request."""
        self.num_open += 1
        try:
            inputs = embedding_inputs(request)
            answers = await asyncio.gather(
                *(self._client.embed(one, dimensions=request.get("dimensions")) for one in inputs)
            )
            num_tokens = sum(answer.num_input_tokens for answer in answers)
            yield embedding_answer(self.name, [answer.values for answer in answers], num_tokens)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        except PagedError as error:
            raise _dynamo_error(error) from None
        finally:
            self.num_open -= 1


class _OpenRequest:
    """Cancels a stream with its Dynamo request, and when the block is left."""

    def __init__(self, model: ServedModel, stream: AsyncStream, context: Context) -> None:
        self._model, self._stream, self._context = model, stream, context

    async def __aenter__(self) -> None:
        self._model.num_open += 1
        self._watch = asyncio.ensure_future(self._cancel())

    async def _cancel(self) -> None:
        await self._context.async_killed_or_stopped()
        self._stream.cancel()

    async def __aexit__(self, *reason: object) -> None:
        self._watch.cancel()
        self._stream.cancel()
        self._model.num_open -= 1


def _unknown_parser(settings: WorkerSettings) -> str | None:
    """Return what is wrong with the parsers of the settings."""
    for flag, name, known in (
        ("--tool-call-parser", settings.tool_call_parser, get_tool_parser_names()),
        ("--reasoning-parser", settings.reasoning_parser, get_reasoning_parser_names()),
    ):
        if name not in (None, "none", *known):
            return f"{flag} {name}: must be none, {', '.join(sorted(known))}"
    return None


def _has_template(directory: Path, template: str) -> bool:
    """Return whether this is the only chat template in a directory with a tokenizer."""
    with suppress(ConfigError, OSError):
        return templates(directory) == [template]
    return False


def _prefill_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with which a prefill server computes a prompt and stores its blocks."""
    kept = ("cache_salt", "lora_name", "priority")
    return {name: sampling[name] for name in kept if name in sampling} | {"prefill_only": True}


def _trace_context(context: Context) -> dict[str, str]:
    headers = context.trace_headers() or {}
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}


def _dynamo_error(error: PagedError) -> Exception:
    """Return Dynamo's error. Requests move to another worker after CannotConnect and EngineShutdown."""
    message = str(error)
    if error.code in ("INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED"):
        return InvalidArgument(error.message)
    if error.code == "CANCELLED":
        return Cancelled(error.message)
    if isinstance(error, UnreachableError) or any(text in message for text in _SERVER_FAILED):
        return EngineShutdown(message)
    return CannotConnect(message) if error.code == "UNAVAILABLE" else Unknown(message)


if __name__ == "__main__":
    sys.exit(run(WorkerSettings(**json.loads(sys.argv[1]))))
