"""The schema of requests to the gateway: the fields of OpenAI's API, and the engine's sampling parameters.

Names and types are checked here, values by the engine.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import ErrorDetails, from_json

from paged_backend.api import json_values
from paged_backend.api.json_values import to_flag, to_integer, to_number
from paged_backend.api.other_engines import UNSUPPORTED_PARAMETERS, replacement, suggestion
from paged_client.openai.errors import ApiError

# How much of the path to a field is shown, by top-level field (default 1). Deeper parts are names of pydantic's own.
_DEPTH = {"messages": 3, "stream_options": 2, "tools": 4, "response_format": 3}
_MAX_SHOWN = 80  # characters of a value or a path in an error message
_CHUNK = 32  # entries of an object that are validated at a time
MAX_CONTAINERS = 1 << 17  # lists and objects of a body: while millions are parsed, the gateway does nothing else
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)  # if unterminated, to the end of the body
_MAX_WARNINGS = 256  # names of unknown fields that are logged; clients choose them

log = logging.getLogger("paged_client")

T = TypeVar("T")


def _in_chunks(values: Any, check: Callable[[Any], Any]) -> Any:
    """Validate an object in chunks and stop at the first invalid one.

    Old releases of pydantic support `fail_fast` for lists only.
    """
    if not isinstance(values, dict):
        return check(values)
    checked: dict[str, Any] = {}
    entries = iter(values.items())
    while chunk := dict(islice(entries, _CHUNK)):
        checked |= check(chunk)
    return checked


# pydantic creates an error of hundreds of bytes for each invalid element, but only the first one is reported.
ListOf = Annotated[list[T], Field(fail_fast=True)]
ObjectOf = Annotated[dict[str, T], WrapValidator(_in_chunks)]

# Types of sampling parameters. Like in the engine, numbers and flags may be strings.
Integer = Annotated[int, BeforeValidator(to_integer)]
Number = Annotated[float, BeforeValidator(to_number)]
Flag = Annotated[bool, BeforeValidator(to_flag)]
TokenId = int | float | str  # elements of long lists are converted by the engine
Bias = float | str


class StrictModel(BaseModel):
    """A model without type coercion. Unknown fields are ignored, with a warning; null means that a field is not given.

    Clients send fields of other servers, and of newer versions of OpenAI's API, and expect that they do no harm.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    place: ClassVar[str] = ""  # what precedes the name of a field in a warning

    @model_validator(mode="before")
    @classmethod
    def _keep_known(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = _names(cls)
        for name in values:
            if name not in known:
                _warn_once(cls.place, name, known)
        return {name: values[name] for name in known & values.keys() if values[name] is not None}


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of a model's fields in a request."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


_warned: set[str] = set()


def _warn_once(place: str, name: str, known: Collection[str]) -> None:
    """Log that a field is ignored, unless its name has been logged before."""
    if len(_warned) == _MAX_WARNINGS or (shown_name := _truncate(place + name)) in _warned:
        return
    _warned.add(shown_name)
    notes = [
        suggestion(shown_name, known),
        "further unknown fields are not logged" if len(_warned) == _MAX_WARNINGS else None,
    ]
    log.warning("; ".join([f"a request has the unknown field {shown_name!r}, which is ignored", *filter(None, notes)]))


class Body(StrictModel):
    """The base class of request bodies."""

    # Fields of OpenAI's API that are not supported, and the values of each that request nothing.
    unsupported_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def check_values(cls, values: Mapping[str, Any]) -> None:
        """Raises ApiError for values that deserve a better message than that they do not fit the schema.

        Args:
            values: the fields, of any type.
        """

    def check(self) -> None:
        """Raises ApiError for fields that cannot be combined."""


class SamplingFields(StrictModel):
    """The fields that are passed to the engine under the same names. None is the engine's default.

    A test compares them with the fields of SamplingParams.
    """

    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    thinking_token_budget: Integer | None = None
    temperature: Number | None = None
    top_k: Integer | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    seed: Integer | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[TokenId] | None = None
    stop_words_token_ids: ListOf[ListOf[TokenId]] | None = None
    bad_words_token_ids: ListOf[ListOf[TokenId]] | None = None
    logit_bias: ObjectOf[Bias] | None = None
    bad_words: ListOf[str] | None = None
    allowed_token_ids: ListOf[TokenId] | None = None
    ignore_eos: Flag | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    skip_special_tokens: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    n: Integer | None = None
    best_of: Integer | None = None
    beam_width: Integer | None = None
    length_penalty: Number | None = None
    early_stopping: Flag | Literal["never"] | None = None
    priority: Integer | None = None
    cache_salt: str | None = None
    timeout_ms: Integer | None = None
    prompt_logprobs: Integer | None = None
    logits_digest: Flag | None = None
    add_special_tokens: Flag | None = None
    truncate_prompt_tokens: Integer | None = None
    word_bias: ObjectOf[Bias] | None = None
    json_schema: dict[str, Any] | str | None = None
    json_object: Flag | None = None
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    structured_outputs: dict[str, Any] | str | None = None
    guided_decoding: dict[str, Any] | str | None = None


class StreamOptions(StrictModel):
    place = "stream_options."

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None  # vLLM's extension: usage in every chunk

    def check(self) -> None:
        if self.continuous_usage_stats and not self.include_usage:
            field = "stream_options.continuous_usage_stats"
            raise ApiError(400, f"{field}: requires include_usage=true", param=field)


class JsonSchema(StrictModel):
    place = "response_format.json_schema."

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # has no effect: the schema is always enforced


class ResponseFormat(StrictModel):
    place = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def check(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            reason = "is missing" if self.json_schema is None else f"cannot be used with type={self.type}"
            raise ApiError(400, f"response_format.json_schema: {reason}", param="response_format.json_schema")

    @property
    def schema_of_output(self) -> dict[str, Any] | None:
        """The JSON Schema of the output; None for any text."""
        if self.type == "text":
            return None
        return (self.json_schema and self.json_schema.schema_) or {"type": "object"}  # default: any object


class GuidedFields(StrictModel):
    """Output constraints under the names of OpenAI and vLLM. The engine's names are in SamplingFields."""

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None


# Sampling parameters that change the output, and are accepted only with values that have no effect.
ENGINE_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **{name: (None, *parameter.accepted) for name, parameter in UNSUPPORTED_PARAMETERS.items()},
    "logprob_token_ids": (None, []),
    "lora_name": (None,),  # an adapter is given as `model`
    "truncation_side": (None, "left"),
}


class GenerateBody(SamplingFields, GuidedFields, Body):
    model: str | None = None  # None: the server's model
    stream: Flag | None = None
    return_token_ids: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None  # in logprobs; as in vLLM
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        if self.stream_options and not self.stream:
            raise ApiError(400, "stream_options: requires stream=true", param="stream_options")
        if self.stream_options:
            self.stream_options.check()
        if self.logits_digest and self.stream and not (self.stream_options and self.stream_options.include_usage):
            problem = "requires stream_options.include_usage=true in a stream, whose last chunk then has the digests"
            raise ApiError(400, f"logits_digest: {problem}", param="logits_digest")
        if self.response_format:
            self.response_format.check()


class CompletionRequest(GenerateBody):
    unsupported_fields: ClassVar = {**ENGINE_UNSUPPORTED, "suffix": (None, ""), "prompt_embeds": (None,)}

    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    logprobs: Integer | None = None
    echo: Flag | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids."""
        return split_inputs(self.prompt)

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None and self.stream:
            raise ApiError(400, "echo: cannot be combined with logprobs and stream=true", param="echo")


def split_inputs(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return a list of inputs, each text or token ids, for a field that may be one input or a list."""
    many = isinstance(given, list) and given and not isinstance(given[0], int)
    return given if many else [given]  # type: ignore[return-value, list-item]


RequestT = TypeVar("RequestT", bound=Body)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """Parse a request body.

    Raises ApiError, which names the first field that is unsupported, missing or of a wrong type.
    """
    return validate(kind, read_object(body))


def read_object(body: bytes) -> dict[str, Any]:
    """Return the fields of a request body. Raises ApiError if it is no JSON object, or an object has a key twice."""
    if _num_containers(body) > MAX_CONTAINERS:
        raise ApiError(400, f"the body has more than {MAX_CONTAINERS} lists and objects")
    try:
        values = from_json(body, allow_inf_nan=False)
        json_values.parse(body)  # finds such a key
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object")
    return values


def _num_containers(body: bytes) -> int:
    """Return the number of lists and objects in a body; where they are few, brackets in strings count as well."""
    count = sum(map(body.count, (b"[", b"{")))
    return count if count <= MAX_CONTAINERS else sum(map(_STRING.sub(b"", body).count, (b"[", b"{")))


def validate(kind: type[RequestT], values: dict[str, Any]) -> RequestT:
    """Return the request with these fields, as `parse` does. `values` is changed."""
    for name, ignored in kind.unsupported_fields.items():
        value = values.pop(name, None)
        if not any(value is neutral or (type(value) is type(neutral) and value == neutral) for neutral in ignored):
            instead = "model" if name == "lora_name" else replacement(name, kind.model_fields)
            hint = f"use {instead} instead" if instead else "leave it out"
            raise ApiError(400, f"{name}={shown(value)}: not supported; {hint}", param=name)
    kind.check_values(values)
    try:
        request = kind.model_validate(values)
    except ValidationError as error:
        raise _api_error(error.errors(include_url=False, include_context=False)) from None
    request.check()
    return request


def _api_error(errors: Sequence[ErrorDetails]) -> ApiError:
    """Return the errors of the first invalid field. A field with several allowed types has an error for each type."""
    first = _path(errors[0])
    if errors[0]["type"] == "missing":
        return ApiError(400, f"{first}: is missing", param=first)
    reasons = "; or ".join(dict.fromkeys(error["msg"] for error in errors if _path(error) == first))
    return ApiError(400, f"{first}={shown(errors[0]['input'])}: {reasons}", param=first)


def _path(error: ErrorDetails) -> str:
    location = error["loc"]
    return _truncate(".".join(map(str, location[: _DEPTH.get(str(location[0]), 1)])))


def shown(value: Any) -> str:
    """Return the beginning of a value as JSON, without encoding the rest."""
    parts = json.JSONEncoder().iterencode(value)  # parts of at least one character each
    return _truncate("".join(islice(parts, _MAX_SHOWN + 1)))


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
