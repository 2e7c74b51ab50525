"""Admission: reads, checks, tokenizes and queues each request, or rejects it.

A request is rejected, in this order: if the engine does not respond; if an input or a sampling parameter is invalid; if
its session is busy; if the model is asleep (`ModelAsleep`); if the waiting queue is full (`max_queue_size`,
`QueueFull`) or its tenant has too many open requests (`max_tenant_requests`); if its adapter is unknown, its text is
too long, two parameters exclude each other, or its conversation is invalid. Its client gets the error; nothing is
raised to the server. A tenant is a `cache_salt`; requests without one share a tenant.

A long prompt is read and tokenized in the background (`LongPrompts`), and a grammar is compiled there: Triton passes
requests on one thread, on which the next ones wait. The lock is held only to count a request and to open its stream.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import (
    GENERATES_NO_TEXT,
    LORA_NOT_ENABLED,
    ONLY_EMBEDS,
    ErrorCode,
    QueueFull,
    RequestError,
    TenantLimitReached,
    internal_error,
    invalid_argument,
)
from paged_backend.api.guide import Guide
from paged_backend.api.limits import SamplingDefaults
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.trace import recorded
from paged_backend.engine.assembly import Assembly
from paged_backend.engine.core import Announcement
from paged_backend.engine.engine import Engine
from paged_backend.engine.router import Router
from paged_backend.guided.compiler import GrammarCompiler
from paged_backend.server.connections.replicas import Replicas
from paged_backend.server.prompts.encoder import EncodedPrompt, Prompt, PromptEncoder
from paged_backend.server.prompts.encoder_process import PromptProcess
from paged_backend.server.prompts.sessions import SessionName, Sessions, Turn
from paged_backend.server.streams.responder import Responder
from paged_backend.server.streams.stream import Arrival, Stream, StreamBuilder
from paged_backend.server.streams.tracing import Tracing
from paged_backend.server.wire.call import Call, read_call, read_control_request, read_request_id
from paged_backend.server.wire.channel import Channel, Received, respond, send_error
from paged_backend.server.wire.pooling import parse_pooling_sampling
from paged_backend.server.wire.responses import Response, SampleOutput, write_json, write_response
from paged_backend.text import chat_templates
from paged_backend.text.answers import ANSWER_PARTS
from paged_backend.text.tokenizing import LONG_CHARS, SHORT_CHARS
from paged_backend.utils.worker import BackgroundWorker

log = logging.getLogger("paged_llm")

TOKEN_CHARS = 4  # characters of a token of English text


class Admission:
    """Admits requests to one engine. `admit` may be called from any thread; requests are queued one at a time."""

    def __init__(
        self,
        config: EngineConfig,
        assembly: Assembly,
        router: Router,
        responder: Responder,
        sessions: Sessions,
        grammars: GrammarCompiler,
        *,
        problem: Callable[[], str | None],
        tracing: Tracing | None,
        replicas: Replicas | None,
    ):
        """problem: returns why requests cannot be answered; None if they can."""
        limits, loaded = assembly.limits, assembly.loaded
        self._limits = limits
        self._plain_limits = replace(limits, sampling_defaults=SamplingDefaults())
        self._adapters = assembly.adapters
        self._adapter_slots = assembly.scheduler.slots
        self._salt_from = config.cache_salt_from
        self._max_queue_size = config.max_queue_size
        self._max_tenant_requests = config.max_tenant_requests
        self._has_prefix_cache = assembly.scheduler.blocks.caching
        self._has_remote_cache = config.remote_cache_url is not None
        self._router = router
        self._engine = router.own
        self._responder = responder
        self._sessions = sessions
        self._grammars = grammars
        self._problem = problem
        self._tracing = tracing
        self._replicas = replicas
        self._model_info = _model_info(config, assembly)
        self._keys = itertools.count()
        self._lock = threading.Lock()  # held from the check of the queue until the request is in it
        self._prompts = PromptEncoder(
            loaded.tokenizer,
            limits,
            max_chars=config.limits.max_prompt_chars,
            template_timeout=config.chat_template_timeout,
            typed_tokens=config.special_tokens_in_messages,
        )
        self._builder = StreamBuilder(
            loaded.tokenizer,
            loaded.spec.eos_ids,
            limits,
            self._prompts,
            seed=config.seed,
            max_seconds=config.request_timeout or math.inf,
        )
        self.long_prompts = LongPrompts(
            self._lock,
            self._prompts,
            self._builder,
            router.own,
            responder,
            self.submit,
            seconds=config.tokenize_timeout,
            context=limits.max_model_len,
        )

    def stop(self, seconds: float) -> None:
        """Stop tokenizing long prompts, waiting at most this many seconds."""
        self.long_prompts.stop(seconds)

    def admit(self, channel: Channel) -> None:
        """Queue the channel's request, or answer it. Never raises."""
        arrived, turn = time.monotonic(), None
        try:
            if problem := self._problem():
                raise RequestError(ErrorCode.UNAVAILABLE, problem)
            received, input_limits = channel.received(), self._limits.input_limits
            if name := read_control_request(*received, input_limits=input_limits):
                request_id = read_request_id(received.parameters, received.request_id, input_limits)
                self._answer_control_request(name, channel, request_id)
                return
            call, sampling = self._read(received, own_defaults=channel.has_own_defaults)
            if call.sequence:
                turn = self._begin_turn(call, sampling)
                if call.only_ends_session:
                    turn.finish([], {})
                    ended = Response(call.returns, [SampleOutput("", "stop", ())], prompt_token_ids=())
                    channel.send(write_response(ended), final=True)
                    return
            self._check_capacity(sampling)  # before the work of the further checks, and again with the lock
            sampling = self._check(call, sampling)
            trace = self._tracing.begin(call, arrived) if self._tracing else None
            self._queue(Arrival(next(self._keys), call, channel, arrived, sampling, turn, trace=trace))
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("unexpected error while admitting a request")
                error = internal_error(error)
            if turn and not turn.is_over:
                turn.undo()
            send_error(channel, error)
            self._responder.count("finished", label=error.outcome)

    def _read(self, received: Received, *, own_defaults: bool) -> tuple[Call, SamplingParams]:
        """Return a request and its sampling parameters. Raises RequestError if they are invalid."""
        limits = self._limits
        salt_from: str | None = self._salt_from
        if own_defaults:  # a model of trtllm/, which has made sampling_parameters of request parameters
            salt_from = "sampling_parameters" if salt_from == "parameter" else None
        call = read_call(*received, input_limits=limits.input_limits, salt_from=salt_from)
        defaults = self._plain_limits if own_defaults else limits
        if call.pooling_type:
            return call, parse_pooling_sampling(call.pooling_type.field, call.sampling, defaults)
        if limits.generates:
            return call, SamplingParams.parse(call.sampling, defaults)
        problem = f"{GENERATES_NO_TEXT}; use classification_request"
        if not limits.classification:
            problem = f"{ONLY_EMBEDS}; use embedding_request"
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{call.prompt_field}: {problem}")

    def _check(self, call: Call, sampling: SamplingParams) -> SamplingParams:
        """Check everything that can be checked before the prompt is tokenized. Return the complete parameters."""
        _check_combination(call, sampling)
        self._builder.answers.check(call.returns)
        if sampling.prefill_only and not self._has_remote_cache:
            raise invalid_argument("prefill_only", True, "needs a remote cache, which is off (remote_cache_url)")
        if sampling.word_bias:
            sampling = self._prompts.expand_word_bias(sampling)
        if sampling.lora_name is not None:
            self.check_adapter(sampling.lora_name)
        if call.prompt is not None:
            self._prompts.check_length(call.prompt_field, call.prompt)
        return sampling

    def check_adapter(self, name: str) -> None:
        """Raise RequestError if the engine cannot use this LoRA adapter."""
        if self._adapters is None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, LORA_NOT_ENABLED, verbatim=True)
        self._adapters.check(name)

    def _begin_turn(self, call: Call, sampling: SamplingParams) -> Turn:
        """Begin a turn of a session. Raises RequestError for a request that a session cannot have."""
        assert call.sequence
        if not self._has_prefix_cache:
            reason = "sessions need the prefix cache, which is off (enable_prefix_caching)"
            raise invalid_argument("sequence_id", call.sequence.id, reason)
        if sampling.truncate_prompt_tokens is not None:
            reason = "a session keeps all of its prompt; leave it out"
            raise invalid_argument("truncate_prompt_tokens", sampling.truncate_prompt_tokens, reason)
        if sampling.prefill_only:
            raise invalid_argument("prefill_only", True, "must be false in a session, whose turns have outputs")
        if sampling.num_seqs > 1:
            field = next(name for name in ("n", "best_of", "beam_width") if (getattr(sampling, name) or 1) > 1)
            reason = "must be 1 in a session, which continues a single output"
            raise invalid_argument(field, getattr(sampling, field), reason)
        session = SessionName(sampling.cache_salt, call.sequence.id)
        return self._sessions.begin(session, start=call.sequence.start, end=call.sequence.end)

    def _check_capacity(self, sampling: SamplingParams) -> None:
        """Raise ModelAsleep if the model sleeps, QueueFull if the waiting queue is full, or TenantLimitReached if the
        tenant has too many open requests."""
        self._engine.sleep_mode.check()
        # Requests whose stream has ended count while their text is still in memory.
        ended = [stream.tenant for stream in self.long_prompts.pending if stream.ended]
        waiting, tenant, limit = self._engine.waiting + len(ended), sampling.cache_salt, self._max_tenant_requests
        if self._replicas:
            waiting += self._replicas.waiting
        if self._max_queue_size and waiting >= self._max_queue_size:
            raise QueueFull(waiting)
        if limit and self._responder.num_open(tenant) + ended.count(tenant) >= limit:
            raise TenantLimitReached(limit)

    def _queue(self, arrival: Arrival) -> None:
        """Tokenize the prompt, open the stream and submit the request; a long prompt is tokenized later."""
        if arrival.num_chars > SHORT_CHARS:
            with self._lock:
                self._check_capacity(arrival.sampling)
                self.long_prompts.submit(arrival)
            return
        with recorded(arrival.trace, "tokenize"):
            prompt = self._prompts.encode(arrival.prompt())
        stream = self._builder.build(arrival, prompt)
        with self._lock:
            self._check_capacity(arrival.sampling)
            announcement = self._engine.announce(arrival.key)
            self._responder.open(stream)
        self.submit(replace(stream.request, announcement=announcement))

    def submit(self, request: GenerateRequest, *, here: bool = False) -> None:
        """Give an announced request, whose stream is open, to a replica or to this process's engine, after its grammar
        is compiled. Never raises: a failure ends the request with an error.

        here: whether to keep it in this process.
        """
        try:
            if self._replicas and not here and self._replicas.place(request):
                return
            if request.sampling.structure is None:
                self._router.deliver(request)
            else:
                self._compile_and_deliver(request)
        except Exception as error:
            log.exception("request %d: could not be queued", request.key)
            self._engine.reject(request.key, internal_error(error))

    def _compile_and_deliver(self, request: GenerateRequest) -> None:
        """Compile the request's grammar in the background, then deliver. The request can be cancelled meanwhile."""
        key, sampling = request.key, request.sampling
        assert sampling.structure is not None

        def compiled(guides: tuple[Guide, ...] | RequestError) -> None:
            if isinstance(guides, RequestError):
                self._engine.reject(key, guides)
            else:
                self._router.deliver(replace(request, guides=guides))

        self._engine.emit_stats()
        self._grammars.compile(
            sampling.structure,
            sampling.num_samples,
            compiled,
            tenant=sampling.cache_salt,
            still_wanted=lambda: self._engine.is_pending(key),
        )

    def _answer_control_request(self, name: str, channel: Channel, request_id: str) -> None:
        """Answer one of CONTROL_REQUESTS. Raises RequestError if it is incomplete."""
        match name:
            case "pool_map":
                self._responder.request_pool_map(channel)
                self._engine.snapshot_pool()
            case "adapters" if self._adapters:  # the registry changes only on its own thread
                self._adapters.run(lambda: respond(channel, self._list_adapters))
            case "adapters":
                respond(channel, self._list_adapters)
            case "model_info":
                respond(channel, lambda: write_json("model_info", self._model_info))
            case "stop_request" if request_id:
                self._responder.cancel(channel, request_id)
            case _:
                raise RequestError(
                    ErrorCode.INVALID_ARGUMENT,
                    "stop_request: has no request id (`id` over HTTP); set it to that of the request to end",
                )

    def _list_adapters(self) -> dict[str, np.ndarray]:
        adapters = self._adapters.describe(self._adapter_slots.resident) if self._adapters else []
        return write_json("adapters", adapters)


def _model_info(config: EngineConfig, assembly: Assembly) -> dict[str, Any]:
    """Return the values of the output `model_info`."""
    limits, loaded = assembly.limits, assembly.loaded
    events = config.kv_events_config
    has_task = {
        "generate": limits.generates,
        "embed": limits.embedding is not None,
        "classify": limits.classification is not None,
    }
    return {
        "path": str(loaded.path),
        "tasks": [task for task, has in has_task.items() if has],
        "chat_template": chat_templates.default_source(loaded.tokenizer) if limits.generates else None,
        "max_model_len": limits.max_model_len,
        "block_size": limits.block_size,
        "num_blocks": limits.num_pages,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_loras": loaded.lora.slots if loaded.lora else 0,
        "kv_events": {"endpoint": events.endpoint, "topic": events.topic} if events and events.is_enabled else None,
        "remote_cache": config.remote_cache_url is not None,
    }


class LongPrompts:
    """Requests whose long prompts are encoded in the background, one after the other, on two threads: one for prompts
    of up to LONG_CHARS characters, and one for longer ones, which a separate process encodes.

    Their streams are open already: a timeout, a cancellation or a stop_request can end them. A request whose stream has
    ended counts as waiting until the tokenizer has processed it, because its text stays in memory.
    """

    def __init__(
        self,
        admission_lock: threading.Lock,
        prompts: PromptEncoder,
        builder: StreamBuilder,
        engine: Engine,
        responder: Responder,
        submit: Callable[[GenerateRequest], None],
        *,
        seconds: float,
        context: int,
    ):
        """admission_lock: guards `pending`; its holder admits one request at a time.
        submit: gives an announced request to the engine.
        seconds: time limit for a prompt above LONG_CHARS.
        context: `max_model_len`. If such prompts fit into it, their process starts at once."""
        self.pending: list[Stream] = []
        self._admission_lock = admission_lock
        self._prompts = prompts
        self._builder = builder
        self._engine = engine
        self._responder = responder
        self._submit = submit
        self._process = PromptProcess(prompts, seconds)
        self._worker, self._long_worker = BackgroundWorker("prompts"), BackgroundWorker("long prompts")
        if context * TOKEN_CHARS > LONG_CHARS:
            self._long_worker.submit(self._process.start)

    def submit(self, arrival: Arrival) -> None:
        """Open the request's stream and encode its prompt later. The caller holds the admission lock."""
        stream = self._builder.build_untokenized(arrival)
        announcement = self._engine.announce(arrival.key)
        self._responder.open(stream)
        self._engine.emit_stats()
        self.pending.append(stream)
        if arrival.num_chars > LONG_CHARS:
            self._long_worker.submit(self._encode, arrival, announcement, stream, self._process.encode)
        else:
            self._worker.submit(self._encode, arrival, announcement, stream, self._prompts.encode)

    def stop(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for worker in (self._worker, self._long_worker):
            worker.stop(deadline - time.monotonic())
        self._process.stop()

    def _encode(
        self,
        arrival: Arrival,
        announcement: Announcement,
        opened: Stream,
        encode: Callable[[Prompt], EncodedPrompt],
    ) -> None:
        tokenized: Stream | None = None
        error: RequestError | None = None
        try:
            if not opened.ended:
                with recorded(arrival.trace, "tokenize"):
                    prompt = encode(arrival.prompt())
                tokenized = self._builder.build(arrival, prompt)
        except RequestError as failure:
            error = failure.with_traceback(None)  # which has this frame, and would keep the text in memory with it
        except Exception as failure:
            log.exception("a long prompt could not be encoded")
            error = internal_error(failure)
        with self._admission_lock:  # counted before the client gets a response and may send its next request
            self.pending.remove(opened)
        if error:
            self._engine.reject(arrival.key, error)
        elif tokenized:
            self._responder.set_prompt(opened, tokenized)
            self._submit(replace(tokenized.request, announcement=announcement))


def _check_combination(call: Call, sampling: SamplingParams) -> None:
    """Raise RequestError for sampling parameters that this kind of request cannot have."""
    if call.stream and sampling.selects_best_of:
        reason = f"must be n={sampling.n} when streaming: the best samples are known only at the end"
        raise invalid_argument("best_of", sampling.best_of, reason)
    if sampling.logits_digest and "receipt" not in call.returns:
        raise invalid_argument("logits_digest", True, "needs return_receipt, since the receipt has the digest")
    if "text_offsets" in call.returns and (parts := sorted(ANSWER_PARTS & call.returns)):
        reason = f"has no effect with return_{parts[0]}, which takes text out of text_output; leave one of the two out"
        raise invalid_argument("return_text_offsets", True, reason)
    if call.is_chat and sampling.echo:
        raise invalid_argument("echo", True, "has no effect with messages; leave it out")
