"""An open request on its way out: its answers, what of them is text, and what is not sent yet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_backend.api.errors import RequestError
from paged_backend.api.request import FinishReason, GenerateRequest, Logprobs, TokenDelta, Usage
from paged_backend.server.channel import Channel
from paged_backend.server.embedding import embedding_json
from paged_backend.server.sessions import Turn
from paged_backend.server.wire.call import Call
from paged_backend.server.wire.write import SampleOutput
from paged_backend.text.detokenizer import Detokenizer
from paged_backend.text.stop_tokens import StopTokens, stop_word_reason


@dataclass(eq=False, slots=True)
class Sample:
    """One of a request's answers, on its way out.

    tokens | in `said`, sent | in `text` | piled up: decoded at once when a response is made of them |
                                         ^ read
    """

    detokenizer: Detokenizer
    include_stop: bool  # whether the token that ends it is part of the text
    stop_tokens: StopTokens = field(default_factory=StopTokens)
    text: str = ""  # not sent yet
    unsent: list[int] = field(default_factory=list)  # tokens, the one that ends it included
    num_tokens: int = 0
    finish: FinishReason | None = None
    stop_reason: str | None = None  # the stop string that ended it, or the token's id or those of a word's, as JSON
    tokens: list[int] = field(default_factory=list)  # those that the text is made of
    read: int = 0  # how many of them are text by now
    said: list[str] = field(default_factory=list)  # all text so far, in pieces
    logprobs: list[Logprobs] = field(default_factory=list)  # of the tokens that are not sent yet
    cumulative_logprob: float = 0.0  # of all so far

    @property
    def all_text(self) -> str:
        return "".join(self.said)

    def take(self, delta: TokenDelta) -> None:
        """Book what a step gave. A stop string may end the sample before the engine does."""
        tokens, finish, include_last = delta.token_ids, delta.finish, self.include_stop
        if self.stop_tokens.words and (found := self.stop_tokens.find(self.tokens, tokens)):
            tokens, finish, include_last = tokens[: found[0]], FinishReason.STOP, True
            self.stop_reason = stop_word_reason(found[1])
        elif finish is FinishReason.STOP and tokens:
            self.stop_reason = self.stop_tokens.reason(tokens[-1])
        count = len(tokens)
        # The token that ends the output is counted, but its text is not output.
        self.tokens += tokens[:-1] if finish is FinishReason.STOP and not include_last else tokens
        if self.detokenizer.watches:
            self.speak()
            if self.detokenizer.stopped:
                del self.tokens[self.detokenizer.num_tokens :]
                count = len(self.tokens) - self.num_tokens
                self.finish = FinishReason.STOP
                self.stop_reason = self.detokenizer.met
        self.num_tokens += count
        self.unsent += tokens[:count]
        if delta.logprobs:
            counted = delta.logprobs[:count]
            self.logprobs += counted
            self.cumulative_logprob += sum(drawn.logprob for drawn, *_ in counted)
        if finish and not self.finish:
            self.end(finish)

    def speak(self) -> None:
        """Turn the tokens that have piled up into text."""
        if self.read < len(self.tokens):
            piled = self.tokens[self.read :] if self.read else self.tokens
            self.read = len(self.tokens)
            self._say(self.detokenizer.push(piled))

    def end(self, finish: FinishReason) -> None:
        self.speak()
        self._say(self.detokenizer.flush())
        self.finish = finish
        if self.detokenizer.stopped:
            self.finish, self.stop_reason = FinishReason.STOP, self.detokenizer.met

    def send(self, *, offsets: bool, logprobs: bool) -> SampleOutput:
        """What a response tells of it: all that was not sent yet."""
        output = SampleOutput(
            self.text,
            self.finish.value if self.finish else None,
            self.unsent,
            self._unsent_offsets() if offsets else (),
            self.logprobs if logprobs else None,
            self.cumulative_logprob,
            self.stop_reason,
        )
        self.text, self.unsent, self.logprobs = "", [], []
        return output

    def _unsent_offsets(self) -> list[int]:
        known = self.detokenizer.offsets[self.num_tokens - len(self.unsent) : self.num_tokens]
        # The token that ended it, whose text is not output, is where the text ends.
        return known + [self.detokenizer.num_chars] * (len(self.unsent) - len(known))

    def _say(self, text: str) -> None:
        if text:
            self.text += text
            self.said.append(text)


@dataclass(eq=False)
class Stream:
    """One open request."""

    request: GenerateRequest
    call: Call
    channel: Channel
    samples: list[Sample]
    arrived: float  # time.monotonic()
    encode: Callable[[str], list[int]]
    token_text: Callable[[int], str]
    prompt_offsets: Sequence[int] | None = None  # where in the prompt's text its tokens begin, until it is sent
    turn: Turn | None = None
    block_size: int = 1
    max_seconds: float = math.inf  # that it may take, whatever its own limit
    error: RequestError | None = None
    usage: Usage | None = None
    entered: float | None = field(default=None, init=False)  # when it first computed
    first_token: float | None = field(default=None, init=False)
    last_token: float | None = field(default=None, init=False)
    preempted_in_prompt: float = field(default=0.0, init=False)  # seconds of waiting before the first token
    finished: bool = field(default=False, init=False)  # whether every sample is
    sent: bool = field(default=False, init=False)  # whether any response is
    sent_bytes: int = field(default=0, init=False)
    prompt_logprobs: tuple[Logprobs, ...] | None = field(default=None, init=False)  # not sent yet
    deadline: float = field(init=False)  # by time.monotonic()
    cut: FinishReason | None = field(default=None, init=False)  # why the engine was asked to end it with what it has

    def __post_init__(self) -> None:
        limits = (self.call.timeout_us / 1e6, (self.request.sampling.timeout_ms or 0) / 1e3)
        if self.request.sampling.prompt_logprobs is not None and len(self.request.prompt_token_ids) == 1:
            self.prompt_logprobs = ()  # there is nothing that the engine could tell
        self.deadline = self.arrived + min(*filter(None, limits), self.max_seconds, math.inf)

    def fill(self, stream: Stream) -> None:
        """Its prompt has been tokenized: go on as this stream, of which nothing was sent."""
        self.request, self.samples = stream.request, stream.samples
        self.prompt_offsets, self.prompt_logprobs = stream.prompt_offsets, stream.prompt_logprobs

    @property
    def is_tokenized(self) -> bool:
        """Whether its prompt is; no request has none."""
        return bool(self.request.prompt_token_ids)

    @property
    def is_search(self) -> bool:
        """Whether its samples are the outputs of a beam search."""
        return self.request.sampling.beam_width > 1

    @property
    def tenant(self) -> str:
        return self.request.sampling.cache_salt

    @property
    def ended(self) -> bool:
        return self.finished or self.error is not None

    def take(self, delta: TokenDelta, when: float) -> None:
        """Book what a step gave one of the samples."""
        self.usage = delta.usage or self.usage
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.token_ids or delta.hidden is not None or delta.prompt_logprobs is not None:
            if self.first_token is None:
                self.first_token = when
                self.preempted_in_prompt = self.usage.preempted_seconds if self.usage else 0.0
            self.last_token = when
        self.error = delta.error
        sample = self.samples[delta.sample]
        if delta.hidden is not None:
            assert self.call.embedding
            sample.text = embedding_json(delta.hidden, self.call.embedding.dimensions)
        sample.take(delta)
        if sample.finish:
            if self.cut:
                sample.finish, sample.stop_reason = self.cut, None
            self.finished = all(one.finish for one in self.samples)

    @property
    def answers(self) -> list[Sample]:
        """The samples that the client gets, the likeliest first where it gets a part of them."""
        sampling = self.request.sampling
        if not sampling.selects_best_of:
            return self.samples
        return sorted(self.samples, key=lambda one: one.cumulative_logprob, reverse=True)[: sampling.n]

    def usage_receipt(self) -> dict[str, Any]:
        """What the request took: tokens, blocks, and seconds in each phase."""
        now = time.monotonic()
        entered, first, last = self.entered or now, self.first_token or now, self.last_token or now
        usage = self.usage or Usage(*[0] * len(Usage._fields))
        preempted = usage.preempted_seconds - self.preempted_in_prompt
        return {
            "prompt_tokens": len(self.request.prompt_token_ids),
            "generated_tokens": sum(sample.num_tokens for sample in self.samples),
            **usage._asdict(),
            "blocks_missed": -(-(len(self.request.prompt_token_ids) - usage.cached_tokens) // self.block_size),
            "queued_seconds": entered - self.arrived,
            "prefill_seconds": first - entered - self.preempted_in_prompt,
            "decode_seconds": last - first - preempted,
            "arrival_time_ns": int(self.arrived * 1e9),
            "first_scheduled_time_ns": int(entered * 1e9),
            "first_token_time_ns": int(first * 1e9),
            "last_token_time_ns": int(last * 1e9),
        }

    def settle(self, *, answered: bool) -> None:
        """Before the last response goes out: a session goes on from here, or from where it was."""
        if self.turn is None:
            return
        if not (answered and self.is_tokenized):
            self.turn.undo()
            return
        (sample,) = self.samples
        # A stop string cuts text that its tokens still have: what was seen is encoded anew.
        tokens = self.encode(sample.all_text) if sample.detokenizer.stopped else sample.tokens
        self.turn.finish([*self.request.prompt_token_ids, *tokens], sample.all_text)

    def end(self, finish: FinishReason) -> None:
        """End every sample that is still open."""
        for sample in self.samples:
            if not sample.finish:
                sample.end(finish)
        self.finished = True
