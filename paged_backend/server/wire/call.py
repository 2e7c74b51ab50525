"""A request as the client sent it, typed but not yet tokenized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paged_backend.server.pooling import PoolingCall


class SequenceControl(NamedTuple):
    """Which session a request is a turn of, in Triton's terms: its sequence id, and whether it starts or ends it."""

    id: int | str
    start: bool
    end: bool


@dataclass(frozen=True)
class Call:
    """A request after `read_call`: types are checked, the model's limits are not.

    Of `prompt`, `messages` and `input_ids` at most one is set; none is set where the request only ends a session.
    JSON that may be long is in `unread`, as it came, until `read_prompt` sets the fields that it is for.
    """

    prompt: str | None
    messages: list[dict[str, Any]] | None  # a conversation for the model's chat template
    sampling: dict[str, Any]
    stream: bool
    echo: bool  # whether the prompt comes before the output
    return_finish_reason: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool
    return_receipt: bool
    timeout_us: int  # 0: none
    sequence: SequenceControl | None = None
    request_id: str = ""  # id chosen by the client; need not be unique
    return_logprobs: bool = False
    return_cumulative_logprob: bool = False
    input_ids: np.ndarray | None = None  # [num_tokens] int32: the prompt as token ids; nothing is added to them
    return_token_ids: bool = False
    return_text_offsets: bool = False
    pooling_type: type[PoolingCall] | None = None  # for an embedding or a classification instead of text
    pooling: PoolingCall | None = None  # its content
    tools: list[dict[str, Any]] | None = None  # tools for the chat template; allowed with `messages` only
    return_stop_reason: bool = False
    template_variables: dict[str, Any] | None = None  # `chat_template_kwargs`; allowed with `messages` only
    trace_context: Mapping[str, str] = field(default_factory=dict)  # `traceparent` and `tracestate` of W3C
    is_chat: bool = False  # whether the prompt came as `messages`
    unread: Mapping[str, bytes | str] = field(default_factory=dict)  # JSON by the name of its input

    @property
    def num_chars(self) -> int:
        """Characters of the prompt, and bytes of unread JSON."""
        return len(self.prompt or "") + sum(map(len, self.unread.values()))

    @property
    def only_ends_session(self) -> bool:
        """Whether the request ends a session without a prompt."""
        return not (self.is_chat or self.unread or self.prompt) and self.input_ids is None

    @property
    def prompt_field(self) -> str:
        """The input tensor that the prompt came in."""
        return "text_input" if self.prompt is not None else "messages" if self.is_chat else "input_ids"
