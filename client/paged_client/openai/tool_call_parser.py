"""An incremental parser of tool calls in a model's output. tool_calls.py describes the formats.

A call has to name one of the request's tools. Text that turns out to be no call is returned as content, unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from paged_client.openai.json_scanner import MAX_STRING, Scan, Scanner
from paged_client.openai.tool_calls import (
    ArgumentsDelta,
    CallStart,
    Content,
    ParserEvent,
    ToolCallFormat,
    is_object,
    load_json,
)

_SPACE, _SEPARATORS = " \t\r\n", ",;[]"
_ARGUMENTS_KEYS = ('"arguments"', '"parameters"')
_NAMED_CALL = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\{)")
_NAMED_CALL_PREFIX = re.compile(r"[\w.-]+(?:\[[A-Z_]*(?:\]\w*)?)*")


class ToolCallParser:
    """The parser for models that may call tools.

    Args:
        tool_format: markers around calls.
        names: names of the tools.
        parallel: whether to return more than one call; otherwise later calls are dropped.
        forced: whether the output is constrained to calls. Other text then is the rest of a truncated call, and no
            content.
    """

    def __init__(
        self, tool_format: ToolCallFormat, names: Collection[str], *, parallel: bool = True, forced: bool = False
    ) -> None:
        self.complete = True
        self._format = tool_format
        self._forced = forced
        self._markers = tool_format.begin + tool_format.end
        self._begin = re.compile("|".join(map(re.escape, tool_format.begin)) or "(?!)")
        self._names = names
        self._parallel = parallel
        self._scanner = Scanner()
        self._before = ""  # consumed text that is content if no call follows it
        self._num_calls = 0
        self._events: list[ParserEvent] = []
        self._parsing = self._parse()
        next(self._parsing)

    def push(self, text: str) -> list[ParserEvent]:
        self._scanner.feed(text)
        return self._advance()

    def finish(self) -> list[ParserEvent]:
        self._scanner.end()
        return self._advance()

    def _advance(self) -> list[ParserEvent]:
        next(self._parsing, None)
        events, self._events = self._events, []
        return events

    def _parse(self) -> Scan[None]:
        scanner = self._scanner
        if self._format.bare:
            space = yield from scanner.skip(_SPACE)
            if scanner.rest.startswith(("{", "[")):
                yield from self._calls(space)
            else:
                scanner.rest = space + scanner.rest
        while marker := (yield from self._text()):
            yield from self._calls(marker)

    def _text(self) -> Scan[str]:
        """Parse content up to a marker. Return the marker with the white space before it, or "" at the end."""
        scanner = self._scanner
        while not (marker := self._begin.search(scanner.rest)):
            self._add_content(scanner.take(self._certain_length()))
            if not (yield from scanner.more()):
                self._add_content(scanner.take(len(scanner.rest)))
                return ""
        before = len(scanner.rest[: marker.start()].rstrip())
        self._add_content(scanner.take(before))
        return scanner.take(marker.end() - before)

    def _certain_length(self) -> int:
        """Return how many characters are certainly content.

        The last characters are not if they may be the start of a marker, or white space before one.
        """
        certain = self._scanner.rest
        for size in range(min(len(certain), max(map(len, self._format.begin), default=0)), 0, -1):
            if any(marker.startswith(certain[-size:]) for marker in self._format.begin):
                certain = certain[:-size]
                break
        return len(certain.rstrip())

    def _calls(self, before: str) -> Scan[None]:
        """Parse calls until something else follows.

        Args:
            before: the consumed marker and white space, which is content if no call follows.
        """
        self._before, num_calls, rejected = before, self._num_calls, None
        while rejected is None:
            self._before += yield from self._scanner.skip(_SPACE + _SEPARATORS, self._markers)
            if self._format.named and any(marker in self._before for marker in self._format.begin):
                rejected = yield from self._named_call()
            else:
                rejected = yield from self._object_call()
        if self._num_calls > num_calls:  # text that ends a call is dropped, a marker of a further call is content
            marker = self._begin.search(self._before)
            self._before = self._before[marker.start() :] if marker else ""
        self._add_content(self._before + rejected)

    def _named_call(self) -> Scan[str | None]:
        """Parse a call that may have the tool's name in front of its arguments. Returns as `_object_call` does."""
        scanner = self._scanner
        while _NAMED_CALL_PREFIX.fullmatch(scanner.rest) and len(scanner.rest) <= MAX_STRING:
            if not (yield from scanner.more()):
                return ""
        named = _NAMED_CALL.match(scanner.rest)
        if not named or named[1] not in self._names:
            return (yield from self._object_call())
        scanner.take(named.end())
        return None if (yield from self._arguments(named[1])) else ""

    def _object_call(self) -> Scan[str | None]:
        """Parse a call that is a JSON object.

        Return None for a call. Return the consumed text that is content if it is not a call or is truncated.
        """
        scanner = self._scanner
        if not scanner.rest.startswith("{"):
            return ""
        consumed, members, started = scanner.take(1), _Members(), False
        while True:
            consumed += yield from scanner.skip(_SPACE + ",")
            if scanner.rest.startswith("}"):
                consumed += scanner.take(1)
                break
            key = yield from scanner.short_string()
            consumed += key + (yield from scanner.skip(_SPACE + ":"))
            is_arguments = key in _ARGUMENTS_KEYS and scanner.rest.startswith("{")
            if is_arguments and members.name in self._names and not started:
                started = yield from self._arguments(members.name)
                if not started:
                    return ""
                continue
            value: list[str] = []
            complete = bool(key) and (yield from scanner.value(value.append))
            consumed += "".join(value)
            if not complete:
                if self._forced and not started:
                    self._truncate_call(members.name)
                return "" if started else consumed
            members.add(key, "".join(value))
        arguments = members.arguments
        if not started:
            if members.name not in self._names or arguments is None:
                return consumed
            self._start_call(members.name)(arguments)
        return None

    def _arguments(self, name: str) -> Scan[bool]:
        """Parse the arguments of a call. Return whether they are complete."""
        write = self._start_call(name)
        is_returned = self._parallel or self._num_calls == 1
        complete = yield from self._scanner.value(write)
        self.complete &= complete or not is_returned
        return complete

    def _truncate_call(self, name: str) -> None:
        """Handle a call that ends before its arguments. `name` may be empty if it is not complete either."""
        self.complete = False
        if name in self._names:
            self._start_call(name)

    def _start_call(self, name: str) -> Callable[[str], None]:
        """Start a call. Return the function to pass its arguments to."""
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._before = ""
        if index and not self._parallel:
            return lambda text: None
        self._events.append(CallStart(index, name))
        return lambda text: self._events.append(ArgumentsDelta(index, text)) if text else None

    def _add_content(self, text: str) -> None:
        if text and not self._forced:
            self._events.append(Content(text))


class _Members:
    """The members of an object that may be a call."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments: str | None = "{}"  # JSON text of an object; None if they are of another type

    def add(self, key: str, value: str) -> None:
        if key == '"name"':
            self.name = str(load_json(value))
        elif key in _ARGUMENTS_KEYS:
            loaded = load_json(value)
            text = loaded if isinstance(loaded, str) else value  # some models quote the whole object
            self.arguments = "{}" if loaded is None and value == "null" else text if is_object(text) else None
