"""The only file that wires things together: options to a running engine, a Triton request to a stream."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ErrorCode, QueueFull, RequestError, internal_error, invalid_argument
from paged_backend.api.guide import Guide
from paged_backend.api.request import GenerateRequest, check_prompt_length
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import assemble
from paged_backend.guided.compiler import GrammarCompiler
from paged_backend.server import faults
from paged_backend.server.channel import Channel, ServerChannel
from paged_backend.server.embedding import parse_embedding_sampling
from paged_backend.server.local_listener import Listener
from paged_backend.server.metrics import Metrics
from paged_backend.server.responder import Responder
from paged_backend.server.sessions import SessionName, Sessions, Turn
from paged_backend.server.stream import Sample, Stream
from paged_backend.server.tenants import Tenants
from paged_backend.server.wire.call import Call
from paged_backend.server.wire.control import read_control_request, write_adapters
from paged_backend.server.wire.parameters import read_request_id
from paged_backend.server.wire.read import read_call
from paged_backend.server.wire.write import SampleOutput, write_response
from paged_backend.text.beam_stops import ending
from paged_backend.text.conversation import Message, check_count
from paged_backend.text.detokenizer import Detokenizer
from paged_backend.text.stop_tokens import StopTokens
from paged_backend.text.templates import render
from paged_backend.text.tokenizing import LONG_CHARS, PromptTokenizer, decoder
from paged_backend.utils.worker import BackgroundWorker

log = logging.getLogger("paged_llm")

DRAIN_SHARE = 0.7  # of stop_timeout, for what other models have open; the rest is for the engine's own end


Encode = Callable[..., list[int]]  # one of the two of Tokenizing


@dataclass(frozen=True, eq=False)
class Arrival:
    """A request that was read and checked, and whose prompt is to be tokenized."""

    key: int  # of the request that comes of it
    call: Call
    channel: Channel
    arrived: float  # time.monotonic()
    sampling: SamplingParams
    turn: Turn | None
    messages: list[Message] | None  # those of a session's earlier turns among them
    size: int  # characters of the text, or of the conversation as JSON


class Service:
    """One model instance. `submit` never raises: whatever is wrong with a request goes back to its client."""

    def __init__(self, config: EngineConfig, pb_utils: Any, labels: dict[str, str], listing: Path | None = None):
        """`pb_utils` is the module that the server gives its Python models, `labels` go on every metric, `listing` is
        the file that lists adapters."""
        asked = faults.read()
        self._pb_utils = pb_utils
        self._assembly = assemble(config, listing)
        limits = self._assembly.limits
        metrics = Metrics(
            pb_utils,
            labels,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            memory=self._assembly.memory,
            enabled=not config.disable_log_stats,
        )
        self._tokenizer = self._assembly.loaded.tokenizer
        # No text that fits is longer, so a longer one need not be tokenized, which takes seconds for megabytes.
        self._longest_text = self._assembly.limits.max_model_len * max(map(len, self._tokenizer.get_vocab()))
        self._longest_text = min(self._longest_text, config.limits.max_prompt_chars or self._longest_text)
        self._token_text = _token_texts(self._tokenizer)
        self._seeds = random.Random(config.seed)
        self._keys = itertools.count()
        self._max_queue_size = config.max_queue_size
        self._tenants = Tenants(config.max_tenant_requests)
        self._taking = threading.Lock()  # the order of requests is one thread's at a time
        self._tokenizing = PromptTokenizer(self._tokenizer, config.tokenize_timeout)
        self._beside = BackgroundWorker("long prompts")
        self._long: list[Stream] = []  # those that it is still to come to, or is at
        self._sessions = Sessions(
            config.session_ttl,
            config.max_sessions,
            lambda name: self._engine.unpin(name),
            max_mib=config.max_sessions_mib,
            max_per_tenant=config.max_tenant_sessions,
        )
        self._stall_timeout, self._stop_timeout = config.stall_timeout, config.stop_timeout
        self._most_seconds = config.request_timeout or math.inf
        self._render = functools.partial(render, self._tokenizer, seconds=config.chat_template_timeout)
        self._responder = Responder(
            metrics,
            self._sessions,
            self._tenants,
            first_response=None if config.first_response_ms < 0 else config.first_response_ms / 1e3,
            max_response_mib=config.max_response_mib,
            stall_seconds=config.stall_timeout,
        )
        eos = self._assembly.loaded.spec.eos_ids
        self._grammars = GrammarCompiler(
            self._tokenizer,
            limits.vocab_size,
            eos,
            seconds=config.structured_outputs_timeout,
            any_whitespace=not config.disable_any_whitespace,
            input_limits=limits.input_limits,
        )
        assembly = self._assembly
        self._engine = assembly.engine(self._responder.emit)
        metrics.show(self._assembly.scheduler.stats)
        faults.inject(asked, self, assembly)
        self._responder.start(self._engine)
        self._engine.start()
        self._listener = self._listen(labels["model"])
        # What loading has left lives as long as the process: the collector need not walk through it while serving.
        gc.collect()
        gc.freeze()

    @property
    def ready(self) -> bool:
        """Whether what is asked now will be answered, as far as one can tell: both threads live and get on."""
        return self._trouble() is None

    def _trouble(self) -> str | None:
        if not (self._engine.alive and self._responder.alive):
            return "the engine has stopped; reload the model"
        for what, seconds in (
            ("a step", self._engine.busy_seconds),
            ("an answer to the server", self._responder.busy_seconds),
        ):
            if seconds > self._stall_timeout:
                return f"{what} has taken {seconds:.0f} s, more than stall_timeout={self._stall_timeout}"
        return None

    def _listen(self, model: str) -> Listener | None:
        """For models in front of this one."""
        try:
            return Listener(model, self.take, self._assembly.limits.input_limits)
        except OSError as error:
            log.warning("no other model of this server can reach this one, only clients can: %s", error)
            return None

    def stop(self) -> None:
        """End both threads, and what else was started, within stop_timeout. The server calls this once every stream of
        its own has ended, and waits for it: nothing can be sent to it any more."""
        deadline = time.monotonic() + self._stop_timeout

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        if self._listener:
            self._listener.drain(DRAIN_SHARE * left())
            self._listener.close()
        self._grammars.stop()
        self._engine.stop(left())
        self._responder.stop(left())
        self._beside.stop(left())
        self._assembly.close()

    def submit(self, pb_request: Any) -> None:
        """Take one request of the server's."""
        try:
            channel = ServerChannel(self._pb_utils, pb_request)
        except Exception:
            log.exception("a request without a way back")
            return
        self.take(channel)

    def take(self, channel: Channel) -> None:
        """Read, check, tokenize and queue one request. May be called from any thread."""
        arrived = time.monotonic()
        with self._refusing(channel), self._taking:  # telling a client may take long: others are let in meanwhile
            arrival = self._begin(channel, arrived)
            if arrival is None:
                return
            with _undoing(arrival.turn):
                if arrival.size > LONG_CHARS:
                    self._take_long(arrival)
                else:
                    self._enter(self._stream(arrival, self._tokenize(arrival, self._tokenizing.encode)))

    def _take_long(self, arrival: Arrival) -> None:
        """Others are let in while this one's prompt is tokenized. It is open already: its time, its client or a
        stop_request may end it."""
        stream = self._stream_of(arrival, GenerateRequest(arrival.key, (), arrival.sampling, 0, frozenset()))
        self._open(stream)
        self._engine.emit_stats()
        self._long.append(stream)
        self._beside.submit(self._tokenize_long, arrival, stream)

    def _tokenize_long(self, arrival: Arrival, opened: Stream) -> None:
        found: Stream | RequestError | None = None
        try:
            if not opened.ended:
                found = self._stream(arrival, self._tokenize(arrival, self._tokenizing.encode_long))
        except RequestError as error:
            found = error
        except Exception as error:
            log.exception("a long prompt could not be tokenized")
            found = internal_error(error)
        with self._taking:  # before its client hears of it, who may send the next
            self._long.remove(opened)
        if isinstance(found, RequestError):
            self._engine.reject(arrival.key, found)
        elif found:
            self._responder.fill(opened, found)
            self._deliver(found.request)

    @contextmanager
    def _refusing(self, channel: Channel) -> Iterator[None]:
        """What is wrong with a request goes back to its client."""
        try:
            yield
        except RequestError as error:
            _refuse(channel, error)
            self._responder.refused(error.outcome)
        except Exception as error:
            log.exception("a request could not be taken")
            _refuse(channel, internal_error(error))
            self._responder.refused("error")

    def _open(self, stream: Stream) -> None:
        self._engine.announce(stream.request.key)
        self._responder.open(stream)

    def _enter(self, stream: Stream) -> None:
        self._open(stream)
        self._deliver(stream.request)

    def _answer(self, question: str, channel: Channel, request_id: str) -> None:
        if question == "pool_map":
            self._responder.look(channel)
            self._engine.snapshot_pool()
        elif question == "adapters":
            self._tell_adapters(channel)
        elif not request_id:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, "stop_request: has no request id (`id` over HTTP); give that of the request"
            )
        else:
            self._responder.cancel(channel, request_id)

    def _deliver(self, request: GenerateRequest) -> None:
        """To the engine. Its stream is open: what goes wrong ends that."""
        try:
            self._deliver_guided(request)
        except Exception as error:
            log.exception("request %d: could not be queued", request.key)
            self._engine.reject(request.key, internal_error(error))

    def _deliver_guided(self, request: GenerateRequest) -> None:
        """After what guides its outputs has been compiled, where something does. Whoever waits for that can be
        cancelled already."""
        structure = request.sampling.structure
        if structure is None:
            self._engine.deliver(request)
            return

        def compiled(guides: tuple[Guide, ...] | RequestError) -> None:
            if isinstance(guides, RequestError):
                self._engine.reject(request.key, guides)
            else:
                self._engine.deliver(replace(request, guides=guides))

        key, sampling = request.key, request.sampling
        self._engine.emit_stats()
        self._grammars.compile(
            structure,
            sampling.num_samples,
            compiled,
            tenant=sampling.cache_salt,
            still_wanted=lambda: self._engine.is_pending(key),
        )

    def _begin(self, channel: Channel, arrived: float) -> Arrival | None:
        """Read and check a request. None where it was answered here."""
        if trouble := self._trouble():
            raise RequestError(ErrorCode.UNAVAILABLE, trouble)
        received, limits = channel.received(), self._assembly.limits
        if question := read_control_request(*received, input_limits=limits.input_limits):
            self._answer(question, channel, read_request_id(received[1], received[-1], limits.input_limits))
            return None
        call = read_call(*received, input_limits=limits.input_limits)
        if call.embedding:
            checked = call.embedding.checked(limits)
            call = replace(call, embedding=checked, input_ids=checked.ids)
        sampling = (parse_embedding_sampling if call.embedding else SamplingParams.parse)(call.sampling, limits)
        turn = self._turn(call, sampling) if call.sequence else None
        if call.only_ends_session and turn:
            turn.finish([], "")
            channel.send(write_response(call, [SampleOutput("", "stop", ())], prompt_token_ids=()), final=True)
            return None
        with _undoing(turn):
            self._check_place(sampling)
            _check_use(call, sampling)
            sampling = self._spread(sampling)
            self._check_adapter(sampling.lora_name)
            messages = turn.conversation(call.messages) if turn and call.messages else call.messages
            if messages is not None:
                check_count(messages, limits.input_limits)  # those of a session's earlier turns among them
            if turn:
                limits.input_limits.check("max_json_chars", "messages", turn.num_chars, "characters")
            if call.prompt is not None:
                self._check_length(call.prompt_field, call.prompt)
            size = len(call.prompt or "") if messages is None else len(json.dumps([call.messages, call.tools]))
            size += turn.session.num_chars if turn else 0
            return Arrival(next(self._keys), call, channel, arrived, sampling, turn, messages, size)

    def _check_place(self, sampling: SamplingParams) -> None:
        """Raises RequestError where there is none in the queue, or none for the tenant."""
        ended = [stream.tenant for stream in self._long if stream.ended]  # whose text is still there
        waiting, salt = self._engine.waiting + len(ended), sampling.cache_salt
        if self._max_queue_size and waiting >= self._max_queue_size:
            raise QueueFull(waiting)
        self._tenants.check(salt, ended.count(salt))

    def _stream(self, arrival: Arrival, tokens: list[int]) -> Stream:
        """A stream of a request that may be queued."""
        request = self._request(arrival, tokens)
        if arrival.turn:
            arrival.turn.hold(len(tokens))
        return self._stream_of(arrival, request)

    def _stream_of(self, arrival: Arrival, request: GenerateRequest) -> Stream:
        call = arrival.call
        samples = self._samples(call, request)
        offsets = self._prompt_offsets(call, request, samples[0].text) if request.prompt_token_ids else None
        return Stream(
            request, call, arrival.channel, samples, arrival.arrived, self._encode, self._token_text, offsets,
            arrival.turn,
            self._assembly.limits.block_size, max_seconds=self._most_seconds,
        )  # fmt: skip

    def _tell_adapters(self, channel: Channel) -> None:
        adapters, slots = self._assembly.adapters, self._assembly.scheduler.slots

        def tell() -> None:
            try:
                found = adapters.describe(slots.resident) if adapters else []
                channel.send(write_adapters(found), final=True)
            except Exception as error:
                log.exception("the list of adapters could not be sent")
                _refuse(channel, internal_error(error))

        adapters.run(tell) if adapters else tell()

    def _turn(self, call: Call, sampling: SamplingParams) -> Turn:
        """Begin a turn of a session. Raises RequestError for what a session cannot do."""
        assert call.sequence
        name = call.sequence.id
        if not self._assembly.scheduler.blocks.caching:
            raise invalid_argument("sequence_id", name, "sessions keep what the prefix cache finds, and it is off"
                          " (enable_prefix_caching)")  # fmt: skip
        if sampling.truncate_prompt_tokens is not None:
            raise invalid_argument(
                "truncate_prompt_tokens",
                sampling.truncate_prompt_tokens,
                "means nothing in a session, which keeps what was said; leave it out",
            )
        if sampling.num_seqs > 1:
            field = next(one for one in ("n", "best_of", "beam_width") if (getattr(sampling, one) or 1) > 1)
            raise invalid_argument(
                field, getattr(sampling, field), "must be 1 in a session, which goes on from one answer"
            )
        session = SessionName(sampling.cache_salt, name)
        return self._sessions.begin(session, start=call.sequence.start, end=call.sequence.end)

    def _request(self, arrival: Arrival, tokens: list[int]) -> GenerateRequest:
        call, sampling, turn = arrival.call, arrival.sampling, arrival.turn
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        eos = self._assembly.loaded.spec.eos_ids
        limits, bad_words = self._assembly.limits, self._bad_words(sampling)
        request = GenerateRequest.from_prompt(arrival.key, tokens, sampling, seed, eos, limits, bad_words)
        goes_on = turn.name if turn and not turn.is_last else None
        logprobs = _wanted_logprobs(call, sampling)
        ends = None
        if sampling.beam_width > 1:
            ends = ending(sampling, tokens, decoder(self._tokenizer, sampling.skip_special_tokens))
        return replace(
            request,
            ends=ends,
            embeds=call.embedding is not None,
            returns_usage=call.return_receipt,
            session=goes_on,
            logprobs=logprobs,
        )

    def _spread(self, sampling: SamplingParams) -> SamplingParams:
        """With the bias of each word on all of its tokens. Raises RequestError for too many of them."""
        if not sampling.word_bias:
            return sampling
        sums = dict(sampling.logit_bias)
        for word, bias in sampling.word_bias:
            for token in self._encode(word):
                if token < self._assembly.limits.vocab_size:  # others never come
                    sums[token] = sums.get(token, 0.0) + bias
        self._assembly.limits.input_limits.check(
            "max_logit_biases", "word_bias", len(sums), "tokens with those of logit_bias"
        )
        return replace(sampling, logit_bias=tuple(sorted(sums.items())))

    def _bad_words(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as it stands after a space, and as it stands elsewhere."""
        runs: dict[tuple[int, ...], None] = {}
        for word in sampling.bad_words:
            bare = word.lstrip() or word
            found = [tuple(self._encode(text)) for text in (bare, f" {bare}")]
            if not all(found):
                raise invalid_argument("bad_words", word, "has no tokens")
            runs |= dict.fromkeys(found)
        known = (run for run in runs if max(run) < self._assembly.limits.vocab_size)  # others never come
        return (*known, *sampling.bad_words_token_ids)

    def _check_adapter(self, name: str | None) -> None:
        if name is None:
            return
        if self._assembly.adapters is None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "LoRA feature is not enabled.", verbatim=True)
        self._assembly.adapters.check(name)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizing.encode("text", text)

    def _tokenize(self, arrival: Arrival, encode: Encode) -> list[int]:
        """The prompt, after what the session has said before. Only its beginning gets what the tokenizer puts there."""
        call, sampling, turn = arrival.call, arrival.sampling, arrival.turn
        before = turn.tokens_before() if turn and call.messages is None else []
        last = None if sampling.truncate_prompt_tokens is None else -sampling.truncate_prompt_tokens
        if call.input_ids is not None:
            return before + self._token_ids(call.input_ids[last:], sampling)
        text = call.prompt
        if text is None:
            text = self._render(arrival.messages, call.tools)
            self._check_length(call.prompt_field, text)
        special = sampling.add_special_tokens and call.prompt is not None and not before
        return before + encode(call.prompt_field, text, special=special)[last:]

    def _check_length(self, field: str, text: str) -> None:
        if len(text) > self._longest_text:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"{field}: {len(text)} characters; must be at most {self._longest_text}"
                " (max_prompt_chars; default: what no prompt within"
                f" max_model_len={self._assembly.limits.max_model_len} exceeds)",
            )

    def _token_ids(self, ids: np.ndarray, sampling: SamplingParams) -> list[int]:
        """Raises RequestError for too many of them, and for one that is none of the model's."""
        check_prompt_length(len(ids), sampling.max_tokens, self._assembly.limits)
        last = self._assembly.limits.vocab_size - 1
        (wrong,) = np.nonzero((ids < 0) | (ids > last))
        if len(wrong):
            raise invalid_argument(f"input_ids[{wrong[0]}]", int(ids[wrong[0]]), f"must be 0..{last}")
        return ids.tolist()

    def _prompt_offsets(self, call: Call, request: GenerateRequest, text: str) -> list[int] | None:
        """Where in the prompt's text each of its tokens begins, where both are told."""
        if not (call.return_text_offsets and _echoes(call, request.sampling)):
            return None
        texts = [self._token_text(token) for token in request.prompt_token_ids]
        if "".join(texts) == text:  # no character is cut: a tenth of the time
            return [0, *itertools.accumulate(map(len, texts[:-1]))]
        return _offsets(self._tokenizer, request.prompt_token_ids, text)

    def _samples(self, call: Call, request: GenerateRequest) -> list[Sample]:
        sampling = request.sampling
        decode = decoder(self._tokenizer, sampling.skip_special_tokens)
        echoed, eos = _echoed(call, request, decode), self._assembly.loaded.spec.eos_ids

        def sample() -> Sample:
            detokenizer = Detokenizer(
                decode,
                request.prompt_token_ids,
                stop=sampling.stop,
                include_stop=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
                record_offsets=call.return_text_offsets,
                prefix_chars=len(echoed),
            )
            return Sample(detokenizer, sampling.include_stop_str_in_output, StopTokens.of(sampling, eos), text=echoed)

        return [sample() for _ in range(sampling.num_samples)]


@contextmanager
def _undoing(turn: Turn | None) -> Iterator[None]:
    """A turn of a session is as if it had never been sent where its request fails."""
    try:
        yield
    except BaseException:
        if turn:
            turn.undo()
        raise


def _check_use(call: Call, sampling: SamplingParams) -> None:
    """Raises RequestError for parameters that this kind of call cannot have."""
    if call.stream and sampling.selects_best_of:
        raise invalid_argument(
            "best_of", sampling.best_of, f"must be n={sampling.n} when streaming: the best are known at the end only"
        )
    if call.messages is not None and sampling.echo:
        raise invalid_argument("echo", True, "has no meaning with messages; leave it out")


def _wanted_logprobs(call: Call, sampling: SamplingParams) -> int | None:
    """What of log probabilities is worth computing: nothing that is neither sent nor compared."""
    if call.return_logprobs and sampling.logprobs is not None:
        return sampling.logprobs
    return 0 if call.return_cumulative_logprob or sampling.selects_best_of else None


def _echoes(call: Call, sampling: SamplingParams) -> bool:
    """Whether the prompt's text is part of the output."""
    return call.echo or sampling.echo


def _echoed(call: Call, request: GenerateRequest, decode: Callable[[list[int]], str]) -> str:
    """What comes before the output: the text as it was sent, or that of the tokens that were, or that are left."""
    if not _echoes(call, request.sampling):
        return ""
    if request.sampling.truncate_prompt_tokens is not None:
        return decode(list(request.prompt_token_ids))
    return call.prompt or "" if call.input_ids is None else decode(call.input_ids.tolist())


def _offsets(tokenizer: PreTrainedTokenizerBase, tokens: Rows[int], text: str) -> list[int]:
    """Where in `text`, which is that of the last tokens with or without special ones among them, each begins; those
    before them at its start."""
    for skip in (True, False):
        detokenizer = Detokenizer(decoder(tokenizer, skip), (), record_offsets=True)
        said = detokenizer.push(tokens) + detokenizer.flush()
        if said.endswith(text):
            break
    before = len(said) - len(text)
    return [min(max(0, offset - before), len(text)) for offset in detokenizer.offsets]


def _refuse(channel: Channel, error: RequestError) -> None:
    """Whatever is in the way: what the server's `execute` raises ends other requests, too."""
    try:
        channel.fail(error)
    except Exception:
        log.exception("a request could not be answered with %s", error)


def _token_texts(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """The text of a token by itself, remembered: the same ones come again and again."""
    decode = decoder(tokenizer, skip_special_tokens=False)
    return functools.cache(lambda token: decode([token]))
