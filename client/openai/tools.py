"""What a chat may do with its tools: what the prompt tells of them, what the answer is held to, and who reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from client.openai.chat_schema import ChatRequest, NamedTool, Tool
from client.openai.tool_calls import (
    ANY,
    FORMATS,
    JSON,
    ArgumentsParser,
    OutputParser,
    TextParser,
    ToolCallFormat,
    ToolCallParser,
)

Schema = dict[str, Any]
_NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolUse(NamedTuple):
    prompt_tools: list[dict[str, Any]] | None
    schema: Schema | None  # of the whole answer, where it has to be a call
    reader: Callable[[], OutputParser]  # of one sample
    forced: bool = False  # whether the answer is nothing but calls


def tool_use(request: ChatRequest, form: ToolCallFormat) -> ToolUse:
    """form: how the model writes calls that it makes by itself."""
    if not request.may_call:
        return ToolUse(None, None, TextParser)
    tools, choice = request.tools or [], request.tool_choice
    described = [tool.model_dump(exclude_unset=True) for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        (tool,) = (tool for tool in tools if tool.function.name == name)
        return ToolUse(described, _parameters(tool), lambda: ArgumentsParser(name), forced=True)
    parallel = request.parallel_tool_calls is not False
    required = choice == "required"
    names = frozenset(tool.function.name for tool in tools)
    schema = _calls_schema(tools, parallel) if required else None
    written = JSON if required else form
    return ToolUse(
        described, schema, lambda: ToolCallParser(written, names, parallel=parallel, forced=required), forced=required
    )


def detect_format(template: str | None) -> ToolCallFormat:
    """How a model with this chat template writes calls; any of the ways where that does not tell."""
    marks = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}
    return next((FORMATS[name] for name, mark in marks.items() if mark in (template or "")), ANY)


def _parameters(tool: Tool) -> Schema:
    return _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters


def _calls_schema(tools: list[Tool], parallel: bool) -> Schema:
    """A list of at least one call."""
    calls = [_call_schema(tool, f"#/items/anyOf/{index}/properties/arguments") for index, tool in enumerate(tools)]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | ({} if parallel else {"maxItems": 1})


def _call_schema(tool: Tool, place: str) -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"enum": [tool.function.name]}, "arguments": _moved(_parameters(tool), place)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema whose root is at `place` of another one, which its references to itself have to tell."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }
