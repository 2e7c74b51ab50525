"""What a client asks for and what it gets, free of tensors and of the wire."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.api.guide import Guide
from paged_backend.api.limits import UNBOUNDED_MAX_TOKENS, EngineLimits
from paged_backend.api.sampling_params import SamplingParams


class Origin(NamedTuple):
    """What keys and values depend on beside the tokens, and who may find them."""

    salt: str
    adapter: bytes = b""  # a digest of its content; none for the model itself


class FinishReason(Enum):
    STOP = "stop"  # end-of-sequence token, a stop token id, or a stop string
    LENGTH = "length"  # max_tokens
    TIMEOUT = "timeout"  # the request's own time limit
    CANCELLED = "cancelled"  # its client, who wants what there is


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter, as its files were when they were read."""

    name: str
    digest: bytes  # of the files: adapters of equal digest are one
    rank: int
    factors: Mapping[str, Any] = field(repr=False)  # by linear layer, for whoever computes


@dataclass(frozen=True)
class GenerateRequest:
    """One validated request. `key` is ours and unique; the client's request id need not be."""

    key: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # the request's own, or one drawn for it
    stop_ids: frozenset[int]  # token ids that end the output: end of sequence (unless ignored) and stop_token_ids
    embeds: bool = False  # wants the hidden state of its last token, and draws none
    returns_usage: bool = False
    session: Hashable = None  # whose next turn will go on from this one's blocks
    logprobs: int | None = None  # likeliest tokens to be told with each, beside its own log probability; None: neither
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that the output must not have
    allowed: bytes | None = None  # bitmask of the tokens that may be drawn; None: all
    adapter: Adapter | None = None
    ends: Callable[[Sequence[int]], bool] | None = None  # whether a beam's output has ended with its last token
    guides: tuple[Guide, ...] = ()  # of each sample, which of them may come next; none: any

    @cached_property
    def constrains_logits(self) -> bool:
        """Whether any token may be forbidden or favoured."""
        sampling = self.sampling
        masked = self.allowed is not None or bool(self.guides)
        return bool(masked or sampling.min_tokens or sampling.logit_bias or self.bad_words)

    @cached_property
    def biases(self) -> tuple[array[int], array[float]]:
        """Tokens (int64) and what is always added to their logits (float32): -infinity for a bad word of one token."""
        words = ((word[0], -math.inf) for word in self.bad_words if len(word) == 1)
        pairs = [*self.sampling.logit_bias, *words]
        return array("q", [token for token, _ in pairs]), array("f", [value for _, value in pairs])

    @cached_property
    def bad_word_endings(self) -> dict[int, list[tuple[list[int], int]]]:
        """Bad words of several tokens, by the last but one: those before it, and the last."""
        found: dict[int, list[tuple[list[int], int]]] = {}
        for *before, latest, last in (word for word in self.bad_words if len(word) > 1):
            found.setdefault(latest, []).append((before, last))
        return found

    @property
    def depends_on_output(self) -> bool:
        """Whether how a token is drawn depends on others of the output, beside what the model makes of them."""
        return self.sampling.has_penalty or bool(self.bad_word_endings)

    @property
    def origin(self) -> Origin:
        """Where its blocks' contents begin: what other tenants or adapters computed is not for it."""
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
    ) -> GenerateRequest:
        """Raises RequestError for a prompt that is empty, or a request that can never fit the model or the pool, or may
        find no token that it can draw."""
        prompt = len(tokens)
        if prompt == 0:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "text_input: the prompt is empty; give at least one token")
        sampling = fit_max_tokens(prompt, sampling, limits)
        if max(tokens) >= limits.vocab_size:  # the tokenizer knows tokens that the model has no embedding for
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"text_input: holds token {max(tokens)}, but the model's vocabulary ends at {limits.vocab_size - 1}",
            )
        stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos)
        allowed = None
        if sampling.allowed_token_ids is not None:
            bad_word_endings = stop_ids if sampling.min_tokens else frozenset()
            if sampling.allowed_token_ids <= bad_word_endings.union(word[-1] for word in bad_words):
                raise invalid_argument(
                    "allowed_token_ids",
                    sorted(sampling.allowed_token_ids),
                    "bad_words and min_tokens may forbid all of them",
                )
            allowed = bitmask(sampling.allowed_token_ids, limits.vocab_size)
        return cls(key, tuple(tokens), sampling, seed, stop_ids, bad_words=bad_words, allowed=allowed)


def bitmask(tokens: Iterable[int], vocab_size: int) -> bytes:
    """Bit t % 8 of byte t // 8 is set where token t is among them; in whole 32 bits."""
    bits = bytearray(4 * -(-vocab_size // 32))
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def fit_max_tokens(prompt: int, sampling: SamplingParams, limits: EngineLimits) -> SamplingParams:
    """The same with a number of output tokens that fits the model and the pool after a prompt of so many tokens. Raises
    RequestError where none does, or not as many as are asked for."""
    check_prompt_length(prompt, sampling.max_tokens, limits)
    output, count = sampling.max_tokens, sampling.num_seqs
    room = limits.max_model_len - prompt
    if output != UNBOUNDED_MAX_TOKENS and output > room:
        raise invalid_argument("max_tokens", output, f"must be 1..{room} after a prompt of {prompt} tokens"
                      f" (max_model_len is {limits.max_model_len})")  # fmt: skip
    at_once = max_blocks_needed(prompt, 1, count, limits.block_size)
    if at_once > limits.num_blocks:
        raise invalid_argument("prompt_tokens", prompt, f"needs {at_once} blocks of the key/value pool, which has"
                      f" {limits.num_blocks}")  # fmt: skip
    if output == UNBOUNDED_MAX_TOKENS:
        sampling = replace(sampling, max_tokens=min(room, max_output_tokens(prompt, count, limits)))
        sampling.check_min_tokens()
        return sampling
    needed = max_blocks_needed(prompt, output, count, limits.block_size)
    if needed > limits.num_blocks:
        kind = "samples" if sampling.beam_width == 1 else "beams"
        of = f" of {count} {kind}" if count > 1 else ""
        raise invalid_argument(
            "max_tokens",
            output,
            f"prompt and output{of} need {needed} blocks of the key/value pool, which has {limits.num_blocks}",
        )
    return sampling


def check_prompt_length(count: int, max_tokens: int, limits: EngineLimits) -> None:
    """Raises RequestError for a prompt that leaves no room for an output, if there is to be one."""
    left = min(max_tokens, 1)
    if count + left > limits.max_model_len:
        generates = ", and one token must be left to generate" * left
        raise invalid_argument("prompt_tokens", count, f"must be 1..{limits.max_model_len - left} (max_model_len is"
                      f" {limits.max_model_len}{generates})")  # fmt: skip


def max_blocks_needed(prompt: int, output: int, n: int, block_size: int) -> int:
    """Blocks that a request holds at its end: the prompt's full ones once, the rest for each sample. The last token's
    keys and values are never needed."""
    shared = prompt // block_size if n > 1 else 0
    return shared + n * (-(-(prompt + output - 1) // block_size) - shared)


def max_output_tokens(prompt: int, n: int, limits: EngineLimits) -> int:
    """How long an output may be so that `blocks_at_most` is no more than the pool has."""
    shared = prompt // limits.block_size if n > 1 else 0
    each = shared + (limits.num_blocks - shared) // n
    return each * limits.block_size - prompt + 1


class Usage(NamedTuple):
    """What a request has taken so far."""

    cached_tokens: int  # of its prompt, found in the cache when it was first let in
    blocks_new: int  # blocks that it was given, each time it was
    blocks_reused: int  # blocks that it found
    blocks_copied: int  # copies on write, among the new ones
    blocks_from_host: int  # brought back from the host's memory, among the new ones
    preemptions: int
    preempted_seconds: float  # from those until it was let in again
    guessed_tokens: int = 0  # draft tokens that were verified; the name is part of the receipt
    accepted_tokens: int = 0  # of those


class TokenLogprob(NamedTuple):
    """What the model's own distribution, before temperature, penalties and filters, has for a token."""

    token: int
    logprob: float  # natural logarithm
    rank: int  # 1 + how many tokens have a higher logit


Logprobs = tuple[TokenLogprob, ...]  # of a token that was drawn, then of the likeliest others, the first first
HiddenState = array  # of float32: what the model's last layer gives for a token, normalised as its head wants it


class TokenDelta(NamedTuple):
    """What one step gave one sample of a request. Exactly one delta of a sample has `finish` set, its last; or else
    one of the request has `error` set, which ends all its samples."""

    key: int
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: RequestError | None = None
    sample: int = 0  # which of the request's
    usage: Usage | None = None  # where the request asked for it
    logprobs: tuple[Logprobs, ...] = ()  # of each token, where the request asked for them
    hidden: HiddenState | None = None  # of the prompt's last token, of a request that embeds
    prompt_logprobs: tuple[Logprobs, ...] | None = None  # of each token of the prompt after the first, once for all

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None
