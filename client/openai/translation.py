"""OpenAI's requests to the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from client.openai.chat_template import ChatTemplate
from client.openai.errors import ApiError
from client.openai.schema import ChatMessage, ChatRequest, CompletionRequest, SamplingFields


@dataclass(frozen=True)
class EngineRequest:
    """The arguments of AsyncClient.stream and .generate."""

    prompt: str | None  # either this
    messages: list[dict[str, str]] | None  # or a conversation
    sampling: Mapping[str, Any]
    names: Mapping[str, str]  # the engine's names of fields -> the caller's, where they differ

    @property
    def arguments(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "messages": self.messages, **self.sampling}


def from_completion(request: CompletionRequest) -> EngineRequest:
    prompt = request.prompt if isinstance(request.prompt, str) else request.prompt[0]
    sampling = _sampling(request)
    if request.logprobs is not None:
        sampling["logprobs"] = request.logprobs
    return EngineRequest(prompt, None, sampling, {"text_input": "prompt", "prompt_tokens": "prompt"})


async def from_chat(request: ChatRequest, template: ChatTemplate | None, default_max_tokens: int) -> EngineRequest:
    """Without a template of the gateway's own the engine applies the model's."""
    sampling = _sampling(request)
    names = {"text_input": "messages", "prompt_tokens": "messages"}
    if request.max_completion_tokens is not None:
        if request.max_tokens is not None:
            raise ApiError(400, "max_tokens: means nothing beside max_completion_tokens", param="max_tokens")
        sampling["max_tokens"] = request.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if request.logprobs:
        sampling["logprobs"] = request.top_logprobs or 0
        names["logprobs"] = "top_logprobs"
    elif request.top_logprobs is not None:
        raise ApiError(400, "top_logprobs: has a meaning with logprobs=true only", param="top_logprobs")
    sampling.setdefault("max_tokens", default_max_tokens)
    messages = [_message(message) for message in request.messages]
    if template is None:
        return EngineRequest(None, messages, sampling, names)
    prompt = await asyncio.to_thread(template.prompt, messages)
    return EngineRequest(prompt, None, sampling, names)


def _sampling(request: SamplingFields) -> dict[str, Any]:
    values = {name: getattr(request, name) for name in SamplingFields.model_fields}
    return {name: value for name, value in values.items() if value is not None}


def _message(message: ChatMessage) -> dict[str, str]:
    """As chat templates know it: "developer" is OpenAI's newer word for "system"."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    return {"role": role, "content": content if isinstance(content, str) else "".join(part.text for part in content)}
