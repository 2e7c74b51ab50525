"""Requests to the engine and the outputs that it returns, independent of tensors and of the wire format."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.api.guide import Guide
from paged_backend.api.limits import UNBOUNDED_MAX_TOKENS, EngineLimits
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.thinking import Reasoning, ThinkingBudget
from paged_backend.api.token_outputs import NOTHING, Requested, Values, requested_prompt_outputs
from paged_backend.api.trace import RequestTrace


class Origin(NamedTuple):
    """The properties besides the tokens that cached keys and values depend on. Blocks are shared only within one
    origin."""

    salt: str  # cache_salt of the tenant
    adapter: bytes = b""  # digest of the LoRA adapter; empty without one


class FinishReason(Enum):
    STOP = "stop"  # end-of-sequence token, a stop token id, or a stop string
    LENGTH = "length"  # max_tokens
    TIMEOUT = "timeout"  # timeout of the request
    CANCELLED = "cancelled"  # cancelled by the client, which gets the output so far


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter, loaded from its files."""

    name: str
    digest: bytes  # digest of the files; adapters with equal digests are the same
    rank: int
    factors: Mapping[str, Any] = field(repr=False)  # low-rank matrices by name of the linear layer


@dataclass(frozen=True)
class Progress:
    """The output of a request so far, from the engine that it was moved from."""

    outputs: tuple[tuple[int, ...] | None, ...]  # output tokens of each sample; None: the sample has ended
    has_prompt_values: bool = False  # whether the optional outputs of the prompt were returned
    usage: Usage | None = None  # if the request returns it
    adapter: bytes = b""  # digest of the LoRA adapter; empty without one


@dataclass(frozen=True)
class GenerateRequest:
    """One validated request."""

    key: int  # unique in this process, unlike the client's request id
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # seed of the request, or a random one
    stop_ids: frozenset[int]  # token ids that end the output: end of sequence (unless ignored) and stop_token_ids
    embeds: bool = False  # returns the hidden state of its last prompt token and generates no tokens
    returns_usage: bool = False
    session: Hashable = None  # the session whose next turn continues from this request's blocks
    token_outputs: Requested = field(default_factory=dict)  # optional outputs of each output token
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not contain
    thinking: ThinkingBudget | None = None  # None: reasoning is not limited
    allowed: bytes | None = None  # bitmask of the allowed tokens; None: all are allowed
    adapter: Adapter | None = None
    ends: Callable[[Sequence[int]], bool] | None = None  # returns whether a beam with these output tokens has ended
    guides: tuple[Guide, ...] = ()  # one guide per sample; empty: unconstrained
    trace: RequestTrace | None = field(default=None, compare=False)  # None: not traced
    progress: Progress | None = None  # None: no other engine has generated anything for it
    stays: bool = False  # whether it is not moved, because another engine has rejected it
    announcement: object = field(default=None, compare=False, repr=False)  # see `Engine.announce`

    @cached_property
    def prompt_outputs(self) -> Requested:
        """The optional outputs of each token of the prompt but the first."""
        return requested_prompt_outputs(self.sampling)

    @cached_property
    def constrains_logits(self) -> bool:
        """Whether tokens may be masked or biased."""
        sampling = self.sampling
        masked = self.allowed is not None or bool(self.guides)
        return bool(masked or sampling.min_tokens or sampling.logit_bias or self.bad_words or self.thinking)

    @cached_property
    def is_greedy(self) -> bool:
        """Whether each token is the model's most likely one, and no optional output is requested."""
        sampling = self.sampling
        changed = sampling.temperature > 0 or sampling.beam_width > 1 or sampling.has_penalty or self.constrains_logits
        return not (changed or self.token_outputs)

    @cached_property
    def prompt_reasoning(self) -> Reasoning:
        """The reasoning in the prompt, for a request with a thinking budget."""
        assert self.thinking is not None
        return self.thinking.after_prompt(self.prompt_token_ids)

    @cached_property
    def biases(self) -> tuple[array[int], array[float]]:
        """Token ids (int64) and the values to add to their logits (float32), which are -infinity for bad words of one
        token."""
        words = ((word[0], -math.inf) for word in self.bad_words if len(word) == 1)
        pairs = [*self.sampling.logit_bias, *words]
        return array("q", [token for token, _ in pairs]), array("f", [value for _, value in pairs])

    @cached_property
    def bad_word_endings(self) -> dict[int, list[tuple[list[int], int]]]:
        """Bad words of several tokens, as (all tokens but the last, last token), by their second to last token."""
        endings: dict[int, list[tuple[list[int], int]]] = {}
        for *before, latest, last in (word for word in self.bad_words if len(word) > 1):
            endings.setdefault(latest, []).append((before, last))
        return endings

    @property
    def can_move(self) -> bool:
        """Whether another engine can run the request from its start. Embeddings and `prefill_only` requests stay."""
        return not (self.stays or self.embeds or self.sampling.prefill_only)

    @property
    def depends_on_output(self) -> bool:
        """Whether sampling depends on earlier output tokens other than through the model's logits."""
        return self.sampling.has_penalty or bool(self.bad_word_endings)

    @property
    def origin(self) -> Origin:
        """The origin of the request's blocks, which excludes blocks of other tenants and adapters."""
        return Origin(self.sampling.cache_salt, self.adapter.digest if self.adapter else b"")

    @classmethod
    def from_prompt(
        cls,
        key: int,
        tokens: list[int],
        sampling: SamplingParams,
        seed: int,
        eos: frozenset[int],
        limits: EngineLimits,
        bad_words: tuple[tuple[int, ...], ...] = (),
        thinking: ThinkingBudget | None = None,
        *,
        field: str = "text_input",
    ) -> GenerateRequest:
        """Build a request from a tokenized prompt. field: the field of the prompt, for errors.

        Raises RequestError if the prompt is empty, if the request can never fit the context or the KV cache, or if its
        parameters could forbid every token.
        """
        prompt = len(tokens)
        if prompt == 0:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{field}: the prompt is empty; give at least one token")
        sampling = fit_max_tokens(prompt, sampling, limits)
        if max(tokens) >= limits.vocab_size:  # possible, as a tokenizer may have more tokens than the model
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"{field}: holds token {max(tokens)}, but the model's vocabulary ends at {limits.vocab_size - 1}",
            )
        stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos)
        forbidden = (stop_ids if sampling.min_tokens else frozenset()).union(word[-1] for word in bad_words)
        if thinking:
            _check_end_mark(thinking, forbidden, sampling.allowed_token_ids)
        allowed = None
        if sampling.allowed_token_ids is not None:
            if sampling.allowed_token_ids <= forbidden:
                raise invalid_argument(
                    "allowed_token_ids",
                    sorted(sampling.allowed_token_ids),
                    "bad_words and min_tokens may forbid all of them",
                )
            allowed = bitmask(sampling.allowed_token_ids, limits.vocab_size)
        return cls(
            key, tuple(tokens), sampling, seed, stop_ids, bad_words=bad_words, thinking=thinking, allowed=allowed
        )


def _check_end_mark(thinking: ThinkingBudget, forbidden: frozenset[int], allowed: frozenset[int] | None) -> None:
    """Raise RequestError if a token of the end mark may be excluded."""
    for token in thinking.end:
        if token in forbidden or (allowed is not None and token not in allowed):
            raise invalid_argument(
                "thinking_token_budget",
                thinking.limit,
                f"must be null: allowed_token_ids, bad_words or min_tokens may exclude token {token}, which ends"
                " reasoning",
            )


def bitmask(tokens: Iterable[int], vocab_size: int) -> bytes:
    """Return a bitmask with bit t % 8 of byte t // 8 set for every token t, padded to whole 32-bit words."""
    bits = bytearray(4 * -(-vocab_size // 32))
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def fit_max_tokens(prompt: int, sampling: SamplingParams, limits: EngineLimits) -> SamplingParams:
    """Return the parameters with `max_tokens` set to a number that fits the context and the KV cache.

    Raises RequestError if not even one token fits, or not as many as the request asks for.

    Args:
        prompt: length of the prompt in tokens.
        sampling: parameters of the request.
        limits: limits of the engine.
    """
    check_prompt_length(prompt, sampling.max_tokens, limits)
    output, count = sampling.max_tokens, sampling.num_seqs
    room = limits.max_model_len - prompt
    if output != UNBOUNDED_MAX_TOKENS and output > room:
        raise invalid_argument("max_tokens", output, f"must be 1..{room} after a prompt of {prompt} tokens"
                      f" (max_model_len is {limits.max_model_len})")  # fmt: skip
    at_once = max_blocks_needed(prompt, 1, count, limits.layout)
    if at_once > limits.num_pages:
        raise invalid_argument("prompt_tokens", prompt, f"needs {at_once} blocks of the KV cache, which has"
                      f" {limits.num_pages}")  # fmt: skip
    if output == UNBOUNDED_MAX_TOKENS:
        default = limits.sampling_defaults.max_tokens or UNBOUNDED_MAX_TOKENS
        sampling = replace(sampling, max_tokens=min(room, max_output_tokens(prompt, count, limits), default))
        sampling.check_min_tokens()
        return sampling
    needed = max_blocks_needed(prompt, output, count, limits.layout)
    if needed > limits.num_pages:
        kind = "samples" if sampling.beam_width == 1 else "beams"
        of_samples = f" of {count} {kind}" if count > 1 else ""
        raise invalid_argument(
            "max_tokens",
            output,
            f"prompt and output{of_samples} need {needed} blocks of the KV cache, which has {limits.num_pages}",
        )
    return sampling


def check_prompt_length(count: int, max_tokens: int, limits: EngineLimits) -> None:
    """Raise RequestError if a prompt of `count` tokens leaves no room for the output."""
    left = min(max_tokens, 1)
    if count + left > limits.max_model_len:
        generates = ", and one token must be left to generate" * left
        raise invalid_argument("prompt_tokens", count, f"must be 1..{limits.max_model_len - left} (max_model_len is"
                      f" {limits.max_model_len}{generates})")  # fmt: skip


def max_blocks_needed(prompt: int, output: int, n: int, layout: BlockLayout) -> int:
    """Return the blocks that a request needs at most: full prompt blocks once, all others for each of `n` samples.

    They are pages if the layout divides blocks. The keys and values of the last token are never computed.
    """
    length = prompt + output - 1
    return layout.pages_for([length] * n, [length] * n, prompt // layout.block_size if n > 1 else 0)


def max_output_tokens(prompt: int, n: int, limits: EngineLimits) -> int:
    """Return the longest output, within the context, for which `max_blocks_needed` is at most the number of blocks."""
    outputs = range(1, limits.max_model_len - prompt + 1)
    return bisect_right(
        outputs, limits.num_pages, key=lambda output: max_blocks_needed(prompt, output, n, limits.layout)
    )


class Usage(NamedTuple):
    """Resources that a request has used so far."""

    cached_tokens: int  # prompt tokens found in the prefix cache when it was first admitted
    blocks_new: int  # blocks allocated, again after each preemption
    blocks_reused: int  # blocks found in the prefix cache
    blocks_copied: int  # blocks_new that are copies on write
    blocks_from_host: int  # blocks_new that were copied from host memory
    preemptions: int
    preempted_seconds: float  # time between preemptions and readmissions
    guessed_tokens: int = 0  # draft tokens that were verified; the name is part of the receipt
    accepted_tokens: int = 0  # draft tokens that were accepted
    stored_tokens: int = 0  # prompt tokens whose blocks the remote cache has, for a `prefill_only` request

    def plus(self, more: Usage) -> Usage:
        """Return the whole usage of a request that was moved. more: its usage in the later engine."""
        return Usage._make((self[0], *(earlier + later for earlier, later in zip(self[1:], more[1:], strict=True))))


HiddenState = array  # [hidden_size] float32: output of the last layer for a token, after the final norm


class TokenDelta(NamedTuple):
    """The output of one step for one sample of a request.

    The last delta of every sample has `finish` set. Alternatively, one delta of the request has `error` set, which ends
    all its samples.
    """

    key: int
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: RequestError | None = None
    sample: int = 0  # index of the sample
    usage: Usage | None = None  # usage so far, if requested
    values: Values = NOTHING  # values of the requested optional outputs, one for each token
    hidden: HiddenState | None = None  # hidden state of the last prompt token, for an embedding
    prompt_values: Values | None = None  # one for each prompt token after the first; sent once

    @property
    def last(self) -> bool:
        """Whether the sample, or with an error the request, has ended."""
        return self.finish is not None or self.error is not None
