"""What the clients return and raise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_ERROR_PREFIX = "Error generating stream: "  # as in Triton's vLLM backend
_ERROR_CLASS = re.compile(r"([A-Z][A-Z_]+): *(.*)", re.DOTALL)
# What that backend says to the letter, and so this one, without a class: it is the request's fault.
_VERBATIM = re.compile(
    r"LoRA feature is not enabled\.|LoRA .* is not supported, we currently support .*"
    r"|When streaming, `exclude_input_in_output` = False is not allowed\.",
    re.DOTALL,
)


@dataclass(frozen=True)
class TokenLogprob:
    """A token under the model's own distribution: before temperature, penalties and filters."""

    token_id: int
    logprob: float  # natural logarithm
    rank: int  # 1: no token is likelier
    decoded_token: str  # its text by itself


Logprobs = tuple[TokenLogprob, ...]  # of a generated token, then of the likeliest others, the first first


@dataclass(frozen=True, kw_only=True)
class PromptInfo:
    """What is told of a prompt's tokens: with the first piece of an answer, and with its first sample as a whole."""

    prompt_token_ids: tuple[int, ...] | None = None  # None without `return_token_ids=True`
    # Where in the text each begins; None without `echo=True, return_text_offsets=True`.
    prompt_text_offsets: tuple[int, ...] | None = None
    # The first one's own text, which the prompt's has not where it is a special token; None likewise.
    first_prompt_token: str | None = None
    # Of each, None of the first; None without `prompt_logprobs=k`.
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None


@dataclass(frozen=True)
class Delta(PromptInfo):
    """One streamed piece of one sample. A piece may hold several tokens, or none that are printable yet."""

    text: str
    num_output_tokens: int  # of this piece
    finish_reason: str | None  # "stop", "length" or "timeout" on the sample's last piece, None before
    index: int = 0  # of the sample, for n > 1
    logprobs: tuple[Logprobs, ...] | None = None  # of each token of this piece; None without `logprobs=k`
    cumulative_logprob: float | None = None  # of all tokens up to here, likewise
    token_ids: tuple[int, ...] | None = None  # of this piece; None without `return_token_ids=True`
    # Where in the sample's whole text each token begins; None without `return_text_offsets=True`.
    text_offsets: tuple[int, ...] | None = None
    num_input_tokens: int = field(default=0, compare=False)  # of the prompt


@dataclass(frozen=True)
class Completion(PromptInfo):
    """A whole answer. `finish_reason` is "stop", "length", "timeout", or "cancelled" where the caller ended it."""

    text: str
    finish_reason: str
    num_input_tokens: int  # of the prompt; 0 where it was cancelled before the first piece came
    num_output_tokens: int
    others: tuple[Completion, ...] = ()  # the samples after the first, for n > 1
    # What the whole request took: tokens found in the cache, blocks, seconds in each phase.
    receipt: Mapping[str, float] | None = field(default=None, compare=False)
    logprobs: tuple[Logprobs, ...] | None = None  # of each token; None without `logprobs=k`
    cumulative_logprob: float | None = None  # of all of them, likewise
    token_ids: tuple[int, ...] | None = None  # None without `return_token_ids=True`
    text_offsets: tuple[int, ...] | None = None  # where in `text` each begins; None without `return_text_offsets=True`


@dataclass(frozen=True)
class Embedding:
    """A prompt as a direction: numbers of which the squares add up to 1."""

    values: tuple[float, ...]
    num_input_tokens: int  # of the prompt
    receipt: Mapping[str, float] | None = field(default=None, compare=False)  # as of a Completion


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that the server lists."""

    name: str  # for `lora_name=`
    rank: int | None  # None where it cannot be served
    resident: bool  # whether it is on the device now
    error: str | None = None  # why it cannot be served


@dataclass(frozen=True)
class PoolMap:
    """The blocks of a server's pool at one moment.

    `states` has a character a block, in order of their numbers: "." free, "c" cached (nobody holds it, its content is
    known), "1" to "9" held by so many sequences, "+" by more, "p" pinned by a session and held by no sequence.
    """

    time: float  # seconds since 1970, by the server's clock
    block_size: int  # tokens
    num_blocks: int
    states: str
    running: int  # requests
    waiting: int
    tokens: int  # whose keys and values are in the blocks that sequences hold
    cached_tokens_hit: int  # prompt tokens found in the cache, since the server started
    preemptions: int  # likewise

    def __post_init__(self) -> None:
        if len(self.states) != self.num_blocks or not self.states or set(self.states) - set(".c123456789+p"):
            raise ValueError(f"states={self.states[:40]!r}: must be {self.num_blocks} characters of .c1-9+p, 1 or more")

    @property
    def free(self) -> int:
        return self.states.count(".")

    @property
    def cached(self) -> int:
        return self.states.count("c")

    @property
    def pinned(self) -> int:
        return self.states.count("p")

    @property
    def owned(self) -> int:
        """Blocks that one sequence holds."""
        return self.states.count("1")

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.free - self.cached - self.pinned

    @property
    def shared(self) -> int:
        """Blocks that several sequences hold."""
        return self.used - self.owned

    @property
    def utilisation(self) -> float | None:
        """Share of the used blocks' slots that hold a token, as in the PagedAttention paper; None without any."""
        return self.tokens / (self.used * self.block_size) if self.used else None


class PagedError(Exception):
    """A request that failed. `code` is the stable class, `message` the reason without it.

    The server's own classes are INVALID_ARGUMENT, UNAVAILABLE, CANCELLED, DEADLINE_EXCEEDED (`timeout_ms` passed,
    where a part of the answer is of no use) and INTERNAL. The transport adds DEADLINE_EXCEEDED (the `timeout` ran
    out), UNAVAILABLE (no server, or it went away), NOT_FOUND (no such model) and whatever else gRPC has a name for.
    UNKNOWN: the server gave a message and no class.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @classmethod
    def parse(cls, text: str, code: str = "UNKNOWN") -> PagedError:
        """Split "CLASS: message", with or without the server's prefix; text that names no class gets `code`."""
        text = text.strip().removeprefix(_ERROR_PREFIX)
        match = _ERROR_CLASS.fullmatch(text)
        if match:
            return cls(match[1], match[2])
        return cls("INVALID_ARGUMENT" if _VERBATIM.fullmatch(text) else code, text)
