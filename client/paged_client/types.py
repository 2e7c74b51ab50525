"""The types that the clients return, and the exception that they raise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paged_backend.api.errors import LORA_NOT_ENABLED

_ERROR_PREFIX = "Error generating stream: "  # the same prefix as in Triton's vLLM backend
_ERROR_CLASS = re.compile(r"([A-Z][A-Z_]+): *(.*)", re.DOTALL)
# Messages that are the same as in the vLLM backend and therefore have no class. All are invalid requests.
_VLLM_MESSAGES = re.compile(
    re.escape(LORA_NOT_ENABLED) + r"|LoRA .* is not supported, we currently support .*"
    r"|When streaming, `exclude_input_in_output` = False is not allowed\.",
    re.DOTALL,
)


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log probability under the raw logits: before temperature, penalties, top_k, top_p and min_p."""

    token_id: int
    logprob: float  # natural logarithm
    rank: int  # 1 for the most likely token
    decoded_token: str  # text of the token alone


Logprobs = tuple[TokenLogprob, ...]  # the chosen token first, then the most likely ones in descending order


@dataclass(frozen=True, kw_only=True)
class PromptInfo:
    """Fields about the prompt. A stream has them in its first delta, and `prompt_logprobs` in the first delta after the
    prompt has been computed; a completion has them in its first sample."""

    prompt_token_ids: tuple[int, ...] | None = None  # None without `return_token_ids=True`
    # The character at which each prompt token begins; None without `echo=True, return_text_offsets=True`.
    prompt_text_offsets: tuple[int, ...] | None = None
    # The text of the first prompt token, which a special token does not have in `text`; None as above.
    first_prompt_token: str | None = None
    # For each prompt token (None for the first one); None without `prompt_logprobs=k`.
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None


@dataclass(frozen=True)
class Delta(PromptInfo):
    """A streamed part of one sample. It may have several tokens, or tokens whose text is not complete yet."""

    text: str
    num_output_tokens: int  # tokens of this delta
    finish_reason: str | None  # "stop", "length" or "timeout" in the sample's last delta, None before
    index: int = 0  # index of the sample, for n > 1
    logprobs: tuple[Logprobs, ...] | None = None  # one entry per token of this delta; None without `logprobs=k`
    cumulative_logprob: float | None = None  # sum over all tokens so far; None without `logprobs=k`
    token_ids: tuple[int, ...] | None = None  # tokens of this delta; None without `return_token_ids=True`
    # The character of the sample's text at which each token begins; None without `return_text_offsets=True`.
    text_offsets: tuple[int, ...] | None = None
    reasoning_content: str | None = None  # reasoning, which `text` then lacks; None without `return_reasoning_content`
    # Tool calls that this delta completes, {"type": "function", "function": {"name": ..., "arguments": {...}}} each,
    # which `text` then lacks; None without `return_tool_calls=True`.
    tool_calls: tuple[Mapping[str, Any], ...] | None = None
    num_input_tokens: int = field(default=0, compare=False)  # prompt tokens


@dataclass(frozen=True)
class Completion(PromptInfo):
    """The whole output of a request. `finish_reason` is "stop", "length", "timeout" or "cancelled" (by the caller)."""

    text: str
    finish_reason: str
    num_input_tokens: int  # prompt tokens; 0 if it was cancelled before the first delta
    num_output_tokens: int
    others: tuple[Completion, ...] = ()  # the samples after the first one, for n > 1
    # Resource use of the whole request: cached tokens, blocks, seconds in each phase. With `logits_digest=True` also
    # `logits_digests`, one for each sample.
    receipt: Mapping[str, Any] | None = field(default=None, compare=False)
    logprobs: tuple[Logprobs, ...] | None = None  # one entry per token; None without `logprobs=k`
    cumulative_logprob: float | None = None  # sum over all tokens; None without `logprobs=k`
    token_ids: tuple[int, ...] | None = None  # None without `return_token_ids=True`
    # The character of `text` at which each token begins; None without `return_text_offsets=True`.
    text_offsets: tuple[int, ...] | None = None
    reasoning_content: str | None = None  # as in Delta
    tool_calls: tuple[Mapping[str, Any], ...] | None = None  # as in Delta


@dataclass(frozen=True)
class Embedding:
    """The embedding of a prompt: a vector of length 1."""

    values: tuple[float, ...]
    num_input_tokens: int  # prompt tokens
    receipt: Mapping[str, float] | None = field(default=None, compare=False)  # the receipt, as in Completion


@dataclass(frozen=True)
class Classification:
    """The classes of a prompt."""

    label: str  # the most likely label
    probs: tuple[float, ...]  # probabilities of all labels; scores with `use_activation=False`
    num_input_tokens: int  # prompt tokens
    receipt: Mapping[str, float] | None = field(default=None, compare=False)  # the receipt, as in Completion


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that the server lists."""

    name: str  # the value for `lora_name=`
    rank: int | None  # rank of its matrices; None if it cannot be served
    resident: bool  # whether it is in a device slot
    error: str | None = None  # why it cannot be served


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a served model, for routers and frontends."""

    path: str  # of its files on the server's machine: a directory or a GGUF file
    tasks: tuple[str, ...]  # of "generate", "embed" and "classify"
    chat_template: str | None
    max_model_len: int
    block_size: int  # tokens per block
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int  # adapters of a batch; 0: the server has none
    kv_events: Mapping[str, str] | None  # where the server publishes them: "endpoint" and "topic"; None: it does not
    remote_cache: bool  # whether the server shares blocks with others


@dataclass(frozen=True)
class PoolMap:
    """A snapshot of the block pool of a server.

    `states` has one character for each block, in the order of block ids: "." free, "c" cached (no references, but
    its content can still be matched), "1" to "9" the number of sequences that reference it, "+" for more than 9,
    "p" pinned by a session and not referenced by a sequence.
    """

    time: float  # Unix time by the server's clock
    block_size: int  # tokens per block
    num_blocks: int
    states: str
    running: int  # running requests
    waiting: int  # waiting requests
    tokens: int  # tokens whose keys and values are in referenced blocks
    cached_tokens_hit: int  # prompt tokens found in the prefix cache since the server started
    preemptions: int  # number since the server started
    max_model_len: int | None = None  # context length; None from a server that does not send it
    sleeping: bool = False  # whether `paged sleep` has released the memory of the model
    state_blocks: int = 0  # referenced blocks that hold states of recurrent layers instead of tokens

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
        """Blocks that exactly one sequence references."""
        return self.states.count("1")

    @property
    def used(self) -> int:
        """Blocks that at least one sequence references."""
        return self.num_blocks - self.free - self.cached - self.pinned

    @property
    def shared(self) -> int:
        """Blocks that several sequences reference."""
        return self.used - self.owned

    @property
    def utilisation(self) -> float | None:
        """The share of slots for tokens in used blocks that hold one, as defined in the PagedAttention paper
        (arXiv:2309.06180); None if there is none."""
        blocks = self.used - self.state_blocks
        return self.tokens / (blocks * self.block_size) if blocks else None


class PagedError(Exception):
    """A failed request. `code` is the stable error class, `message` the reason.

    The server uses INVALID_ARGUMENT, UNAVAILABLE, CANCELLED, DEADLINE_EXCEEDED (`timeout_ms` has passed and there is
    no partial output to return) and INTERNAL. The transport adds DEADLINE_EXCEEDED (the client's `timeout` has
    passed), UNAVAILABLE (the server cannot be reached or has disconnected), NOT_FOUND (unknown model) and the other
    gRPC status codes. UNKNOWN is a server message without a class.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @classmethod
    def parse(cls, text: str, code: str = "UNKNOWN") -> PagedError:
        """Parse "CLASS: message", with or without the server's prefix. Text without a class gets `code`."""
        text = text.strip().removeprefix(_ERROR_PREFIX)
        match = _ERROR_CLASS.fullmatch(text)
        if match:
            return cls(match[1], match[2])
        return cls("INVALID_ARGUMENT" if _VLLM_MESSAGES.fullmatch(text) else code, text)
