"""Reads Triton's input tensors and parameters into a `Call`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.api.limits import InputLimits
from paged_backend.server import classification, embedding
from paged_backend.server.classification import ClassificationCall
from paged_backend.server.embedding import EmbeddingCall
from paged_backend.server.pooling import PoolingCall
from paged_backend.server.tensors import LIST_PARAMETERS, SCALAR_PARAMETERS
from paged_backend.server.wire.call import Call, SequenceControl
from paged_backend.server.wire.parameters import (
    read_parameters,
    read_request_id,
    read_sequence,
    read_trace_context,
)
from paged_backend.server.wire.values import Tensors, boolean, decode, parse_json, scalar, text
from paged_backend.server.wire.write import STREAM_WITH_INPUT
from paged_backend.text.conversation import check_messages, check_template_variables, check_tools

T = TypeVar("T")
# Inputs that may be sent together with an embedding_request or a classification_request.
_WITH_POOLING = frozenset(
    ("sampling_parameters", "stream", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens",
     "return_receipt")
)  # fmt: skip


def read_call(
    tensors: Tensors,
    parameters: Mapping[str, Any],
    timeout_us: int = 0,
    sequence_id: int | str = 0,
    flags: int = 0,
    request_id: str = "",
    *,
    input_limits: InputLimits = InputLimits(),
) -> Call:
    """Return the request as a Call.

    `timeout_us`, `sequence_id`, `flags` and `request_id` are fields of the Triton request; over the generate endpoints
    they come in `parameters`. Raises RequestError for input that is missing, malformed, contradictory or unsupported.
    """
    if "image" in tensors:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "image: images are not supported; leave it out")
    stream = boolean(tensors, "stream")
    sequence = read_sequence(parameters, sequence_id, flags, input_limits)
    pooling = _pooling(tensors, sequence, input_limits)
    may_omit = sequence is not None and sequence.end
    prompt, messages, input_ids = (
        (pooling.text, pooling.messages, None) if pooling else _prompt(tensors, input_limits, may_omit)
    )
    from_parameters, timeout_us = read_parameters(parameters, timeout_us)
    sampling = from_parameters | _sampling_parameters(tensors, input_limits)
    return Call(
        prompt=prompt,
        messages=messages,
        sampling=sampling | _parameter_tensors(tensors, sampling),
        stream=stream,
        echo=pooling is None and _echo(tensors, stream=stream, chat=messages is not None, tokens=input_ids is not None),
        return_finish_reason=boolean(tensors, "return_finish_reason"),
        return_num_input_tokens=boolean(tensors, "return_num_input_tokens"),
        return_num_output_tokens=boolean(tensors, "return_num_output_tokens"),
        return_receipt=boolean(tensors, "return_receipt"),
        timeout_us=timeout_us,
        sequence=sequence,
        request_id=read_request_id(parameters, request_id, input_limits),
        return_logprobs=boolean(tensors, "return_logprobs"),
        return_cumulative_logprob=boolean(tensors, "return_cumulative_logprob"),
        input_ids=input_ids,
        return_token_ids=boolean(tensors, "return_token_ids"),
        return_text_offsets=boolean(tensors, "return_text_offsets"),
        pooling=pooling,
        tools=_with_messages("tools", check_tools, tensors, input_limits, chat=messages is not None),
        return_stop_reason=boolean(tensors, "return_stop_reason"),
        template_variables=_with_messages(
            "chat_template_kwargs", check_template_variables, tensors, input_limits, chat=messages is not None
        ),
        trace_context=read_trace_context(parameters),
    )


def _prompt(
    tensors: Tensors, input_limits: InputLimits, may_omit: bool
) -> tuple[str | None, list[dict[str, Any]] | None, np.ndarray | None]:
    """Return the prompt as text, as messages or as token ids; the other two are None.

    may_omit: whether all three may be None.
    """
    prompt, messages, ids = text(tensors, "text_input"), text(tensors, "messages"), tensors.get("input_ids")
    if may_omit and not prompt and messages is None and ids is None:
        return None, None, None
    given = [name for name in ("text_input", "messages", "input_ids") if name in tensors]
    if len(given) != 1:
        names = f"{' and '.join(given)} are given" if given else "none is given"
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"text_input, messages, input_ids: {names}; give exactly one")
    if prompt == "":  # an empty text is rejected even if the tokenizer would add special tokens
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "text_input: the prompt is empty; give at least one character")
    if ids is not None and not ids.size:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "input_ids: the prompt is empty; give at least one token")
    if messages is None:
        return prompt, None, ids
    return None, check_messages(parse_json("messages", messages, input_limits), input_limits), None


def _with_messages(
    name: str, check: Callable[[Any, InputLimits], T], tensors: Tensors, input_limits: InputLimits, *, chat: bool
) -> T | None:
    """Return a JSON input for the chat template, checked. Raises RequestError for one without messages."""
    value = text(tensors, name)
    if value is None:
        return None
    if not chat:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: only supported together with messages")
    return check(parse_json(name, value, input_limits), input_limits)


def _pooling(tensors: Tensors, sequence: SequenceControl | None, input_limits: InputLimits) -> PoolingCall | None:
    name = next((one for one in (embedding.FIELD, classification.FIELD) if one in tensors), None)
    if name is None:
        return None
    if beside := sorted(tensors.keys() - _WITH_POOLING - {name}):
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{beside[0]}: has no effect with {name}; leave it out")
    if boolean(tensors, "stream"):
        raise invalid_argument("stream", True, f"must be false with {name}, which has one response")
    if sequence is not None:
        raise invalid_argument("sequence_id", sequence.id, f"not supported with {name}; leave it out")
    values = parse_json(name, text(tensors, name) or "", input_limits)
    if name == embedding.FIELD:
        return EmbeddingCall.parse(values)
    return ClassificationCall.parse(values, input_limits)


def _sampling_parameters(tensors: Tensors, input_limits: InputLimits) -> dict[str, Any]:
    given = text(tensors, "sampling_parameters")
    values = {} if given is None or not given.strip() else parse_json("sampling_parameters", given, input_limits)
    if not isinstance(values, dict):
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "sampling_parameters: must be a JSON object")
    return values


def _parameter_tensors(tensors: Tensors, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that are tensors of their own."""
    found: dict[str, Any] = {}
    for name in (LIST_PARAMETERS.keys() | SCALAR_PARAMETERS.keys()) & tensors.keys():
        if name in sampling:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, f"{name}: is both a tensor and a sampling parameter; give one of them"
            )
        is_list = name in LIST_PARAMETERS
        values = tensors[name].reshape(-1).tolist() if is_list else [scalar(tensors, name)]
        values = [decode(name, value) if isinstance(value, bytes | str) else value for value in values]
        found[name] = (
            values if is_list else bool(values[0]) if SCALAR_PARAMETERS[name].data_type == "TYPE_BOOL" else values[0]
        )
    return found


def _echo(tensors: Tensors, *, stream: bool, chat: bool, tokens: bool) -> bool:
    """Return whether the prompt comes before the output.

    By default it does, unless the request streams or the prompt is not text. Raises RequestError where the client asks
    for it and it is not possible.
    """
    exclude = boolean(tensors, "exclude_input_in_output", stream or chat or tokens)
    if stream and not exclude:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, STREAM_WITH_INPUT, verbatim=True)
    if chat and not exclude:
        raise invalid_argument("exclude_input_in_output", False, "must be true with messages")
    return not exclude
