"""Writes responses and error texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.token_outputs import NOTHING, Logprobs, Values
from paged_backend.server.wire.call import ERROR_PREFIX
from paged_backend.server.wire.tensors import NUMPY_TYPES, OUTPUTS, RETURNED


class SampleOutput(NamedTuple):
    """The part of a response that belongs to one sample."""

    text: str
    finish_reason: str | None
    token_ids: Sequence[int]
    text_offsets: Sequence[int] = ()
    values: Values = NOTHING  # requested optional outputs, a value for each of `token_ids`
    cumulative_logprob: float = 0.0
    stop_reason: str | None = None
    reasoning: str = ""
    calls: Sequence[Mapping[str, Any]] = ()  # tool calls


class Response(NamedTuple):
    """What the output tensors of a response are written from."""

    returns: Collection[str]  # optional output tensors that the client asked for
    samples: Sequence[SampleOutput]
    prompt_token_ids: Sequence[int]
    first: bool = True  # whether it is the request's first response
    prompt_values: Values = NOTHING  # optional outputs, a value for each prompt token after the first
    prompt_text_offsets: Sequence[int] | None = None
    token_text: Callable[[int], str] = str  # returns the text of a token id
    receipt: Mapping[str, Any] | None = None


def _prompt_logprobs(response: Response) -> list[bytes] | None:
    values = response.prompt_values.get("logprobs")
    return None if values is None else [_logprobs_json([None, *values], response.token_text)]


# The content of each output tensor: an element per sample, or an element per token, sample by sample. None: the
# response does not have the tensor.
_WRITERS: Mapping[str, Callable[[Response], Sequence[Any] | None]] = {
    "text_output": lambda response: [sample.text.encode() for sample in response.samples],
    "reasoning_content": lambda response: [sample.reasoning.encode() for sample in response.samples],
    "tool_calls": lambda response: [json.dumps(list(sample.calls)).encode() for sample in response.samples],
    "finish_reason": lambda response: [str(sample.finish_reason).encode() for sample in response.samples],
    "stop_reason": lambda response: [str(sample.stop_reason).encode() for sample in response.samples],
    "num_input_tokens": lambda response: [len(response.prompt_token_ids)],
    "num_output_tokens": lambda response: [len(sample.token_ids) for sample in response.samples],
    "token_ids": lambda response: [token for sample in response.samples for token in sample.token_ids],
    "prompt_token_ids": lambda response: (
        response.prompt_token_ids if response.first and "token_ids" in response.returns else None
    ),
    "text_offsets": lambda response: [offset for sample in response.samples for offset in sample.text_offsets],
    "logprobs": lambda response: [
        _logprobs_json(sample.values.get("logprobs"), response.token_text) for sample in response.samples
    ],
    "cumulative_logprob": lambda response: [sample.cumulative_logprob for sample in response.samples],
    "prompt_text_offsets": lambda response: response.prompt_text_offsets,
    "first_prompt_token": lambda response: (
        None  # it is the text that `prompt_logprobs` lacks
        if response.prompt_text_offsets is None
        else [response.token_text(response.prompt_token_ids[0]).encode()]
    ),
    "prompt_logprobs": _prompt_logprobs,
    "receipt": lambda response: None if response.receipt is None else [json.dumps(response.receipt).encode()],
}


def write_response(response: Response) -> dict[str, np.ndarray]:
    """Return the output tensors of a response that the client asked for."""
    values = {
        name: write(response) for name, write in _WRITERS.items() if name in response.returns or name not in RETURNED
    }
    return {
        name: np.array(value, dtype=NUMPY_TYPES[OUTPUTS[name].data_type])
        for name, value in values.items()
        if value is not None
    }


def error_text(error: RequestError) -> str:
    """Return the text of an error for the client.

    It starts with the prefix that clients of the vLLM backend look for, except for a cancellation, which has no prefix
    there either. NUL is escaped because the server would end the text at it.
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
            str(entry.token): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": token_text(entry.token)}
            for entry in entries
        }
        for entries in tokens
    ]
    return json.dumps(entries_by_token).encode()


def write_json(name: str, value: Any) -> dict[str, np.ndarray]:
    """Return an output that is JSON."""
    return {name: np.array([json.dumps(value).encode()], dtype=np.object_)}


def write_num_stopped(count: int) -> dict[str, np.ndarray]:
    return {"num_stopped": np.array([count], dtype=np.uint32)}
