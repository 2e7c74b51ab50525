"""A request between the admission checks and the queue: its prompt, and the stream that is built from it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from paged_backend.api.limits import EngineLimits
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.token_outputs import LOGPROBS, requested_outputs
from paged_backend.api.trace import RequestTrace
from paged_backend.server.prompts.encoder import Earlier, EncodedPrompt, Prompt, PromptEncoder
from paged_backend.server.prompts.sessions import Turn
from paged_backend.server.streams.stream import Sample, Stream
from paged_backend.server.wire.call import Call
from paged_backend.server.wire.channel import Channel
from paged_backend.text.beam_stops import build_stop_check
from paged_backend.text.detokenizer import Detokenizer
from paged_backend.text.stop_tokens import StopTokens
from paged_backend.text.tokenizing import decoder


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

    def build(self, arrival: Arrival, prompt: EncodedPrompt) -> Stream:
        """Return the stream of a request that may be queued. Raises RequestError if the request cannot run."""
        arrival = replace(arrival, call=replace(arrival.call, unread={}, pooling=prompt.pooling))
        request = self._request(arrival, prompt.tokens)
        if arrival.turn:
            arrival.turn.add_prompt(prompt)
        return self._stream(arrival, request)

    def build_untokenized(self, arrival: Arrival) -> Stream:
        """Return a stream without a prompt, to which `Stream.set_prompt` gives one later."""
        return self._stream(
            arrival, GenerateRequest(arrival.key, (), arrival.sampling, 0, frozenset(), trace=arrival.trace)
        )

    def _request(self, arrival: Arrival, tokens: list[int]) -> GenerateRequest:
        call, sampling, turn = arrival.call, arrival.sampling, arrival.turn
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        bad_words = self._prompts.encode_bad_words(sampling)
        request = GenerateRequest.from_prompt(
            arrival.key, tokens, sampling, seed, self._eos_ids, self._limits, bad_words
        )
        ends = None
        if sampling.beam_width > 1:
            ends = build_stop_check(sampling, tokens, decoder(self._tokenizer, sampling.skip_special_tokens))
        return replace(
            request,
            ends=ends,
            embeds=call.pooling is not None,
            returns_usage="receipt" in call.returns or arrival.trace is not None,
            trace=arrival.trace,
            session=turn.name if turn and not turn.is_last else None,
            token_outputs=requested_outputs(call.returns, sampling),
        )

    def _stream(self, arrival: Arrival, request: GenerateRequest) -> Stream:
        call = arrival.call
        samples = self._samples(call, request)
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

    def _samples(self, call: Call, request: GenerateRequest) -> list[Sample]:
        sampling = request.sampling
        decode = decoder(self._tokenizer, sampling.skip_special_tokens)
        echoed = _echoed_text(call, request, decode)
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
