"""Conversations with tools, as chat templates take them: what may be in one, and the text that it comes to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paged_backend.errors import ErrorCode, RequestError, invalid, is_text

if TYPE_CHECKING:  # models that only relay requests import this module, and are ready at once
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Tool = dict[str, Any]

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128  # of one message
MAX_TOOLS_CHARS = 1 << 20


def check_messages(turns: Any) -> list[Message]:
    """Raises RequestError for what is no conversation. A message may lack a content only where it calls tools; what
    else it holds is the template's to judge."""
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise _refused('messages: must be a JSON list of objects like {"role": "user", "content": "…"}')
    for index, turn in enumerate(turns):
        called = _check_calls(f"messages[{index}].tool_calls", turn.get("tool_calls"))
        has_content = is_text(turn.get("content")) or (called and turn.get("content") is None)
        if not is_text(turn.get("role")) or not has_content:
            raise _refused(
                f"messages[{index}]: must have a `role` and a `content` that are strings of whole characters"
            )
    if not is_text(json.dumps(turns, ensure_ascii=False)):
        raise _refused("messages: hold half a character; send UTF-8 text")
    return turns


def _check_calls(name: str, calls: Any) -> bool:
    """Whether there are any."""
    if calls is None:
        return False
    if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS or not all(map(_is_function, calls)):
        raise _refused(
            f'{name}: must be a list of at most {MAX_TOOL_CALLS} objects like {{"type": "function", "function":'
            ' {"name": "…", "arguments": {…}}}'
        )
    return bool(calls)


def check_tools(tools: Any) -> list[Tool]:
    """Raises RequestError for what is no list of functions."""
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise _refused('tools: must be a JSON list of objects like {"type": "function", "function": {"name": "…", …}}')
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"{len(tools)} tools", f"must be at most {MAX_TOOLS}")
    text = json.dumps(tools, ensure_ascii=False)
    if len(text) > MAX_TOOLS_CHARS:
        raise invalid("tools", f"{len(text)} characters", f"must be at most {MAX_TOOLS_CHARS}")
    if not is_text(text):
        raise _refused("tools: hold half a character; send UTF-8 text")
    return tools


def _is_function(value: Any) -> bool:
    """A tool, or a call of one."""
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and is_text(function.get("name")) and bool(function["name"])


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Tool] | None) -> str:
    """The prompt that the model's chat template makes. Raises RequestError where there is none, or where it refuses."""
    from jinja2 import TemplateError  # as late as transformers does

    if not tokenizer.chat_template:
        raise _refused("messages: this model has no chat template; use text_input")
    try:
        return str(
            tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
        )
    except Exception as error:  # templates refuse, for example, two user turns in a row, or trip over odd values
        reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise _refused(f"messages: the chat template refuses them: {reason}") from error


def _refused(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, message)
