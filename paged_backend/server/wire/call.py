"""Reads Triton's input tensors and parameters into a `Call`: the request as the client sent it, not yet tokenized.

`read_call` takes a bounded time, because other requests wait for it. JSON of megabytes is left to `read_prompt`.

Over gRPC a client sets parameters on the request. Over the generate endpoints they are fields of the JSON body, and on
some servers so are the timeout and the ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from paged_backend.api import json_values
from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.api.limits import InputLimits
from paged_backend.api.other_engines import suggestion
from paged_backend.api.sampling_params import PARAMETER_NAMES
from paged_backend.server.wire.pooling import ClassificationCall, EmbeddingCall, PoolingCall
from paged_backend.server.wire.tensors import LIST_PARAMETERS, RETURNED, SCALAR_PARAMETERS
from paged_backend.text.conversation import check_messages, check_template_variables, check_tools

ERROR_PREFIX = "Error generating stream: "
STREAM_WITH_INPUT = f"{ERROR_PREFIX}When streaming, `exclude_input_in_output` = False is not allowed."
Tensors = Mapping[str, np.ndarray]
CONTROL_REQUESTS = ("pool_map", "adapters", "model_info", "stop_request")  # names of the inputs
SEQUENCE_START, SEQUENCE_END = 1, 2  # bits of a Triton request's flags
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
TRACE_CONTEXT = ("traceparent", "tracestate")
_PARAMETERS = PARAMETER_NAMES.union(_SEQUENCE, ("timeout", "id"))
# HTTP headers without a dash in their names. A server with header forwarding passes headers on as parameters.
_HEADERS = frozenset(
    "accept authorization baggage connection cookie forwarded from host origin referer te traceparent tracestate"
    " upgrade via".split()
)
_POOLING: dict[str, type[PoolingCall]] = {call.field: call for call in (EmbeddingCall, ClassificationCall)}
# Inputs that may be sent together with an embedding_request or a classification_request.
_WITH_POOLING = frozenset(
    ("sampling_parameters", "stream", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens",
     "return_receipt")
)  # fmt: skip


class SequenceControl(NamedTuple):
    """The session of a request, in Triton's terms: its sequence id, and whether the request starts or ends it."""

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
    timeout_us: int  # 0: no timeout
    returns: frozenset[str] = frozenset()  # optional output tensors that the client asks for
    sequence: SequenceControl | None = None
    request_id: str = ""  # id chosen by the client; need not be unique
    input_ids: np.ndarray | None = None  # [num_tokens] int32: the prompt as token ids; nothing is added to them
    pooling_type: type[PoolingCall] | None = None  # for an embedding or a classification instead of text
    pooling: PoolingCall | None = None  # content of the embedding or classification request
    tools: list[dict[str, Any]] | None = None  # tools for the chat template; allowed with `messages` only
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
        """The input tensor that the prompt came in, and its field if the tensor holds a JSON object."""
        if self.pooling_type:
            part = "" if self.pooling is None else ".input" if self.pooling.messages is None else ".messages"
            return self.pooling_type.field + part
        return "text_input" if self.prompt is not None else "messages" if self.is_chat else "input_ids"


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
        timeout_us=timeout_us,
        returns=frozenset(name for name in RETURNED if boolean(tensors, f"return_{name}")),
        sequence=sequence,
        request_id=read_request_id(parameters, request_id, input_limits),
        input_ids=input_ids,
        pooling_type=pooling,
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


def read_control_request(
    tensors: Tensors,
    parameters: Mapping[str, Any],
    timeout_us: int = 0,
    sequence_id: int | str = 0,
    flags: int = 0,
    request_id: str = "",
    *,
    input_limits: InputLimits = InputLimits(),
) -> str | None:
    """Return which of CONTROL_REQUESTS this is; None for an ordinary request.

    Takes what `read_call` takes. Raises RequestError for any other input, which would have no effect.
    """
    name = next((name for name in CONTROL_REQUESTS if boolean(tensors, name)), None)
    if name is None:
        return None
    sampling, timeout_us = read_parameters(parameters, timeout_us)
    others = [*sorted(tensors.keys() - {name}), *sorted(sampling)]
    others += ["timeout"] * bool(timeout_us)
    others += ["sequence_id"] * bool(read_sequence(parameters, sequence_id, flags, input_limits))
    if others:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{others[0]}: has no effect with {name}; leave it out")
    return name


def _prompt(tensors: Tensors, *, may_omit: bool) -> tuple[str | None, np.ndarray | None]:
    """Return the prompt as text or as token ids; both are None if it is `messages`, or if it is left out.

    may_omit: whether it may be left out.
    """
    prompt, ids = string(tensors, "text_input"), tensors.get("input_ids")
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
    """Return the JSON inputs that make a prompt, by name. Raises RequestError for an input that needs messages."""
    unread: dict[str, bytes | str] = {}
    for name in ("messages", "tools", "chat_template_kwargs", *_POOLING):
        value = scalar(tensors, name)
        if value is None:
            continue
        if name not in _POOLING and not chat:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: only supported together with messages")
        if len(value) > input_limits.max_json_chars:  # otherwise it is not decoded here: that takes milliseconds
            value = decode(name, value)
            input_limits.check("max_json_chars", name, len(value), "characters")
        unread[name] = value
    return unread


def _pooling(tensors: Tensors, sequence: SequenceControl | None) -> type[PoolingCall] | None:
    name = next((field for field in _POOLING if field in tensors), None)
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
    given = string(tensors, "sampling_parameters")
    input_limits.check("max_sampling_chars", "sampling_parameters", len(given or ""), "characters")
    values = {} if given is None or not given.strip() else parse_json("sampling_parameters", given)
    if not isinstance(values, dict):
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "sampling_parameters: must be a JSON object")
    return values


def _check_salt(places: Mapping[str, Mapping[str, Any]], allowed: str | None) -> None:
    """Raise RequestError for a `cache_salt` that is not in the allowed place. No salt overrides another."""
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
    parameters: dict[str, Any] = {}
    for name in (LIST_PARAMETERS.keys() | SCALAR_PARAMETERS.keys()) & tensors.keys():
        if name in sampling:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, f"{name}: is both a tensor and a sampling parameter; give one of them"
            )
        is_list = name in LIST_PARAMETERS
        values = tensors[name].reshape(-1).tolist() if is_list else [scalar(tensors, name)]
        values = [decode(name, value) if isinstance(value, bytes | str) else value for value in values]
        parameters[name] = (
            values if is_list else bool(values[0]) if SCALAR_PARAMETERS[name].data_type == "TYPE_BOOL" else values[0]
        )
    return parameters


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


def read_parameters(parameters: Mapping[str, Any], timeout_us: int) -> tuple[dict[str, Any], int]:
    """Return the sampling parameters among the request's, and its timeout in microseconds.

    Forwarded HTTP headers are ignored. Raises RequestError for any other unknown name, and for a name that resembles a
    known one, even if it may be a header.
    """
    sampling: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in PARAMETER_NAMES:
            sampling[name] = value
        elif name == "timeout":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise invalid_argument(name, value, "must be a whole number of microseconds, at least 0")
            timeout_us = value
        elif name in _SEQUENCE or name == "id":
            continue  # see read_sequence and read_request_id
        elif hint := suggestion(name.lower().replace("-", "_"), _PARAMETERS, cutoff=0.8):
            raise invalid_argument(name, value, f"unknown parameter; {hint}")
        elif "-" not in name and name.lower() not in _HEADERS and not name.startswith("triton_"):
            raise invalid_argument(name, value, f"unknown parameter; known are {', '.join(sorted(_PARAMETERS))}")
    return sampling, timeout_us


def read_sequence(
    parameters: Mapping[str, Any], sequence_id: int | str, flags: int, input_limits: InputLimits
) -> SequenceControl | None:
    """Return the session that the request belongs to, or None. A parameter takes precedence over `sequence_id`."""
    name = parameters.get("sequence_id", sequence_id)
    if isinstance(name, bool) or not isinstance(name, int | str) or (isinstance(name, int) and name < 0):
        raise invalid_argument(
            "sequence_id", name, "must be a whole number above 0 or a string; over HTTP at most 2**63 - 1"
        )
    if parameters.get("sequence_id") == "":
        raise invalid_argument("sequence_id", "", "must not be empty, or begin with a NUL, at which Triton cuts it")
    if isinstance(name, str):
        num_bytes = len(name.encode(errors="replace"))
        input_limits.check("max_sequence_id_bytes", "sequence_id", num_bytes, "bytes")
    name = name or sequence_id  # 0 and "" mean no sequence
    given = []
    for flag, bit in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
        value = parameters.get(flag, False)
        if not isinstance(value, bool):
            raise invalid_argument(flag, value, "must be true or false")
        given.append(value or bool(flags & bit))
        if given[-1] and not name:
            raise invalid_argument(flag, True, "needs a sequence_id")
    return SequenceControl(name, *given) if name else None


def read_trace_context(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers `traceparent` and `tracestate` of the W3C trace context. Like HTTP servers, which ignore an
    invalid header, do not check them."""
    values = {name.lower(): value for name, value in parameters.items()}
    return {name: values[name] for name in TRACE_CONTEXT if isinstance(values.get(name), str)}


def read_request_id(parameters: Mapping[str, Any], request_id: str, input_limits: InputLimits) -> str:
    """Return the request id, or "". Some servers pass it on as the parameter `id`, which takes precedence."""
    name = parameters.get("id", request_id)
    if not isinstance(name, str):
        raise invalid_argument("id", name, "must be a string")
    input_limits.check("max_request_id_bytes", "id", len(name.encode(errors="replace")), "bytes")
    return name or request_id


def scalar(tensors: Tensors, name: str) -> Any:
    """Return the only element of a tensor; None if the tensor is missing."""
    tensor = tensors.get(name)
    if tensor is None:
        return None
    if tensor.size != 1:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: has {tensor.size} elements; must have 1")
    return tensor.reshape(-1)[0]


def boolean(tensors: Tensors, name: str, default: bool = False) -> bool:
    value = scalar(tensors, name)
    return default if value is None else bool(value)


def string(tensors: Tensors, name: str) -> str | None:
    value = scalar(tensors, name)
    return None if value is None else decode(name, value)


def decode(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT, f"{name}: byte {error.start} is not valid UTF-8; send UTF-8 text"
        ) from None


def parse_json(name: str, text: str) -> Any:
    """Parse the JSON of an input. Raises RequestError if it is invalid."""
    try:
        return json_values.parse(text)
    except ValueError as error:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: not valid JSON: {error}") from None
