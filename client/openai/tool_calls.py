"""Calls of tools, read out of a model's text while it comes.

Models write calls in a few ways, which differ in what stands around the same JSON:

    hermes, qwen   <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    llama 3        {"name": "f", "parameters": {...}}; {...}          perhaps after <|python_tag|>
    mistral        [TOOL_CALLS][{"name": "f", "arguments": {...}}]    or [TOOL_CALLS]f{...}

A call names one of the request's tools. Whatever turns out to be none is text, every character of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    text: str


class CallStart(NamedTuple):
    call: int
    name: str


class ArgumentsDelta(NamedTuple):
    """More of a call's arguments, as JSON text."""

    call: int
    text: str


Piece = Content | CallStart | ArgumentsDelta


class OutputParser(Protocol):
    """Of one sample's text. The pieces of a text are the same however it is cut."""

    @property
    def whole(self) -> bool:
        """Whether no call was cut; once the text has ended."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """What was held back. Nothing may be pushed afterwards."""


class TextParser:
    """Where there are no tools."""

    whole = True

    def push(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class ArgumentsParser:
    """Where the whole text is the arguments of one tool."""

    def __init__(self, name: str) -> None:
        self._begin: list[Piece] = [CallStart(0, name)]
        self._texts: list[str] = []

    @property
    def whole(self) -> bool:
        return _is_object("".join(self._texts))

    def push(self, text: str) -> list[Piece]:
        begin, self._begin = self._begin, []
        self._texts.append(text)
        return [*begin, ArgumentsDelta(0, text)] if text else begin

    def finish(self) -> list[Piece]:
        return []


class ToolCallFormat(NamedTuple):
    begin: tuple[str, ...]  # marks before one or several calls
    end: tuple[str, ...] = ()
    bare: bool = False  # calls may begin the text without a mark
    named: bool = False  # a call may be a tool's name before its arguments


HERMES = ToolCallFormat(("<tool_call>",), ("</tool_call>",))
LLAMA3 = ToolCallFormat(("<|python_tag|>",), bare=True)
MISTRAL = ToolCallFormat(("[TOOL_CALLS]",), bare=True, named=True)
JSON = ToolCallFormat((), bare=True)
ANY = ToolCallFormat(HERMES.begin + LLAMA3.begin + MISTRAL.begin, HERMES.end, bare=True, named=True)
FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3, "mistral": MISTRAL}

_LONGEST_WORD = 256  # characters of a key, or of a tool's name
_SPACE, _SEPARATORS = " \t\r\n", ",;[]"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\{)")
_MAYBE_NAMED = re.compile(r"[\w.-]+(?:\[[A-Z_]*(?:\]\w*)?)*")
_Steps = Generator[None, None, None]  # a yield waits for more text


class ToolCallParser:
    """Where the model may call tools.

    Args:
        names: of the tools.
        parallel: whether calls after the first count; else they are left out.
        forced: whether the text is held to calls. What is none then is the rest of one that was cut, and no content.
    """

    def __init__(
        self, form: ToolCallFormat, names: Collection[str], *, parallel: bool = True, forced: bool = False
    ) -> None:
        self.whole = True
        self._form = form
        self._forced = forced
        self._marks = form.begin + form.end
        self._begin = re.compile("|".join(map(re.escape, form.begin)) or "(?!)")
        self._names = names
        self._parallel = parallel
        self._rest = ""  # text that was not read yet
        self._before = ""  # what was read before what may be a call
        self._ended = False
        self._num_calls = 0
        self._pieces: list[Piece] = []
        self._steps = self._read()
        next(self._steps)

    def push(self, text: str) -> list[Piece]:
        self._rest += text
        return self._advance()

    def finish(self) -> list[Piece]:
        self._ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> _Steps:
        if self._form.bare:
            space = yield from self._skip(_SPACE)
            if self._rest.startswith(("{", "[")):
                yield from self._calls(space)
            else:
                self._rest = space + self._rest
        while mark := (yield from self._text()):
            yield from self._calls(mark)

    def _text(self) -> Generator[None, None, str]:
        """Text up to a mark. Returns the mark with the white space before it, or nothing at the end."""
        while not (mark := self._begin.search(self._rest)):
            self._say(self._take(self._certain()))
            if not (yield from self._more()):
                self._say(self._take(len(self._rest)))
                return ""
        before = len(self._rest[: mark.start()].rstrip())
        self._say(self._take(before))
        return self._take(mark.end() - before)

    def _certain(self) -> int:
        """Characters that are text whatever follows: neither the beginning of a mark nor the space before one."""
        certain = self._rest
        for size in range(min(len(certain), max(map(len, self._form.begin), default=0)), 0, -1):
            if any(mark.startswith(certain[-size:]) for mark in self._form.begin):
                certain = certain[:-size]
                break
        return len(certain.rstrip())

    def _calls(self, before: str) -> _Steps:
        """Calls, until something else comes. before: what was read on the way, which is text if there are none."""
        self._before, calls, spoilt = before, self._num_calls, None
        while spoilt is None:
            self._before += yield from self._skip(_SPACE + _SEPARATORS, self._marks)
            if self._form.named and any(mark in self._before for mark in self._form.begin):
                spoilt = yield from self._named_call()
            else:
                spoilt = yield from self._object()
        if self._num_calls > calls:  # what ends a call is no text, but what would have begun another one is
            mark = self._begin.search(self._before)
            self._before = self._before[mark.start() :] if mark else ""
        self._say(self._before + spoilt)

    def _named_call(self) -> Generator[None, None, str | None]:
        """As `_object`, but the arguments alone, perhaps with the tool's name before them."""
        while _MAYBE_NAMED.fullmatch(self._rest) and len(self._rest) <= _LONGEST_WORD:
            if not (yield from self._more()):
                return ""
        named = _NAMED.match(self._rest)
        if not named or named[1] not in self._names:
            return (yield from self._object())
        self._take(named.end())
        return None if (yield from self._arguments(named[1])) else ""

    def _object(self) -> Generator[None, None, str | None]:
        """One call as a JSON object. Returns None, or else what has to be text, since it was not, or not whole."""
        if not self._rest.startswith("{"):
            return ""
        taken, members, begun = self._take(1), _Members(), False
        while True:
            taken += yield from self._skip(_SPACE + ",")
            if self._rest.startswith("}"):
                taken += self._take(1)
                break
            word = yield from self._word()
            taken += word + (yield from self._skip(_SPACE + ":"))
            if word in _ARGUMENTS and members.name in self._names and self._rest.startswith("{") and not begun:
                begun = yield from self._arguments(members.name)
                if not begun:
                    return ""
                continue
            value: list[str] = []
            whole = bool(word) and (yield from self._value(value.append))
            taken += "".join(value)
            if not whole:
                if self._forced and not begun:
                    self._cut(members.name)
                return "" if begun else taken
            members.add(word, "".join(value))
        arguments = members.arguments
        if not begun:
            if members.name not in self._names or arguments is None:
                return taken
            self._call(members.name)(arguments)
        return None

    def _arguments(self, name: str) -> Generator[None, None, bool]:
        """A call whose arguments come now. Whether they were whole."""
        take = self._call(name)
        counts = self._parallel or self._num_calls == 1
        whole = yield from self._value(take)
        self.whole &= whole or not counts
        return whole

    def _cut(self, name: str) -> None:
        """A call that ends before its arguments. name: as much of it as is known for sure."""
        self.whole = False
        if name in self._names:
            self._call(name)

    def _call(self, name: str) -> Callable[[str], None]:
        """Begin a call. Returns what takes its arguments."""
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._before = ""
        if index and not self._parallel:
            return lambda text: None
        self._pieces.append(CallStart(index, name))
        return lambda text: self._pieces.append(ArgumentsDelta(index, text)) if text else None

    def _value(self, take: Callable[[str], None]) -> Generator[None, None, bool]:
        """A JSON value of any kind. Whether it was whole at the end of the text."""
        extent = _Extent()
        while (end := extent.end(self._rest)) is None:
            take(self._take(len(self._rest)))
            if not (yield from self._more()):
                return False
        take(self._take(end))
        return True

    def _word(self) -> Generator[None, None, str]:
        """A short JSON string, or nothing."""
        while not (word := _STRING.match(self._rest)):
            other = self._rest and not self._rest.startswith('"')
            if other or len(self._rest) > _LONGEST_WORD or not (yield from self._more()):
                return ""
        return self._take(word.end())

    def _skip(self, characters: str, marks: Collection[str] = ()) -> Generator[None, None, str]:
        skipped = ""
        while True:
            if mark := next((mark for mark in marks if self._rest.startswith(mark)), None):
                skipped += self._take(len(mark))
            elif not self._rest or any(mark.startswith(self._rest) for mark in marks):
                if not (yield from self._more()):
                    return skipped
            elif self._rest[0] in characters:
                skipped += self._take(1)
            else:
                return skipped

    def _more(self) -> Generator[None, None, bool]:
        """Wait for more text. False where there will be none."""
        if self._ended:
            return False
        yield
        return True

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def _say(self, text: str) -> None:
        if text and not self._forced:
            self._pieces.append(Content(text))


_ARGUMENTS = ('"arguments"', '"parameters"')


class _Members:
    """Of an object that may be a call."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments: str | None = "{}"  # as JSON text of an object; None: something else was given

    def add(self, key: str, value: str) -> None:
        if key == '"name"':
            self.name = str(_loads(value))
        elif key in _ARGUMENTS:
            loaded = _loads(value)
            text = loaded if isinstance(loaded, str) else value  # some models quote the whole object
            self.arguments = "{}" if loaded is None and value == "null" else text if _is_object(text) else None


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_object(text: str) -> bool:
    return isinstance(_loads(text), dict)


class _Extent:
    """How far a JSON value reaches in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def end(self, text: str) -> int | None:
        """Where the value ends in its next piece; None where it goes on."""
        for index, character in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
                if not self._quoted and not self._depth:
                    return index + 1
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif not self._depth and character in "}], \t\r\n":
                return index  # a number or a word ends where something else begins
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return index + 1
        return None
