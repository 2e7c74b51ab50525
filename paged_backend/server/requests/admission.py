"""Admission: reads, checks, tokenizes and queues each request, or rejects it.

A request is rejected, in this order: if the engine does not respond (`Health`); if an input or a sampling parameter is
invalid; if its session is busy; if the model is asleep (`ModelAsleep`); if the waiting queue is full (`max_queue_size`,
`QueueFull`) or its tenant has too many open requests (`max_tenant_requests`); if its adapter is unknown, its text is
too long, two parameters exclude each other, or its conversation is invalid. Its client gets the error; nothing is
raised to the server.

A long prompt is read and tokenized in the background (`LongPrompts`): Triton passes requests on one thread, on which
the next ones wait. The lock is held only to count a request and to open its stream.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import (
    GENERATES_NO_TEXT,
    LORA_NOT_ENABLED,
    ONLY_EMBEDS,
    ErrorCode,
    QueueFull,
    RequestError,
    internal_error,
    invalid_argument,
)
from paged_backend.api.limits import SamplingDefaults
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.trace import recorded
from paged_backend.engine.assembly import Assembly
from paged_backend.engine.engine import Engine
from paged_backend.guided.compiler import GrammarCompiler
from paged_backend.server.connections.replicas import Replicas
from paged_backend.server.control_requests import ControlRequests
from paged_backend.server.health import Health
from paged_backend.server.prompts.encoder import PromptEncoder
from paged_backend.server.prompts.sessions import SessionName, Sessions, Turn
from paged_backend.server.requests.arrival import Arrival, StreamBuilder
from paged_backend.server.requests.long_prompts import LongPrompts
from paged_backend.server.responder import Responder
from paged_backend.server.streams.tracing import Tracing
from paged_backend.server.submission import Submission
from paged_backend.server.tenants import Tenants
from paged_backend.server.wire.call import Call, read_call, read_control_request, read_request_id
from paged_backend.server.wire.channel import Channel, send_error
from paged_backend.server.wire.pooling import parse_pooling_sampling
from paged_backend.server.wire.responses import SampleOutput, write_response
from paged_backend.text.tokenizing import SHORT_CHARS

log = logging.getLogger("paged_llm")


class Admission:
    """Admits requests to one engine. `admit` may be called from any thread; requests are queued one at a time."""

    def __init__(
        self,
        config: EngineConfig,
        assembly: Assembly,
        engine: Engine,
        responder: Responder,
        *,
        sessions: Sessions,
        tenants: Tenants,
        grammars: GrammarCompiler,
        health: Health,
        tracing: Tracing,
        replicas: Replicas,
    ):
        limits, loaded = assembly.limits, assembly.loaded
        self._limits = limits
        self._plain_limits = replace(limits, sampling_defaults=SamplingDefaults())
        self._adapters = assembly.adapters
        self._salt_from = config.cache_salt_from
        self._max_queue_size = config.max_queue_size
        self._has_prefix_cache = assembly.scheduler.blocks.caching
        self._has_remote_cache = config.remote_cache_url is not None
        self._engine = engine
        self._responder = responder
        self._sessions = sessions
        self._tenants = tenants
        self._health = health
        self._tracing = tracing
        self._keys = itertools.count()
        self._lock = threading.Lock()  # guards counting a request, from the check of the queue until it is in it
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
        self._replicas = replicas
        self._submission = Submission(engine, grammars, replicas.place)
        self._control = ControlRequests(engine, responder, assembly.adapters, assembly.scheduler.slots)
        self.long_prompts = LongPrompts(
            self._lock,
            self._prompts,
            self._builder,
            engine,
            responder,
            self._submission,
            seconds=config.tokenize_timeout,
            context=limits.max_model_len,
        )

    def stop(self, seconds: float) -> None:
        """Stop tokenizing long prompts, waiting at most this many seconds."""
        self.long_prompts.stop(seconds)

    def admit(self, channel: Channel) -> None:
        """Queue the channel's request, or answer it. Never raises."""
        arrived = time.monotonic()
        with self._rejecting(channel):
            arrival = self._read(channel, arrived)
            if arrival is None:
                return
            with _undo_on_error(arrival.turn):
                if arrival.num_chars > SHORT_CHARS:
                    with self._lock:
                        self._check_capacity(arrival.sampling)
                        self.long_prompts.submit(arrival)
                else:
                    self._queue(arrival)

    def _queue(self, arrival: Arrival) -> None:
        with recorded(arrival.trace, "tokenize"):
            prompt = self._prompts.encode(arrival.prompt())
        stream = self._builder.build(arrival, prompt)
        with self._lock:
            self._check_capacity(arrival.sampling)
            self._engine.announce(stream.request.key)
            self._responder.open(stream)
        self._submission.submit(stream.request)

    @contextmanager
    def _rejecting(self, channel: Channel) -> Iterator[None]:
        """Send an error to the client and count the request as rejected."""
        try:
            yield
        except RequestError as error:
            send_error(channel, error)
            self._responder.count_rejected(error.outcome)
        except Exception as error:
            log.exception("unexpected error while admitting a request")
            send_error(channel, internal_error(error))
            self._responder.count_rejected("error")

    def _read(self, channel: Channel, arrived: float) -> Arrival | None:
        """Read and check a request. Return None if it was answered here."""
        if problem := self._health.problem():
            raise RequestError(ErrorCode.UNAVAILABLE, problem)
        received, limits = channel.received(), self._limits
        if name := read_control_request(*received, input_limits=limits.input_limits):
            request_id = read_request_id(received[1], received[-1], limits.input_limits)
            self._control.answer(name, channel, request_id)
            return None
        salt_from: str | None = self._salt_from
        if channel.has_own_defaults:  # a model of trtllm/, which has made sampling_parameters of request parameters
            salt_from = "sampling_parameters" if salt_from == "parameter" else None
        call = read_call(*received, input_limits=limits.input_limits, salt_from=salt_from)
        defaults = self._plain_limits if channel.has_own_defaults else limits
        if call.pooling_type:
            sampling = parse_pooling_sampling(call.pooling_type.field, call.sampling, defaults)
        elif limits.generates:
            sampling = SamplingParams.parse(call.sampling, defaults)
        else:
            problem = f"{GENERATES_NO_TEXT}; use classification_request"
            if not limits.classification:
                problem = f"{ONLY_EMBEDS}; use embedding_request"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{call.prompt_field}: {problem}")
        turn = self._begin_turn(call, sampling) if call.sequence else None
        if call.only_ends_session and turn:
            turn.finish([], "")
            channel.send(write_response(call, [SampleOutput("", "stop", ())], prompt_token_ids=()), final=True)
            return None
        with _undo_on_error(turn):
            self._check_capacity(sampling)  # before the work of the further checks, and again with the lock
            return self._check(channel, arrived, call, sampling, turn)

    def _check_capacity(self, sampling: SamplingParams) -> None:
        """Raise ModelAsleep if the model sleeps, QueueFull if the waiting queue is full, or TenantLimitReached if the
        tenant's share is."""
        self._engine.sleep_mode.check()
        ended = self.long_prompts.ended_tenants()  # tenants whose text is still in memory
        waiting, tenant = self._engine.waiting + self._replicas.waiting + len(ended), sampling.cache_salt
        if self._max_queue_size and waiting >= self._max_queue_size:
            raise QueueFull(waiting)
        self._tenants.check(tenant, ended.count(tenant))

    def _check(
        self, channel: Channel, arrived: float, call: Call, sampling: SamplingParams, turn: Turn | None
    ) -> Arrival:
        """Check everything that can be checked before the prompt is tokenized."""
        _check_combination(call, sampling)
        if sampling.prefill_only and not self._has_remote_cache:
            raise invalid_argument("prefill_only", True, "needs a remote cache, which is off (remote_cache_url)")
        sampling = self._prompts.expand_word_bias(sampling)
        self._check_adapter(sampling.lora_name)
        if call.prompt is not None:
            self._prompts.check_length(call.prompt_field, call.prompt)
        trace = self._tracing.begin(call, arrived)
        return Arrival(next(self._keys), call, channel, arrived, sampling, turn, trace=trace)

    def _check_adapter(self, name: str | None) -> None:
        if name is None:
            return
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
            field = next(one for one in ("n", "best_of", "beam_width") if (getattr(sampling, one) or 1) > 1)
            reason = "must be 1 in a session, which continues a single output"
            raise invalid_argument(field, getattr(sampling, field), reason)
        session = SessionName(sampling.cache_salt, call.sequence.id)
        return self._sessions.begin(session, start=call.sequence.start, end=call.sequence.end)


@contextmanager
def _undo_on_error(turn: Turn | None) -> Iterator[None]:
    """Restore the session if its turn fails."""
    try:
        yield
    except BaseException:
        if turn:
            turn.undo()
        raise


def _check_combination(call: Call, sampling: SamplingParams) -> None:
    """Raise RequestError for sampling parameters that this kind of request cannot have."""
    if call.stream and sampling.selects_best_of:
        reason = f"must be n={sampling.n} when streaming: the best samples are known only at the end"
        raise invalid_argument("best_of", sampling.best_of, reason)
    if sampling.logits_digest and not call.return_receipt:
        raise invalid_argument("logits_digest", True, "needs return_receipt, since the receipt has the digest")
    if call.is_chat and sampling.echo:
        raise invalid_argument("echo", True, "has no effect with messages; leave it out")
