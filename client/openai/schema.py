"""The requests that the gateway takes, as OpenAI's clients send them: names and types.

What a value may be is the engine's to judge.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import ErrorDetails, from_json

from client.openai.errors import ApiError

# Of the path to a field; in others pydantic's own words would follow.
_DEPTH = {"messages": 3, "stream_options": 2, "tools": 4, "response_format": 3}
_SHOWN = 80  # characters of a value or a path
_PART = 64  # entries of an object that are checked at a time

T = TypeVar("T")


def _by_parts(values: Any, check: Callable[[Any], Any]) -> Any:
    """An object's entries, up to the part with a wrong one: `fail_fast` is for lists alone where pydantic is old."""
    if not isinstance(values, dict):
        return check(values)
    checked: dict[str, Any] = {}
    entries = iter(values.items())
    while part := dict(islice(entries, _PART)):
        checked |= check(part)
    return checked


# pydantic has an error for each wrong element, hundreds of bytes each, and only the first is told.
ListOf = Annotated[list[T], Field(fail_fast=True)]
ObjectOf = Annotated[dict[str, T], WrapValidator(_by_parts)]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, values: Any) -> Any:
        """Where there are more fields than the model has: those of the model, and the first other one."""
        if not isinstance(values, dict) or len(values) <= len(cls.model_fields):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in values if name not in known)
        return {name: values[name] for name in known & values.keys()} | {unknown: values[unknown]}


class Body(StrictModel):
    """What every request has."""

    # OpenAI's fields that are not served, and the values that ask for nothing.
    unsupported_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str

    def check(self) -> None:
        """Raises ApiError for fields that contradict each other."""


class SamplingFields(StrictModel):
    """The fields that go to the engine under their own names. None: the engine's default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[int] | None = None
    stop_words_token_ids: ListOf[ListOf[int]] | None = None
    bad_words_token_ids: ListOf[ListOf[int]] | None = None
    logit_bias: ObjectOf[float] | None = None
    bad_words: ListOf[str] | None = None
    allowed_token_ids: ListOf[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_ms: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    word_bias: ObjectOf[float] | None = None
    json_schema: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    structured_outputs: dict[str, Any] | str | None = None
    guided_decoding: dict[str, Any] | str | None = None


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with every chunk

    def check(self) -> None:
        if self.continuous_usage_stats and not self.include_usage:
            field = "stream_options.continuous_usage_stats"
            raise ApiError(400, f"{field}: has a meaning with include_usage=true only", param=field)


class JsonSchema(StrictModel):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # an answer is held to the schema in any case


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def check(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            reason = "is missing" if self.json_schema is None else f"has no meaning with type={self.type}"
            raise ApiError(400, f"response_format.json_schema: {reason}", param="response_format.json_schema")


class GuidedFields(StrictModel):
    """What an answer is held to, in the words of others: the engine's own are among the sampling fields."""

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None


class IgnoredFields(StrictModel):
    """What clients send that asks for nothing of a server that stores nothing and serves everyone alike."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: ObjectOf[str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class GenerateBody(SamplingFields, GuidedFields, IgnoredFields, Body):
    stream: bool | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        if self.stream_options and not self.stream:
            raise ApiError(400, "stream_options: has a meaning with stream=true only", param="stream_options")
        if self.stream_options:
            self.stream_options.check()
        if self.response_format:
            self.response_format.check()


class CompletionRequest(GenerateBody):
    unsupported_fields: ClassVar = {"suffix": (None,)}

    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each text or token ids."""
        return split_inputs(self.prompt)

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            if self.stream:
                raise ApiError(400, "echo: with logprobs it is for whole answers only", param="echo")
            if self.prompt_logprobs is not None:
                reason = "are told with logprobs and echo in any case; leave it out"
                raise ApiError(400, f"prompt_logprobs: {reason}", param="prompt_logprobs")


def split_inputs(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Text or token ids, of which a caller may send a list."""
    many = isinstance(given, list) and given and not isinstance(given[0], int)
    return given if many else [given]  # type: ignore[return-value, list-item]


RequestT = TypeVar("RequestT", bound=Body)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """Raises ApiError that names the first field that is unknown, not served, missing or of a wrong type."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name, inert in kind.unsupported_fields.items():
        value = values.pop(name, None)
        if not any(value is one or (type(value) is type(one) and value == one) for one in inert):
            raise ApiError(400, f"{name}={_shown(value)}: not served; leave it out", param=name)
    try:
        request = kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)) from None
    request.check()
    return request


def _refusal(errors: Sequence[ErrorDetails]) -> ApiError:
    """The first field's errors: one that may be of several types has an error for each."""
    first = _path(errors[0])
    if errors[0]["type"] == "extra_forbidden":
        return ApiError(400, f"{first}: unknown field", param=first)
    if errors[0]["type"] == "missing":
        return ApiError(400, f"{first}: is missing", param=first)
    reasons = "; or ".join(dict.fromkeys(error["msg"] for error in errors if _path(error) == first))
    return ApiError(400, f"{first}={_shown(errors[0]['input'])}: {reasons}", param=first)


def _path(error: ErrorDetails) -> str:
    location = error["loc"]
    return _cut(".".join(map(str, location[: _DEPTH.get(str(location[0]), 1)])))


def _shown(value: Any) -> str:
    pieces = json.JSONEncoder().iterencode(value)  # one by one, of at least a character each
    return _cut("".join(islice(pieces, _SHOWN + 1)))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
