"""Conversations with tools, as chat templates take them: what may be in one."""

from __future__ import annotations

import json
from typing import Any

from paged_backend.api.errors import ErrorCode, RequestError, is_utf8_text
from paged_backend.api.limits import InputLimits

Message = dict[str, Any]
Tool = dict[str, Any]


def check_messages(turns: Any, input_limits: InputLimits) -> list[Message]:
    """Raises RequestError for what is no conversation. A message may lack a content only where it calls tools; what
    else it holds is the template's to judge."""
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise _refused('messages: must be a JSON list of objects like {"role": "user", "content": "…"}')
    check_count(turns, input_limits)
    for index, turn in enumerate(turns):
        called = _check_calls(f"messages[{index}].tool_calls", turn.get("tool_calls"), input_limits)
        has_content = is_utf8_text(turn.get("content")) or (called and turn.get("content") is None)
        if not is_utf8_text(turn.get("role")) or not has_content:
            raise _refused(
                f"messages[{index}]: must have a `role` and a `content` that are strings of whole characters"
            )
    if not is_utf8_text(json.dumps(turns, ensure_ascii=False)):
        raise _refused("messages: hold half a character; send UTF-8 text")
    return turns


def check_count(turns: list[Message], input_limits: InputLimits) -> None:
    """Raises RequestError for a conversation of too many messages."""
    input_limits.check("max_messages", "messages", len(turns), "messages")


def _check_calls(name: str, calls: Any, input_limits: InputLimits) -> bool:
    """Whether there are any."""
    if calls is None:
        return False
    if not isinstance(calls, list) or not all(map(_is_function, calls)):
        raise _refused(
            f'{name}: must be a list of objects like {{"type": "function", "function": {{"name": "…", "arguments":'
            " {…}}}"
        )
    input_limits.check("max_tool_calls", name, len(calls), "calls")
    return bool(calls)


def check_tools(tools: Any, input_limits: InputLimits) -> list[Tool]:
    """Raises RequestError for what is no list of functions."""
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise _refused('tools: must be a JSON list of objects like {"type": "function", "function": {"name": "…", …}}')
    input_limits.check("max_tools", "tools", len(tools), "tools")
    text = json.dumps(tools, ensure_ascii=False)
    input_limits.check("max_tools_chars", "tools", len(text), "characters")
    if not is_utf8_text(text):
        raise _refused("tools: hold half a character; send UTF-8 text")
    return tools


def _is_function(value: Any) -> bool:
    """A tool, or a call of one."""
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and is_utf8_text(function.get("name")) and bool(function["name"])


def _refused(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, message)
