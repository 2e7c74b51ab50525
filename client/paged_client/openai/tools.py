"""Tool use of a chat request: the tools in the prompt, the output constraint, and the parser of the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from paged_client.openai.chat_schema import AllowedToolChoice, ChatRequest, NamedTool, Tool, chosen_tools
from paged_client.openai.tool_call_parser import ToolCallParser
from paged_client.openai.tool_calls import ANY, FORMATS, JSON, ArgumentsParser, OutputParser, TextParser, ToolCallFormat

Schema = dict[str, Any]
_NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolUse(NamedTuple):
    """How a chat request uses tools."""

    prompt_tools: list[dict[str, Any]] | None  # passed to the chat template
    schema: Schema | None  # JSON Schema of the whole output, if it has to be a call, or a call or a response_format
    make_parser: Callable[[], OutputParser]  # creates the parser of a sample
    forced: bool = False  # whether the output consists of calls only


def tool_use(request: ChatRequest, tool_format: ToolCallFormat) -> ToolUse:
    """Return how a request uses tools. `tool_format` is the format of calls that are not constrained by a schema."""
    if not request.may_call:
        return ToolUse(None, None, TextParser)
    tools, choice = request.tools or [], request.tool_choice
    if isinstance(choice, AllowedToolChoice):
        allowed = set(chosen_tools(choice))
        tools, choice = [tool for tool in tools if tool.function.name in allowed], choice.allowed_tools.mode
    prompt_tools = [tool.model_dump(exclude_unset=True) for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        (tool,) = (tool for tool in tools if tool.function.name == name)
        return ToolUse(prompt_tools, _parameters(tool), lambda: ArgumentsParser(name), forced=True)
    parallel = request.parallel_tool_calls is not False
    required = choice == "required"
    names = frozenset(tool.function.name for tool in tools)
    answer = request.response_format.schema_of_output if request.response_format else None
    schema = None
    if required:
        schema = _calls_schema(tools, parallel)
    elif answer is not None:
        schema = _either(answer, _calls_schema(tools, parallel))
    call_format = tool_format if schema is None else JSON

    def make_parser() -> ToolCallParser:
        return ToolCallParser(call_format, names, parallel=parallel, forced=required)

    return ToolUse(prompt_tools, schema, make_parser, forced=required)


def detect_format(template: str | None) -> ToolCallFormat:
    """Return the format of tool calls of a model with this chat template, or ANY if it has no known marker."""
    markers = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}
    return next((FORMATS[name] for name, marker in markers.items() if marker in (template or "")), ANY)


def _parameters(tool: Tool) -> Schema:
    return _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters


def _calls_schema(tools: list[Tool], parallel: bool) -> Schema:
    """Return the schema of a list of at least one call."""
    calls = [_call_schema(tool, f"#/items/anyOf/{index}/properties/arguments") for index, tool in enumerate(tools)]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | ({} if parallel else {"maxItems": 1})


def _call_schema(tool: Tool, place: str) -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"enum": [tool.function.name]}, "arguments": _rebase_refs(_parameters(tool), place)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _either(*schemas: Schema) -> Schema:
    """Return the schema of what fits one of several schemas."""
    return {"anyOf": [_rebase_refs(schema, f"#/anyOf/{index}") for index, schema in enumerate(schemas)]}


def _rebase_refs(schema: Any, place: str) -> Any:
    """Prefix the local references of a schema that is embedded at the JSON pointer `place` of another one."""
    if isinstance(schema, list):
        return [_rebase_refs(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _rebase_refs(value, place)
        for key, value in schema.items()
    }
