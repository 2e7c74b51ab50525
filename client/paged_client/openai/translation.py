"""Translates requests of OpenAI's API to engine requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from paged_client.openai.chat_schema import ChatMessage, ChatRequest, ToolCall
from paged_client.openai.chat_template import ChatTemplate
from paged_client.openai.errors import ApiError
from paged_client.openai.schema import CompletionRequest, GenerateBody, SamplingFields
from paged_client.openai.tool_calls import MISTRAL, ToolCallFormat
from paged_client.openai.tools import ToolUse

Sampling = dict[str, Any]
# Names of the prompt in the errors of the engine and of the client library.
PROMPT_FIELDS = ("text_input", "input_ids", "prompt_tokens", "prompt")


@dataclass(frozen=True)
class EngineRequest:
    """The arguments of AsyncClient.stream and AsyncClient.generate."""

    prompt: str | list[int] | None  # text or token ids; None if `messages` is given
    messages: list[dict[str, Any]] | None
    sampling: Sampling
    # The request's field names by the engine's, where they differ.
    names: dict[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "messages": self.messages, **self.sampling}


def from_completion(request: CompletionRequest, adapter: str | None) -> list[EngineRequest]:
    """Return an engine request for each prompt of a completion request."""
    sampling, names = _sampling(request, adapter, None)
    if request.logprobs is not None:
        sampling |= {"logprobs": request.logprobs, "return_text_offsets": True}
    if request.echo:
        sampling["echo"] = True
        if request.logprobs is not None:
            sampling["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    prompts = request.prompts
    fields = ["prompt"] if len(prompts) == 1 else [f"prompt.{index}" for index in range(len(prompts))]
    return [
        EngineRequest(prompt, None, sampling, names | dict.fromkeys(PROMPT_FIELDS, field))
        for field, prompt in zip(fields, prompts, strict=True)
    ]


async def from_chat(
    request: ChatRequest,
    adapter: str | None,
    use: ToolUse,
    tool_format: ToolCallFormat,
    template: ChatTemplate | None,
) -> EngineRequest:
    """Return the engine request of a chat request. Without `template`, the engine applies the model's."""
    sampling, names = _sampling(request, adapter, use.schema)
    names |= dict.fromkeys(PROMPT_FIELDS, "messages")
    if request.max_completion_tokens is not None:
        sampling["max_tokens"] = request.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if request.logprobs:
        sampling["logprobs"] = request.top_logprobs or 0
        names["logprobs"] = "top_logprobs"
    if request.may_call and tool_format is MISTRAL:
        sampling.setdefault("skip_special_tokens", False)  # [TOOL_CALLS] is a special token
    sampling.setdefault("max_tokens", None)  # no limit but the context length
    sampling["return_reasoning_content"] = True
    messages = [_message(message) for message in request.messages]
    if template is None:
        more = {"tools": use.prompt_tools, "chat_template_kwargs": request.template_variables}
        given = {name: value for name, value in more.items() if value}
        return EngineRequest(None, messages, sampling | given, names)
    prompt = await asyncio.to_thread(template.prompt, messages, use.prompt_tools, request.template_variables)
    sampling |= {"add_special_tokens": False}
    return EngineRequest(prompt, None, sampling, names)


def _sampling(
    request: GenerateBody, adapter: str | None, call_schema: dict[str, Any] | None
) -> tuple[Sampling, dict[str, str]]:
    """Return the sampling parameters, and the request's field names by the engine's.

    Raises ApiError if the request has two output constraints.
    """
    values = {name: getattr(request, name) for name in SamplingFields.model_fields}
    sampling = {name: value for name, value in values.items() if value is not None}
    if request.return_token_ids or request.return_tokens_as_token_ids:  # the latter: for the prompt of an `echo`
        sampling["return_token_ids"] = True
    names: dict[str, str] = {}
    if adapter is not None:
        sampling["lora_name"] = names["lora_name"] = adapter
    for own, name, value in _constraints(request, call_schema):
        if value is None:
            continue
        if name in sampling:
            other = names.get(name, name)
            raise ApiError(400, f"{own}: cannot be combined with {other}; leave one of the two out", param=own)
        sampling[name], names[name] = value, own
    return sampling, names


def _constraints(request: GenerateBody, call_schema: dict[str, Any] | None) -> Iterator[tuple[str, str, Any]]:
    """Yield (field of the request, field of the engine, value) of each output constraint."""
    yield "guided_json", "json_schema", request.guided_json
    yield "guided_regex", "regex", request.guided_regex
    yield "guided_choice", "choice", request.guided_choice
    yield "guided_grammar", "grammar", request.guided_grammar
    if call_schema is not None:  # it allows what response_format does, unless the output has to be a call
        yield "tools", "json_schema", call_schema
    elif request.response_format and request.response_format.type == "json_object":
        yield "response_format", "json_object", True
    elif request.response_format:
        yield "response_format", "json_schema", request.response_format.schema_of_output


def _message(message: ChatMessage) -> dict[str, Any]:
    """Convert a message to the form that chat templates expect.

    The role "developer" is OpenAI's newer name for "system", and call arguments are objects instead of JSON text.
    """
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call. A text that was cut gives the arguments before the cut; any other text is one
    argument.

    A model may have written anything, and the conversation should go on nevertheless.
    """
    try:
        arguments = from_json(text or "{}", allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}
