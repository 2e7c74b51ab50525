"""An open request and its samples: how they are built of a request that arrives, and the way from the tokens that the
engine generates to the text that is sent."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from paged_backend.api.errors import RequestError
from paged_backend.api.limits import EngineLimits
from paged_backend.api.request import FinishReason, GenerateRequest, TokenDelta, Usage
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.token_outputs import FINGERPRINTS, LOGPROBS, Values, requested_outputs
from paged_backend.api.trace import RequestTrace
from paged_backend.server.prompts.encoder import Earlier, EncodedPrompt, Prompt, PromptEncoder
from paged_backend.server.prompts.sessions import Turn
from paged_backend.server.wire.call import Call
from paged_backend.server.wire.channel import Channel
from paged_backend.server.wire.responses import Response, SampleOutput, write_response
from paged_backend.text.answers import AnswerFormat, AnswerParser, Parts
from paged_backend.text.beam_stops import build_stop_check
from paged_backend.text.detokenizer import Detokenizer
from paged_backend.text.stop_tokens import StopTokens, stop_word_reason
from paged_backend.text.tokenizing import decoder

RESPONSE_BYTES = 1024  # memory of a response in the server in addition to its tensors


@dataclass(eq=False)
class Stream:
    """One open request. Owned by the responder's thread once it has been opened.

    All times are time.monotonic().
    """

    request: GenerateRequest
    call: Call
    channel: Channel
    samples: list[Sample]
    arrived: float
    encode: Callable[[str], list[int]]
    token_text: Callable[[int], str]
    prompt_offsets: Sequence[int] | None = None  # offset of each prompt token in the echoed prompt; None once sent
    turn: Turn | None = None
    block_size: int = 1
    max_seconds: float = math.inf  # limit of its duration, in addition to its own time limit
    error: RequestError | None = None
    usage: Usage | None = None
    scheduled_at: float | None = field(default=None, init=False)  # time of its first step
    first_token: float | None = field(default=None, init=False)
    last_token: float | None = field(default=None, init=False)
    num_steps: int = field(default=0, init=False)  # steps that returned tokens of any sample
    preempted_in_prompt: float = field(default=0.0, init=False)  # seconds, before the first token
    finished: bool = field(default=False, init=False)  # whether all samples have ended
    sent: bool = field(default=False, init=False)  # whether a response has been sent
    sent_bytes: int = field(default=0, init=False)
    prompt_values: Values = field(default_factory=dict, init=False)  # optional outputs of the prompt, not sent yet
    deadline: float = field(init=False)
    early_finish: FinishReason | None = field(default=None, init=False)  # why the engine ends a search early

    def __post_init__(self) -> None:
        limits = (self.call.timeout_us / 1e6, (self.request.sampling.timeout_ms or 0) / 1e3)
        if len(self.request.prompt_token_ids) == 1:  # the first token has no values
            self.prompt_values = dict.fromkeys(self.request.prompt_outputs, ())
        self.deadline = self.arrived + min(*filter(None, limits), self.max_seconds, math.inf)

    def set_prompt(self, tokenized: Stream) -> None:
        """Take the tokenized prompt over from a stream of the same request; nothing has been sent yet."""
        self.request, self.samples, self.call = tokenized.request, tokenized.samples, tokenized.call
        self.prompt_offsets, self.prompt_values = tokenized.prompt_offsets, tokenized.prompt_values

    @property
    def is_tokenized(self) -> bool:
        """Whether the prompt has been tokenized; no prompt is empty."""
        return bool(self.request.prompt_token_ids)

    @property
    def is_search(self) -> bool:
        """Whether the samples are the beams of a beam search."""
        return self.request.sampling.beam_width > 1

    @property
    def tenant(self) -> str:
        return self.request.sampling.cache_salt

    @property
    def ended(self) -> bool:
        return self.finished or self.error is not None

    @property
    def outcome(self) -> str:
        """Why it ended, for the metrics. Of several reasons of samples: the last in FinishReason's order."""
        if self.error:
            return self.error.outcome
        reasons = {sample.finish for sample in self.returned_samples}
        return next(reason.value for reason in reversed(FinishReason) if reason in reasons)

    def take(self, delta: TokenDelta, when: float) -> None:
        """Add the tokens of one step to a sample."""
        self.usage = delta.usage or self.usage
        self.prompt_values = delta.prompt_values or self.prompt_values
        if delta.token_ids or delta.hidden is not None or delta.prompt_values is not None:
            if self.first_token is None:
                self.first_token = when
                self.preempted_in_prompt = self.usage.preempted_seconds if self.usage else 0.0
            self.num_steps += when != self.last_token
            self.last_token = when
        self.error = delta.error
        if delta.prompt_values:
            for sample in self.samples:
                sample.add_to_digest(delta.prompt_values)
        sample = self.samples[delta.sample]
        if delta.hidden is not None:
            assert self.call.pooling
            sample.text = self.call.pooling.answer(delta.hidden)
        sample.take(delta)
        if sample.finish:
            if self.early_finish:
                sample.finish, sample.stop_reason = self.early_finish, None
            self.finished = all(sample.finish for sample in self.samples)

    def has_new_text(self) -> bool:
        """Return whether a streaming request has text, reasoning or calls to send, after decoding its tokens."""
        if not self.call.stream:
            return False
        for sample in self.samples:
            sample.detokenize()
        return any([sample.text or sample.reasoning or sample.calls for sample in self.samples])

    @property
    def returned_samples(self) -> list[Sample]:
        """The samples that the client gets; with `best_of`, the `n` most likely samples, best first."""
        sampling = self.request.sampling
        if not sampling.selects_best_of:
            return self.samples
        return sorted(self.samples, key=lambda sample: sample.cumulative_logprob, reverse=True)[: sampling.n]

    def take_outputs(self) -> dict[str, np.ndarray]:
        """Return the output tensors of the next response, and mark their content as sent."""
        returns = self.call.returns
        response = Response(
            returns,
            [sample.take_output(offsets="text_offsets" in returns) for sample in self.returned_samples],
            self.request.prompt_token_ids,
            first=not self.sent,
            prompt_values=self.prompt_values,
            prompt_text_offsets=self.prompt_offsets,
            token_text=self.token_text,
            receipt=self.usage_receipt() if self.finished and "receipt" in returns else None,
        )
        outputs = write_response(response)
        self.sent, self.prompt_values, self.prompt_offsets = True, {}, None
        self.sent_bytes += RESPONSE_BYTES + sum(map(_nbytes, outputs.values()))
        return outputs

    def usage_receipt(self) -> dict[str, Any]:
        """Return the content of the `receipt` tensor: tokens, blocks, and seconds in each phase."""
        now = time.monotonic()
        scheduled, first, last = self.scheduled_at or now, self.first_token or now, self.last_token or now
        usage = self.usage or Usage(*[0] * len(Usage._fields))
        preempted = usage.preempted_seconds - self.preempted_in_prompt
        digests = [sample.digest.hexdigest() for sample in self.returned_samples if sample.digest]
        return {
            "prompt_tokens": len(self.request.prompt_token_ids),
            "generated_tokens": sum(sample.num_tokens for sample in self.samples),
            **usage._asdict(),
            "blocks_missed": -(-(len(self.request.prompt_token_ids) - usage.cached_tokens) // self.block_size),
            "queued_seconds": scheduled - self.arrived,
            "prefill_seconds": first - scheduled - self.preempted_in_prompt,
            "decode_seconds": last - first - preempted,
            "arrival_time_ns": int(self.arrived * 1e9),
            "first_scheduled_time_ns": int(scheduled * 1e9),
            "first_token_time_ns": int(first * 1e9),
            "last_token_time_ns": int(last * 1e9),
            **({"logits_digests": digests} if digests else {}),
        }

    def settle_session(self, *, answered: bool) -> None:
        """Update the session before the final response: add this turn, or restore it if the turn was not answered."""
        if self.turn is None:
            return
        if not (answered and self.is_tokenized):
            self.turn.undo()
            return
        (sample,) = self.samples
        # A stop string is cut from the text but not from the tokens, so the text that was sent is encoded again.
        tokens = self.encode(sample.all_text) if sample.detokenizer.stopped else sample.tokens
        self.turn.finish([*self.request.prompt_token_ids, *tokens], sample.message)

    def end(self, finish: FinishReason) -> None:
        """End every sample that has not ended."""
        for sample in self.samples:
            if not sample.finish:
                sample.end(finish)
        self.finished = True


def _nbytes(tensor: np.ndarray) -> int:
    return sum(map(len, tensor)) if tensor.dtype == np.object_ else tensor.nbytes


@dataclass(eq=False, slots=True)
class Sample:
    """One sample of a request.

    Tokens are decoded only when a response is sent, unless a stop string may end the output.

    tokens | in `text_pieces`, sent | in `text` | not decoded yet |
                                                ^ num_decoded
    """

    detokenizer: Detokenizer
    include_stop: bool  # whether the token that ends the sample is part of its text
    stop_tokens: StopTokens = field(default_factory=StopTokens)
    text: str = ""  # text not sent yet
    unsent: list[int] = field(default_factory=list)  # tokens not sent yet, including the one that ends the sample
    num_tokens: int = 0
    finish: FinishReason | None = None
    stop_reason: str | None = None  # the stop string, or the token id or the stop word's token ids as JSON
    tokens: list[int] = field(default_factory=list)  # tokens whose text is part of the output
    num_decoded: int = 0  # number of `tokens` that were decoded
    text_pieces: list[str] = field(default_factory=list)  # all text so far
    values: dict[str, list[Any]] = field(default_factory=dict)  # optional outputs of the unsent tokens, by name
    cumulative_logprob: float = 0.0  # sum over all tokens so far
    digest: hashlib._Hash | None = None  # digest of the logits of its tokens and of the prompt, if requested
    last_token: float | None = None  # time.monotonic() of its newest token
    parser: AnswerParser | None = None  # None: all output is text
    reasoning: str = ""  # reasoning not sent yet
    calls: list[dict[str, Any]] = field(default_factory=list)  # tool calls not sent yet

    @property
    def all_text(self) -> str:
        return "".join(self.text_pieces)

    @property
    def message(self) -> dict[str, Any]:
        """The fields of a message with the output."""
        return self.parser.message if self.parser else {"content": self.all_text}

    def take(self, delta: TokenDelta) -> None:
        """Add the tokens of one step. A stop string or stop word may end the sample before the engine does."""
        tokens, finish, include_last = delta.token_ids, delta.finish, self.include_stop
        if self.stop_tokens.words and (matched := self.stop_tokens.find(self.tokens, tokens)):
            tokens, finish, include_last = tokens[: matched[0]], FinishReason.STOP, True
            self.stop_reason = stop_word_reason(matched[1])
        elif finish is FinishReason.STOP and tokens:
            self.stop_reason = self.stop_tokens.reason(tokens[-1])
        count = len(tokens)
        # The token that ends the output is counted, but its text is not output.
        self.tokens += tokens[:-1] if finish is FinishReason.STOP and not include_last else tokens
        if self.detokenizer.has_stop:
            self.detokenize()
            if self.detokenizer.stopped:
                del self.tokens[self.detokenizer.num_tokens :]
                count = len(self.tokens) - self.num_tokens
                self._finish(FinishReason.STOP)
        self.num_tokens += count
        self.unsent += tokens[:count]
        if delta.values:
            counted = {name: values[:count] for name, values in delta.values.items()}
            self.cumulative_logprob += sum(chosen.logprob for chosen, *_ in counted.get(LOGPROBS.name, ()))
            self.add_to_digest(counted)
            for name, unsent in self.values.items():
                unsent += counted.get(name, ())
        if finish and not self.finish:
            self.end(finish)

    def add_to_digest(self, values: Values) -> None:
        """Add the fingerprints of logits to the digest, if it is requested."""
        if self.digest:
            self.digest.update(b"".join(values.get(FINGERPRINTS.name, ())))

    def detokenize(self) -> None:
        """Decode the tokens that have not been decoded."""
        if self.num_decoded < len(self.tokens):
            new = self.tokens[self.num_decoded :] if self.num_decoded else self.tokens
            self.num_decoded = len(self.tokens)
            self._append(self.detokenizer.push(new))

    def end(self, finish: FinishReason) -> None:
        """Decode the rest, including text held back as a possible stop string, and set why the sample ended."""
        self.detokenize()
        self._append(self.detokenizer.flush())
        self._finish(finish)

    def _finish(self, finish: FinishReason) -> None:
        """Set why the sample ended, after all of its text."""
        self.finish = finish
        if self.detokenizer.stopped:
            self.finish, self.stop_reason = FinishReason.STOP, self.detokenizer.matched_stop
        if self.parser:
            self._add(self.parser.finish())

    def take_output(self, *, offsets: bool) -> SampleOutput:
        """Return everything that has not been sent, and mark it as sent."""
        output = SampleOutput(
            self.text,
            self.finish.value if self.finish else None,
            self.unsent,
            self._unsent_offsets() if offsets else (),
            self.values,
            self.cumulative_logprob,
            self.stop_reason,
            self.reasoning,
            self.calls,
        )
        self.text, self.unsent, self.values = "", [], {name: [] for name in self.values}
        self.reasoning, self.calls = "", []
        return output

    def _unsent_offsets(self) -> list[int]:
        offsets = self.detokenizer.offsets[self.num_tokens - len(self.unsent) : self.num_tokens]
        # A token that ended the sample and has no text in the output begins where the text ends.
        return offsets + [self.detokenizer.num_chars] * (len(self.unsent) - len(offsets))

    def _append(self, text: str) -> None:
        if text:
            self._add(self.parser.push(text) if self.parser else Parts(text))
            self.text_pieces.append(text)

    def _add(self, parts: Parts) -> None:
        self.text += parts.text
        self.reasoning += parts.reasoning
        self.calls += parts.calls


@dataclass(frozen=True, eq=False)
class Arrival:
    """A request that passed the admission checks and whose prompt is still to be encoded."""

    key: int  # the engine's name for the request, unique
    call: Call
    channel: Channel
    arrived: float  # time.monotonic()
    sampling: SamplingParams
    turn: Turn | None
    trace: RequestTrace | None = None  # None: not traced

    @property
    def num_chars(self) -> int:
        """Characters of the text, or of the conversation as JSON."""
        return self.call.num_chars + (self.turn.session.num_chars if self.turn else 0)

    def prompt(self) -> Prompt:
        """Return what is to be encoded. Raises RequestError if the session has a prompt of another kind."""
        earlier = self.turn.earlier(chat=self.call.is_chat) if self.turn else Earlier()
        return Prompt(self.call, self.sampling, earlier)


class StreamBuilder:
    """Builds streams for one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: frozenset[int],
        limits: EngineLimits,
        prompts: PromptEncoder,
        *,
        seed: int | None,
        max_seconds: float,
    ):
        """seed: initializes the generator of seeds for requests without one.

        max_seconds: maximum duration of any request.
        """
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._limits = limits
        self._prompts = prompts
        self._seeds = random.Random(seed)
        self._max_seconds = max_seconds
        self._token_text = _token_texts(tokenizer)
        self.answers = AnswerFormat(tokenizer)

    def build(self, arrival: Arrival, prompt: EncodedPrompt) -> Stream:
        """Return the stream of a request that may be queued. Raises RequestError if the request cannot run."""
        arrival = replace(arrival, call=replace(arrival.call, unread={}, pooling=prompt.pooling))
        request = self._request(arrival, prompt.tokens)
        if arrival.turn:
            arrival.turn.add_prompt(prompt)
        return self._stream(arrival, request, prompt.tools)

    def build_untokenized(self, arrival: Arrival) -> Stream:
        """Return a stream without a prompt, to which `Stream.set_prompt` gives one later."""
        return self._stream(
            arrival, GenerateRequest(arrival.key, (), arrival.sampling, 0, frozenset(), trace=arrival.trace)
        )

    def _request(self, arrival: Arrival, tokens: list[int]) -> GenerateRequest:
        call, sampling, turn = arrival.call, arrival.sampling, arrival.turn
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        bad_words, thinking = self._prompts.encode_bad_words(sampling), self._prompts.thinking_budget(sampling)
        request = GenerateRequest.from_prompt(
            arrival.key,
            tokens,
            sampling,
            seed,
            self._eos_ids,
            self._limits,
            bad_words,
            thinking,
            field=call.prompt_field,
        )
        ends = None
        if sampling.beam_width > 1:
            ends = build_stop_check(sampling, tokens, self._decoder(call, sampling))
        return replace(
            request,
            ends=ends,
            embeds=call.pooling is not None,
            returns_usage="receipt" in call.returns or arrival.trace is not None,
            trace=arrival.trace,
            session=turn.name if turn and not turn.is_last else None,
            token_outputs=requested_outputs(call.returns, sampling),
        )

    def _decoder(self, call: Call, sampling: SamplingParams) -> Callable[[list[int]], str]:
        """Return the function that decodes the output."""
        if splitter := self.answers.splitter(call.returns):
            return splitter.decoder(sampling.skip_special_tokens)
        return decoder(self._tokenizer, sampling.skip_special_tokens)

    def _stream(
        self, arrival: Arrival, request: GenerateRequest, tools: Sequence[dict[str, Any]] | None = None
    ) -> Stream:
        call = arrival.call
        samples = self._samples(call, request, tools)
        return Stream(
            request,
            call,
            arrival.channel,
            samples,
            arrival.arrived,
            self._prompts.encode_text,
            self._token_text,
            prompt_offsets=self._prompt_offsets(call, request, samples[0].text) if request.prompt_token_ids else None,
            turn=arrival.turn,
            block_size=self._limits.block_size,
            max_seconds=self._max_seconds,
        )

    def _samples(self, call: Call, request: GenerateRequest, tools: Sequence[dict[str, Any]] | None) -> list[Sample]:
        sampling = request.sampling
        echoed = _echoed_text(call, request, decoder(self._tokenizer, sampling.skip_special_tokens))
        decode, splitter = self._decoder(call, sampling), self.answers.splitter(call.returns)
        # A constraint applies from the first token, so that the output does not continue reasoning of the prompt.
        start = "" if splitter is None or sampling.structure else splitter.start(request.prompt_token_ids)
        sent = {name for name in request.token_outputs if name in call.returns}
        if sampling.logprobs is None:  # then they are only summed
            sent.discard(LOGPROBS.name)

        def sample() -> Sample:
            detokenizer = Detokenizer(
                decode,
                request.prompt_token_ids,
                stop=sampling.stop,
                include_stop=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
                record_offsets="text_offsets" in call.returns,
                prefix_chars=len(echoed),
            )
            stop_tokens = StopTokens.of(sampling, self._eos_ids)
            digest = hashlib.sha256() if sampling.logits_digest else None
            return Sample(
                detokenizer,
                sampling.include_stop_str_in_output,
                stop_tokens,
                text=echoed,
                values={name: [] for name in sent},
                digest=digest,
                parser=AnswerParser(splitter, start, tools) if splitter else None,
            )

        return [sample() for _ in range(sampling.num_samples)]

    def _prompt_offsets(self, call: Call, request: GenerateRequest, text: str) -> list[int] | None:
        """Return where each prompt token begins in `text`, the echoed prompt; None if the client gets no offsets."""
        if not ("text_offsets" in call.returns and _echoes(call, request.sampling)):
            return None
        texts = [self._token_text(token) for token in request.prompt_token_ids]
        if "".join(texts) == text:  # fast path (ten times) if no token ends inside a character
            return [0, *itertools.accumulate(map(len, texts[:-1]))]
        return _offsets(self._tokenizer, request.prompt_token_ids, text)


def _echoes(call: Call, sampling: SamplingParams) -> bool:
    """Return whether the prompt's text is part of the output."""
    return call.echo or sampling.echo


def _echoed_text(call: Call, request: GenerateRequest, decode: Callable[[list[int]], str]) -> str:
    """Return the text before the output: the prompt as sent, or decoded if it was token ids or was truncated."""
    if not _echoes(call, request.sampling):
        return ""
    if request.sampling.truncate_prompt_tokens is not None:
        return decode(list(request.prompt_token_ids))
    return call.prompt or "" if call.input_ids is None else decode(call.input_ids.tolist())


def _offsets(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], text: str) -> list[int]:
    """Return where each token begins in `text`.

    `text` is the text of the last tokens, with or without special tokens; tokens before it begin at 0.
    """
    for skip_special_tokens in (True, False):
        detokenizer = Detokenizer(decoder(tokenizer, skip_special_tokens), (), record_offsets=True)
        decoded = detokenizer.push(tokens) + detokenizer.flush()
        if decoded.endswith(text):
            break
    before = len(decoded) - len(text)
    return [min(max(0, offset - before), len(text)) for offset in detokenizer.offsets]


def _token_texts(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """Return a cached function from a token id to the text of that token alone."""
    decode = decoder(tokenizer, skip_special_tokens=False)
    return functools.cache(lambda token: decode([token]))
