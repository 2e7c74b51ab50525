"""Triton's tensors and parameters to a request, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, closest_match, invalid_argument
from paged_backend.api.limits import InputLimits
from paged_backend.api.request import Logprobs
from paged_backend.api.sampling_params import PARAMETER_NAMES
from paged_backend.server.embedding import EmbeddingCall
from paged_backend.server.tensors import LIST_PARAMETERS, NUMPY_TYPES, OUTPUTS, SCALAR_PARAMETERS
from paged_backend.text.conversation import check_messages, check_tools

ERROR_PREFIX = "Error generating stream: "
STREAM_WITH_INPUT = f"{ERROR_PREFIX}When streaming, `exclude_input_in_output` = False is not allowed."

CONTROL_REQUESTS = ("pool_map", "adapters", "stop_request")  # inputs that stand alone and are answered at once
_NOT_YET = ("image",)
# What may stand beside an embedding_request.
_WITH_EMBEDDING = frozenset(
    ("embedding_request", "sampling_parameters", "stream", "return_finish_reason", "return_num_input_tokens",
     "return_num_output_tokens", "return_receipt")
)  # fmt: skip
SEQUENCE_START, SEQUENCE_END = 1, 2  # bits of a request's flags
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
_PARAMETERS = PARAMETER_NAMES.union(_SEQUENCE, ("timeout", "id"))
# Names of HTTP headers without a dash, which a server with header forwarding hands on beside the others.
_HEADERS = frozenset(
    "accept authorization baggage connection cookie forwarded from host origin referer te traceparent tracestate"
    " upgrade via".split()
)


class SequenceControl(NamedTuple):
    """Which session a request is a turn of. Triton's own words."""

    id: int | str
    start: bool
    end: bool


@dataclass(frozen=True)
class Call:
    """A request as it was sent: read and typed, not yet tokenized or held against the model's limits."""

    prompt: str | None  # one of this,
    messages: list[dict[str, Any]] | None  # a conversation, for the model's chat template, and `input_ids`
    sampling: dict[str, Any]
    stream: bool
    echo: bool  # put the prompt before the output
    return_finish_reason: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool
    return_receipt: bool
    timeout_us: int
    sequence: SequenceControl | None = None
    request_id: str = ""  # the client's; need not be unique
    return_logprobs: bool = False
    return_cumulative_logprob: bool = False
    input_ids: np.ndarray | None = None  # [num_tokens] int32: the prompt's tokens, to which nothing is added
    return_token_ids: bool = False
    return_text_offsets: bool = False
    embedding: EmbeddingCall | None = None  # what the prompt is for, if no text is to follow it
    tools: list[dict[str, Any]] | None = None  # beside `messages`
    return_stop_reason: bool = False

    @property
    def only_ends(self) -> bool:
        """Whether it ends a session and asks for nothing."""
        return self.prompt is None and self.messages is None and self.input_ids is None

    @property
    def prompt_field(self) -> str:
        """The input that the prompt came in."""
        return "text_input" if self.prompt is not None else "messages" if self.messages is not None else "input_ids"


class SampleOutput(NamedTuple):
    """What one response tells of one sample."""

    text: str
    finish_reason: str | None
    token_ids: Sequence[int]
    text_offsets: Sequence[int] = ()
    logprobs: Sequence[Logprobs] | None = None  # of each token; None where the sampling parameters do not ask for any
    cumulative_logprob: float = 0.0
    stop_reason: str | None = None


def read(
    tensors: Mapping[str, np.ndarray],
    parameters: Mapping[str, Any],
    timeout_us: int = 0,
    sequence_id: int | str = 0,
    flags: int = 0,
    own_id: str = "",
    *,
    input_limits: InputLimits = InputLimits(),
) -> Call:
    """Raises RequestError for what is missing, malformed, contradictory or not supported yet. `sequence_id`, `flags`
    and `own_id` are the request's own; over the generate endpoints they come as parameters."""
    for name in _NOT_YET:
        if name in tensors:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: not supported yet; leave it out")
    stream = _bool(tensors, "stream", False)
    sequence = _sequence(parameters, sequence_id, flags, input_limits)
    embedding = _embedding(tensors, sequence, input_limits)
    may_lack = sequence is not None and sequence.end
    prompt, messages, input_ids = (
        (embedding.text, None, None) if embedding else _prompt(tensors, input_limits, may_lack)
    )
    from_parameters, timeout_us = _parameters(parameters, timeout_us)
    sampling = from_parameters | _sampling_parameters(tensors, input_limits)
    return Call(
        prompt=prompt,
        messages=messages,
        sampling=sampling | _fields(tensors, sampling),
        stream=stream,
        echo=embedding is None
        and _echo(tensors, stream=stream, chat=messages is not None, tokens=input_ids is not None),
        return_finish_reason=_bool(tensors, "return_finish_reason", False),
        return_num_input_tokens=_bool(tensors, "return_num_input_tokens", False),
        return_num_output_tokens=_bool(tensors, "return_num_output_tokens", False),
        return_receipt=_bool(tensors, "return_receipt", False),
        timeout_us=timeout_us,
        sequence=sequence,
        request_id=request_id(parameters, own_id, input_limits),
        return_logprobs=_bool(tensors, "return_logprobs", False),
        return_cumulative_logprob=_bool(tensors, "return_cumulative_logprob", False),
        input_ids=input_ids,
        return_token_ids=_bool(tensors, "return_token_ids", False),
        return_text_offsets=_bool(tensors, "return_text_offsets", False),
        embedding=embedding,
        tools=_tools(tensors, input_limits, chat=messages is not None),
        return_stop_reason=_bool(tensors, "return_stop_reason", False),
    )


def write(
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
    """The output tensors of one response, an element for each sample, or for each of their tokens; the optional ones
    only where the call asked for them. first: whether it is the request's first response. prompt_logprobs: of each
    token of the prompt after the first."""
    values: dict[str, Any] = {"text_output": [one.text.encode() for one in samples]}
    if call.return_finish_reason:  # "None" until the last response
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
        values["first_prompt_token"] = [token_text(prompt_token_ids[0]).encode()]  # which prompt_logprobs do not tell
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = [_logprobs_json([None, *prompt_logprobs], token_text)]
    if receipt is not None:
        values["receipt"] = [json.dumps(receipt).encode()]
    return {name: np.array(value, dtype=NUMPY_TYPES[OUTPUTS[name].data_type]) for name, value in values.items()}


def _logprobs_json(tokens: Sequence[Logprobs | None] | None, token_text: Callable[[int], str]) -> bytes:
    """A JSON list with an object for each token, its own entry first."""
    if tokens is None:
        return b"null"
    spelled = [
        entries
        and {
            str(one.token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": token_text(one.token)}
            for one in entries
        }
        for entries in tokens
    ]
    return json.dumps(spelled).encode()


def error_text(error: RequestError) -> str:
    """What the client reads: behind the prefix that clients of the vLLM backend look for, which cancellation does not
    have there either. The server would end the text at a NUL."""
    text = str(error).replace("\0", "\\0")
    bare = error.verbatim or error.code is ErrorCode.CANCELLED
    return text if bare else f"{ERROR_PREFIX}{text}"


def question(
    tensors: Mapping[str, np.ndarray],
    parameters: Mapping[str, Any],
    timeout_us: int = 0,
    sequence_id: int | str = 0,
    flags: int = 0,
    own_id: str = "",
    *,
    input_limits: InputLimits = InputLimits(),
) -> str | None:
    """Which of `QUESTIONS` this is, where it is no prompt. Raises RequestError for whatever stands beside that, which
    would be ignored."""
    asked = next((name for name in CONTROL_REQUESTS if _bool(tensors, name, False)), None)
    if asked is None:
        return None
    sampling, timeout_us = _parameters(parameters, timeout_us)
    beside = [*sorted(tensors.keys() - {asked}), *sorted(sampling)]
    beside += ["timeout"] * bool(timeout_us) + ["sequence_id"] * bool(
        _sequence(parameters, sequence_id, flags, input_limits)
    )
    if beside:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{beside[0]}: means nothing beside {asked}; leave it out")
    return asked


def request_id(parameters: Mapping[str, Any], own_id: str, input_limits: InputLimits) -> str:
    """The client's, or "". The generate endpoints of some servers hand it on as a parameter."""
    name = parameters.get("id", own_id)
    if not isinstance(name, str):
        raise invalid_argument("id", name, "must be a string")
    input_limits.check("max_request_id_bytes", "id", len(name.encode(errors="replace")), "bytes")
    return name or own_id


def write_pool_map(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {"pool_map": np.array([json.dumps(values).encode()], dtype=np.object_)}


def write_num_stopped(count: int) -> dict[str, np.ndarray]:
    return {"num_stopped": np.array([count], dtype=np.uint32)}


def write_adapters(values: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    return {"adapters": np.array([json.dumps(values).encode()], dtype=np.object_)}


def _one(tensors: Mapping[str, np.ndarray], name: str) -> Any:
    tensor = tensors.get(name)
    if tensor is None:
        return None
    if tensor.size != 1:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: has {tensor.size} elements; must have 1")
    return tensor.reshape(-1)[0]


def _bool(tensors: Mapping[str, np.ndarray], name: str, default: bool) -> bool:
    value = _one(tensors, name)
    return default if value is None else bool(value)


def _text(tensors: Mapping[str, np.ndarray], name: str) -> str | None:
    value = _one(tensors, name)
    return None if value is None else _decoded(name, value)


def _decoded(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT, f"{name}: byte {error.start} is not valid UTF-8; send UTF-8 text"
        ) from None


def _json(name: str, text: str, input_limits: InputLimits) -> Any:
    """Raises RequestError for what is none, or is too long to be parsed while others wait."""
    input_limits.check("max_json_chars", name, len(text), "characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: not valid JSON: {error}") from None


def _sequence(
    parameters: Mapping[str, Any], sequence_id: int | str, flags: int, input_limits: InputLimits
) -> SequenceControl | None:
    name = parameters.get("sequence_id", sequence_id)
    if isinstance(name, bool) or not isinstance(name, int | str) or (isinstance(name, int) and name < 0):
        raise invalid_argument(
            "sequence_id", name, "must be a whole number above 0 or a string; over HTTP at most 2**63 - 1"
        )
    if isinstance(name, str):
        input_limits.check("max_sequence_id_bytes", "sequence_id", len(name.encode(errors="replace")), "bytes")
    name = name or sequence_id  # 0 and "": none
    given = []
    for field, bit in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
        value = parameters.get(field, False)
        if not isinstance(value, bool):
            raise invalid_argument(field, value, "must be true or false")
        given.append(value or bool(flags & bit))
        if given[-1] and not name:
            raise invalid_argument(field, True, "needs a sequence_id")
    return SequenceControl(name, *given) if name else None


def _prompt(
    tensors: Mapping[str, np.ndarray], input_limits: InputLimits, may_lack: bool
) -> tuple[str | None, list[dict[str, Any]] | None, np.ndarray | None]:
    """As text, as messages, or as token ids: one of them is not None."""
    prompt, messages, ids = _text(tensors, "text_input"), _text(tensors, "messages"), tensors.get("input_ids")
    if may_lack and not prompt and messages is None and ids is None:
        return None, None, None
    given = [name for name in ("text_input", "messages", "input_ids") if name in tensors]
    if len(given) != 1:
        names = f"{' and '.join(given)} are given" if given else "none is given"
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"text_input, messages, input_ids: {names}; give exactly one")
    if prompt == "":  # whatever a tokenizer would put before it
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "text_input: the prompt is empty; give at least one character")
    if ids is not None and not ids.size:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "input_ids: the prompt is empty; give at least one token")
    if messages is None:
        return prompt, None, ids
    return None, check_messages(_json("messages", messages, input_limits), input_limits), None


def _tools(tensors: Mapping[str, np.ndarray], input_limits: InputLimits, *, chat: bool) -> list[dict[str, Any]] | None:
    text = _text(tensors, "tools")
    if text is None:
        return None
    if not chat:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "tools: have a meaning with messages only")
    return check_tools(_json("tools", text, input_limits), input_limits)


def _embedding(
    tensors: Mapping[str, np.ndarray], sequence: SequenceControl | None, input_limits: InputLimits
) -> EmbeddingCall | None:
    text = _text(tensors, "embedding_request")
    if text is None:
        return None
    if beside := sorted(tensors.keys() - _WITH_EMBEDDING):
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{beside[0]}: means nothing beside embedding_request; leave"
                           " it out")  # fmt: skip
    if _bool(tensors, "stream", False):
        raise invalid_argument("stream", True, "must be false beside embedding_request: an embedding comes whole")
    if sequence is not None:
        raise invalid_argument(
            "sequence_id", sequence.id, "a session goes on from an answer; an embedding_request has none"
        )
    return EmbeddingCall.parse(_json("embedding_request", text, input_limits))


def _sampling_parameters(tensors: Mapping[str, np.ndarray], input_limits: InputLimits) -> dict[str, Any]:
    text = _text(tensors, "sampling_parameters")
    values = {} if text is None or not text.strip() else _json("sampling_parameters", text, input_limits)
    if not isinstance(values, dict):
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "sampling_parameters: must be a JSON object")
    return values


def _fields(tensors: Mapping[str, np.ndarray], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that come as tensors of their own."""
    found: dict[str, Any] = {}
    for name in (LIST_PARAMETERS.keys() | SCALAR_PARAMETERS.keys()) & tensors.keys():
        if name in sampling:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, f"{name}: is both a tensor and a sampling parameter; give one of them"
            )
        values = tensors[name].reshape(-1).tolist() if name in LIST_PARAMETERS else [_one(tensors, name)]
        read = [_decoded(name, one) if isinstance(one, bytes | str) else one for one in values]
        found[name] = (
            read
            if name in LIST_PARAMETERS
            else bool(read[0])
            if SCALAR_PARAMETERS[name].data_type == "TYPE_BOOL"
            else read[0]
        )
    return found


def _parameters(parameters: Mapping[str, Any], timeout_us: int) -> tuple[dict[str, Any], int]:
    """Request parameters that are ours. A server may be set to forward headers as parameters, and those are none of
    our business; any other unknown name is refused rather than ignored, and one that looks like ours in any case."""
    sampling: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in PARAMETER_NAMES:
            sampling[name] = value
        elif name == "timeout":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise invalid_argument(name, value, "must be a whole number of microseconds, at least 0")
            timeout_us = value
        elif name in _SEQUENCE or name == "id":
            continue  # read before
        elif near := closest_match(name.lower().replace("-", "_"), _PARAMETERS, cutoff=0.8):
            raise invalid_argument(name, value, f"unknown parameter; did you mean {near}?")
        elif "-" not in name and name.lower() not in _HEADERS and not name.startswith("triton_"):
            raise invalid_argument(name, value, f"unknown parameter; known are {', '.join(sorted(_PARAMETERS))}")
    return sampling, timeout_us


def _echo(tensors: Mapping[str, np.ndarray], *, stream: bool, chat: bool, tokens: bool) -> bool:
    """The prompt comes back before the output unless streaming, or where it came as tokens and nobody wants its text;
    an explicit wish that cannot be met is refused."""
    exclude = _bool(tensors, "exclude_input_in_output", stream or chat or tokens)
    if stream and not exclude:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, STREAM_WITH_INPUT, verbatim=True)
    if chat and not exclude:
        raise invalid_argument("exclude_input_in_output", False, "must be true with messages")
    return not exclude
