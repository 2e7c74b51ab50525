"""Parsing of a model's output into text and tool calls: the formats, the events, and the parsers without markers.

Models write tool calls as the same JSON with different markers around it:

    hermes, qwen   <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    llama 3        {"name": "f", "parameters": {...}}; {...}          optionally after <|python_tag|>
    mistral        [TOOL_CALLS][{"name": "f", "arguments": {...}}]    or [TOOL_CALLS]f{...}

`tool_call_parser.ToolCallParser` parses these formats.
"""

from __future__ import annotations

import json
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text of the message."""

    text: str


class CallStart(NamedTuple):
    """The start of a tool call."""

    call: int  # index of the call
    name: str


class ArgumentsDelta(NamedTuple):
    """The next part of a call's arguments, as JSON text."""

    call: int
    text: str


ParserEvent = Content | CallStart | ArgumentsDelta


class OutputParser(Protocol):
    """An incremental parser of one sample's text. The concatenated events do not depend on how the text is cut."""

    @property
    def complete(self) -> bool:
        """True if no call is truncated, once the text has ended."""

    def push(self, text: str) -> list[ParserEvent]:
        """Add text and return the events that it completes."""

    def finish(self) -> list[ParserEvent]:
        """End the text and return the remaining events."""


class TextParser:
    """The parser for requests without tools: all output is content."""

    complete = True

    def push(self, text: str) -> list[ParserEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[ParserEvent]:
        return []


class ArgumentsParser:
    """The parser for a named tool choice: all output is the arguments of that tool."""

    def __init__(self, name: str) -> None:
        self._start: list[ParserEvent] = [CallStart(0, name)]
        self._texts: list[str] = []

    @property
    def complete(self) -> bool:
        return is_object("".join(self._texts))

    def push(self, text: str) -> list[ParserEvent]:
        start, self._start = self._start, []
        self._texts.append(text)
        return [*start, ArgumentsDelta(0, text)] if text else start

    def finish(self) -> list[ParserEvent]:
        return []


class ToolCallFormat(NamedTuple):
    """The markers that a model writes around tool calls."""

    begin: tuple[str, ...]  # markers before one or several calls
    end: tuple[str, ...] = ()  # markers after them
    bare: bool = False  # calls may start the text without a marker
    named: bool = False  # a call may be a tool's name followed by its arguments


HERMES = ToolCallFormat(("<tool_call>",), ("</tool_call>",))
LLAMA3 = ToolCallFormat(("<|python_tag|>",), bare=True)
MISTRAL = ToolCallFormat(("[TOOL_CALLS]",), bare=True, named=True)
JSON = ToolCallFormat((), bare=True)
ANY = ToolCallFormat(HERMES.begin + LLAMA3.begin + MISTRAL.begin, HERMES.end, bare=True, named=True)
FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3, "mistral": MISTRAL}


def load_json(text: str) -> object:
    """Parse JSON. Return None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    return isinstance(load_json(text), dict)
