"""Writes responses and error texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import Logprobs
from paged_backend.server.wire.call import ERROR_PREFIX, Call
from paged_backend.server.wire.tensors import NUMPY_TYPES, OUTPUTS


class SampleOutput(NamedTuple):
    """The part of a response that belongs to one sample."""

    text: str
    finish_reason: str | None
    token_ids: Sequence[int]
    text_offsets: Sequence[int] = ()
    logprobs: Sequence[Logprobs] | None = None  # one entry per token; None if they were not requested
    cumulative_logprob: float = 0.0
    stop_reason: str | None = None


def write_response(
    call: Call,
    samples: Sequence[SampleOutput],
    *,
    prompt_token_ids: Sequence[int],
    first: bool = True,
    prompt_logprobs: Sequence[Logprobs] | None = None,
    prompt_text_offsets: Sequence[int] | None = None,
    token_text: Callable[[int], str] = str,
    receipt: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Return the output tensors of one response: those that the call asked for.

    Each has one element per sample, or one per token: those of the first sample, then those of the next.

    first: whether this is the request's first response.
    prompt_logprobs: logprobs of each prompt token after the first.
    token_text: function from a token id to its text.
    """
    values: dict[str, Any] = {"text_output": [one.text.encode() for one in samples]}
    if call.return_finish_reason:  # the text "None" until the last response
        values["finish_reason"] = [str(one.finish_reason).encode() for one in samples]
    if call.return_stop_reason:
        values["stop_reason"] = [str(one.stop_reason).encode() for one in samples]
    if call.return_num_input_tokens:
        values["num_input_tokens"] = [len(prompt_token_ids)]
    if call.return_num_output_tokens:
        values["num_output_tokens"] = [len(one.token_ids) for one in samples]
    if call.return_token_ids:
        values["token_ids"] = [token for one in samples for token in one.token_ids]
        if first:
            values["prompt_token_ids"] = prompt_token_ids
    if call.return_text_offsets:
        values["text_offsets"] = [offset for one in samples for offset in one.text_offsets]
    if call.return_logprobs:
        values["logprobs"] = [_logprobs_json(one.logprobs, token_text) for one in samples]
    if call.return_cumulative_logprob:
        values["cumulative_logprob"] = [one.cumulative_logprob for one in samples]
    if prompt_text_offsets is not None:
        values["prompt_text_offsets"] = prompt_text_offsets
        values["first_prompt_token"] = [token_text(prompt_token_ids[0]).encode()]  # prompt_logprobs lacks its text
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = [_logprobs_json([None, *prompt_logprobs], token_text)]
    if receipt is not None:
        values["receipt"] = [json.dumps(receipt).encode()]
    return {name: np.array(value, dtype=NUMPY_TYPES[OUTPUTS[name].data_type]) for name, value in values.items()}


def error_text(error: RequestError) -> str:
    """Return the text of an error for the client.

    It starts with the prefix that clients of the vLLM backend look for, except for a cancellation, which has none there
    either. NUL is escaped because the server would end the text at it.
    """
    text = str(error).replace("\0", "\\0")
    bare = error.verbatim or error.code is ErrorCode.CANCELLED
    return text if bare else f"{ERROR_PREFIX}{text}"


def _logprobs_json(tokens: Sequence[Logprobs | None] | None, token_text: Callable[[int], str]) -> bytes:
    """Return a JSON list with one object per token, whose first entry is the token itself."""
    if tokens is None:
        return b"null"
    entries_by_token = [
        entries
        and {
            str(one.token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": token_text(one.token)}
            for one in entries
        }
        for entries in tokens
    ]
    return json.dumps(entries_by_token).encode()


def write_pool_map(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {"pool_map": np.array([json.dumps(values).encode()], dtype=np.object_)}


def write_num_stopped(count: int) -> dict[str, np.ndarray]:
    return {"num_stopped": np.array([count], dtype=np.uint32)}


def write_adapters(values: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    return {"adapters": np.array([json.dumps(values).encode()], dtype=np.object_)}
