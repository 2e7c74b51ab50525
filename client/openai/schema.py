"""The requests that the gateway takes, as OpenAI's clients send them: names and types.

What a value may be is the engine's to judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic_core import ErrorDetails, from_json

from client.openai.errors import ApiError

_NOTHING = (None,)
# OpenAI's fields that are not served yet, and the values that ask for nothing.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
}
_NOT_SERVED_COMPLETION = {**_NOT_SERVED, "echo": (None, False), "best_of": (None, 1), "suffix": _NOTHING}
_NOT_SERVED_CHAT = {
    **_NOT_SERVED,
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "parallel_tool_calls": _NOTHING,
    "functions": (None, []),
    "function_call": (None, "none"),
}
_DEPTH = {"messages": 3, "stream_options": 2}  # of the path to a field; in others pydantic's own words would follow


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Body(_Strict):
    """What every request has."""

    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str

    def check(self) -> None:
        """Raises ApiError for fields that contradict each other."""


class SamplingFields(_Strict):
    """The fields that go to the engine under their own names. None: the engine's default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = None
    cache_salt: str | None = None


class StreamOptions(_Strict):
    include_usage: bool | None = None


class _Request(SamplingFields, Body):
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        if self.stream_options and not self.stream:
            raise ApiError(400, "stream_options: has a meaning with stream=true only", param="stream_options")


class CompletionRequest(_Request):
    not_served = _NOT_SERVED_COMPLETION

    prompt: str | list[str]
    logprobs: int | None = None

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompt: str | list[str]) -> str | list[str]:
        if not isinstance(prompt, str) and len(prompt) != 1:
            raise ValueError(f"has {len(prompt)} prompts; must be a string or a list of one")
        return prompt


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    refusal: None = None  # answers carry it, and come back as the next turn's history


class ChatRequest(_Request):
    not_served = _NOT_SERVED_CHAT

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


RequestT = TypeVar("RequestT", bound=Body)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """Raises ApiError that names the first field that is unknown, not served, missing or of a wrong type."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name, inert in kind.not_served.items():
        value = values.pop(name, None)
        if not any(value is one or (type(value) is type(one) and value == one) for one in inert):
            raise ApiError(400, f"{name}={_shown(value)}: not served yet; leave it out", param=name)
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
    return ".".join(map(str, location[: _DEPTH.get(str(location[0]), 1)]))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
