"""Checks the messages, tools and template variables of a chat request."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from paged_backend.api.errors import ErrorCode, RequestError, cut, invalid_argument, is_utf8_text
from paged_backend.api.limits import InputLimits

# What a content part holds, by a word in its type: "image_url", "input_image", "input_audio", "audio_url", ...
_MEDIA = {"image": "images are", "audio": "audio is", "video": "video is", "file": "files are"}

_ROLE = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")  # values that are strings, if there
MESSAGE_KEYS = frozenset(("role", "content", "tool_calls", *_TEXTS))  # others may be in a model's chat template

Message = dict[str, Any]
Tool = dict[str, Any]
# Variables that the server sets, and arguments of `apply_chat_template` in transformers that are no variables.
RESERVED_TEMPLATE_VARIABLES = (
    "messages", "tools", "conversation", "conversations", "chat_template", "max_length",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "truncation",
)  # fmt: skip

# Flags of `apply_chat_template`: whether the prompt ends with the beginning of an answer (by default it does), or
# inside the last message.
TEMPLATE_FLAGS = ("add_generation_prompt", "continue_final_message")


def check_messages(messages: Any, input_limits: InputLimits) -> list[Message]:
    """Return `messages` if it is a conversation; raise RequestError otherwise.

    A message may lack content only if it calls tools. Other keys are left to the chat template (`check_keys`).
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise _invalid('messages: must be a JSON list of objects like {"role": "user", "content": "…"}')
    check_count(messages, input_limits)
    for index, message in enumerate(messages):
        has_calls = _check_calls(f"messages[{index}].tool_calls", message.get("tool_calls"), input_limits)
        _check_content(f"messages[{index}].content", message.get("content"))
        has_content = is_utf8_text(message.get("content")) or (has_calls and message.get("content") is None)
        if not is_utf8_text(message.get("role")) or not has_content:
            raise _invalid(f"messages[{index}]: must have a `role` and a `content` that are valid Unicode strings")
        if not _ROLE.fullmatch(message["role"]):
            reason = "must be 1..64 letters, digits, _ and -, because chat templates write it between special tokens"
            raise invalid_argument(f"messages[{index}].role", message["role"], reason)
        for name in _TEXTS:
            if not isinstance(message.get(name), str | None):
                raise invalid_argument(f"messages[{index}].{name}", message[name], "must be a string")
        others = {name: value for name, value in message.items() if name not in ("role", "content")}
        if others and not is_utf8_text(json.dumps(others, ensure_ascii=False)):
            raise _invalid(f"messages[{index}]: contains a lone surrogate; send UTF-8 text")
    return messages


def _check_content(name: str, content: Any) -> None:
    """Raise RequestError for a list of content parts, which OpenAI's API has and chat templates do not."""
    if not isinstance(content, list):
        return
    for index, part in enumerate(content):
        if problem := media_problem(part):
            raise _invalid(f"{name}[{index}]: {problem}")
    raise _invalid(f"{name}: must be a string, not a list; join the text of its parts")


def media_problem(part: Any) -> str | None:
    """Return what is wrong with a content part that is an image, audio, a video or a file; None for any other part."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type", next(iter(part), None))  # a part may have the only field "image_url"
    media = next((media for word, media in _MEDIA.items() if isinstance(kind, str) and word in kind), None)
    return media and f"{media} not supported (type {cut(json.dumps(kind))}); send text only"


def check_keys(messages: list[Message], known: Collection[str]) -> None:
    """Raise RequestError for a key of a message that is not in `known` and has a value."""
    for index, message in enumerate(messages):
        for name, value in message.items():
            if name not in known and value is not None:
                reason = f"unknown; known are {', '.join(sorted(MESSAGE_KEYS))}, and names in the model's chat template"
                raise invalid_argument(f"messages[{index}].{name}", value, reason)


def check_count(messages: list[Message], input_limits: InputLimits) -> None:
    """Raise RequestError if the conversation has too many messages."""
    input_limits.check("max_messages", "messages", len(messages), "messages")


def _check_calls(name: str, calls: Any, input_limits: InputLimits) -> bool:
    """Return whether there are tool calls; raise RequestError if they are invalid or too many."""
    if calls is None:
        return False
    if not isinstance(calls, list) or not all(map(_is_function, calls)):
        raise _invalid(
            f'{name}: must be a list of objects like {{"type": "function", "function": {{"name": "…", "arguments":'
            " {…}}}"
        )
    input_limits.check("max_tool_calls", name, len(calls), "calls")
    return bool(calls)


def check_tools(tools: Any, input_limits: InputLimits) -> list[Tool]:
    """Return `tools` if it is a list of functions; raise RequestError otherwise."""
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise _invalid('tools: must be a JSON list of objects like {"type": "function", "function": {"name": "…", …}}')
    input_limits.check("max_tools", "tools", len(tools), "tools")
    text = json.dumps(tools, ensure_ascii=False)
    input_limits.check("max_tools_chars", "tools", len(text), "characters")
    if not is_utf8_text(text):
        raise _invalid("tools: contain a lone surrogate; send UTF-8 text")
    return tools


def check_template_variables(variables: Any, input_limits: InputLimits) -> dict[str, Any]:
    """Return `variables`, the request's `chat_template_kwargs`, if they may be set; raise RequestError otherwise."""
    name = "chat_template_kwargs"
    if not isinstance(variables, dict):
        raise _invalid(f'{name}: must be a JSON object like {{"enable_thinking": false}}')
    text = json.dumps(variables, ensure_ascii=False)
    input_limits.check("max_tools_chars", name, len(text), "characters")
    if not is_utf8_text(text):
        raise _invalid(f"{name}: contain a lone surrogate; send UTF-8 text")
    for reserved in RESERVED_TEMPLATE_VARIABLES:
        if reserved in variables:
            raise _invalid(f"{name}: {reserved}: is set by the server; leave it out")
    for flag in TEMPLATE_FLAGS:
        if not isinstance(value := variables.get(flag, False), bool):
            raise _invalid(f"{name}: {flag}={cut(json.dumps(value))}: must be true or false")
    if all(map(variables.get, TEMPLATE_FLAGS)):
        raise _invalid(f"{name}: {' and '.join(TEMPLATE_FLAGS)} cannot both be true")
    return variables


def _is_function(value: Any) -> bool:
    """Return whether a tool, or a tool call, names a function."""
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and is_utf8_text(function.get("name")) and bool(function["name"])


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, message)
