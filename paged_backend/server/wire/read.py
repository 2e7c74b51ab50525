"""Reads Triton's input tensors and parameters into a `Call`.

`read_call` takes a bounded time, because other requests wait for it. JSON of megabytes is left to
`read_prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.api.limits import InputLimits
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

_POOLING: dict[str, type[PoolingCall]] = {one.field: one for one in (EmbeddingCall, ClassificationCall)}
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
    salt_from: str | None = "sampling_parameters",
) -> Call:
    """Return the request as a Call.

    `timeout_us`, `sequence_id`, `flags` and `request_id` are fields of the Triton request; over the generate endpoints
    they come in `parameters`. salt_from: where a `cache_salt` may be, `sampling_parameters` or `parameter`; None: in
    neither. Raises RequestError for input that is missing, malformed, contradictory or unsupported.
    """
    if "image" in tensors:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "image: images are not supported; leave it out")
    stream = boolean(tensors, "stream")
    sequence = read_sequence(parameters, sequence_id, flags, input_limits)
    pooling = _pooling(tensors, sequence)
    prompt, input_ids = (None, None) if pooling else _prompt(tensors, may_omit=sequence is not None and sequence.end)
    chat = pooling is None and "messages" in tensors
    from_parameters, timeout_us = read_parameters(parameters, timeout_us)
    from_tensor = _sampling_parameters(tensors, input_limits)
    _check_salt({"parameter": from_parameters, "sampling_parameters": from_tensor}, salt_from)
    sampling = from_parameters | from_tensor
    return Call(
        prompt=prompt,
        messages=None,
        sampling=sampling | _parameter_tensors(tensors, sampling),
        stream=stream,
        echo=pooling is None and _echo(tensors, stream=stream, chat=chat, tokens=input_ids is not None),
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
        pooling_type=pooling,
        return_stop_reason=boolean(tensors, "return_stop_reason"),
        trace_context=read_trace_context(parameters),
        is_chat=chat,
        unread=_unread_json(tensors, input_limits, chat=chat),
    )


def read_prompt(call: Call, input_limits: InputLimits) -> Call:
    """Return the call with its unread JSON parsed and checked. Takes up to a second for `max_json_chars`."""
    values = {name: parse_json(name, decode(name, value)) for name, value in call.unread.items()}
    call = replace(call, unread={})
    if call.pooling_type:
        pooling = call.pooling_type.parse(values[call.pooling_type.field], input_limits)
        return replace(call, pooling=pooling, prompt=pooling.text, messages=pooling.messages)
    if "messages" in values:
        call = replace(call, messages=check_messages(values["messages"], input_limits))
    if "tools" in values:
        call = replace(call, tools=check_tools(values["tools"], input_limits))
    if (name := "chat_template_kwargs") in values:
        call = replace(call, template_variables=check_template_variables(values[name], input_limits))
    return call


def _prompt(tensors: Tensors, *, may_omit: bool) -> tuple[str | None, np.ndarray | None]:
    """Return the prompt as text or as token ids; both are None if it is `messages`, or if it is left out.

    may_omit: whether it may be left out.
    """
    prompt, ids = text(tensors, "text_input"), tensors.get("input_ids")
    if may_omit and not prompt and "messages" not in tensors and ids is None:
        return None, None
    given = [name for name in ("text_input", "messages", "input_ids") if name in tensors]
    if len(given) != 1:
        names = f"{' and '.join(given)} are given" if given else "none is given"
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"text_input, messages, input_ids: {names}; give exactly one")
    if prompt == "":  # an empty text is rejected even if the tokenizer would add special tokens
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "text_input: the prompt is empty; give at least one character")
    if ids is not None and not ids.size:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "input_ids: the prompt is empty; give at least one token")
    return prompt, ids


def _unread_json(tensors: Tensors, input_limits: InputLimits, *, chat: bool) -> dict[str, bytes | str]:
    """Return the JSON inputs that make a prompt, by name. Raises RequestError for one that needs messages."""
    found: dict[str, bytes | str] = {}
    for name in ("messages", "tools", "chat_template_kwargs", *_POOLING):
        value = scalar(tensors, name)
        if value is None:
            continue
        if name not in _POOLING and not chat:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: only supported together with messages")
        if len(value) > input_limits.max_json_chars:  # otherwise it is not decoded here: that takes milliseconds
            value = decode(name, value)
            input_limits.check("max_json_chars", name, len(value), "characters")
        found[name] = value
    return found


def _pooling(tensors: Tensors, sequence: SequenceControl | None) -> type[PoolingCall] | None:
    name = next((one for one in _POOLING if one in tensors), None)
    if name is None:
        return None
    if beside := sorted(tensors.keys() - _WITH_POOLING - {name}):
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{beside[0]}: has no effect with {name}; leave it out")
    if boolean(tensors, "stream"):
        raise invalid_argument("stream", True, f"must be false with {name}, which has one response")
    if sequence is not None:
        raise invalid_argument("sequence_id", sequence.id, f"not supported with {name}; leave it out")
    return _POOLING[name]


def _sampling_parameters(tensors: Tensors, input_limits: InputLimits) -> dict[str, Any]:
    given = text(tensors, "sampling_parameters")
    input_limits.check("max_sampling_chars", "sampling_parameters", len(given or ""), "characters")
    values = {} if given is None or not given.strip() else parse_json("sampling_parameters", given)
    if not isinstance(values, dict):
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "sampling_parameters: must be a JSON object")
    return values


def _check_salt(places: Mapping[str, Mapping[str, Any]], allowed: str | None) -> None:
    """Raise RequestError for a `cache_salt` that is not in the allowed place, so that none overrides another."""
    for place, values in places.items():
        if place != allowed and (salt := values.get("cache_salt")) is not None:
            must = {
                "sampling_parameters": "must be in sampling_parameters, unless the option cache_salt_from is parameter",
                "parameter": "must be a request parameter, not in sampling_parameters (cache_salt_from=parameter)",
                None: "needs the option cache_salt_from=parameter with this model",
            }[allowed]
            raise invalid_argument("cache_salt", salt, must)


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
