"""A scanner of JSON in text that arrives in parts.

Its methods are generators: they yield when they need more text and return their result. The caller resumes them after
`feed` or `end`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

MAX_STRING = 256  # characters of a key, or of a tool's name
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')

T = TypeVar("T")
Scan = Generator[None, None, T]  # yields wait for more text


class Scanner:
    """The text that was fed and not consumed yet."""

    def __init__(self) -> None:
        self.rest = ""
        self._ended = False

    def feed(self, text: str) -> None:
        self.rest += text

    def end(self) -> None:
        """Mark the end of the text."""
        self._ended = True

    def take(self, count: int) -> str:
        """Consume `count` characters and return them."""
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken

    def more(self) -> Scan[bool]:
        """Wait for more text. Return False at the end of the text."""
        if self._ended:
            return False
        yield
        return True

    def skip(self, characters: str, markers: Collection[str] = ()) -> Scan[str]:
        """Consume all leading `characters` and `markers`, and return them."""
        skipped = ""
        while True:
            if marker := next((marker for marker in markers if self.rest.startswith(marker)), None):
                skipped += self.take(len(marker))
            elif not self.rest or any(marker.startswith(self.rest) for marker in markers):
                if not (yield from self.more()):
                    return skipped
            elif self.rest[0] in characters:
                skipped += self.take(1)
            else:
                return skipped

    def short_string(self) -> Scan[str]:
        """Consume a JSON string of about MAX_STRING characters at most. Return "" if there is none."""
        while not (string := _STRING.match(self.rest)):
            is_other = self.rest and not self.rest.startswith('"')
            if is_other or len(self.rest) > MAX_STRING or not (yield from self.more()):
                return ""
        return self.take(string.end())

    def value(self, write: Callable[[str], None]) -> Scan[bool]:
        """Pass a JSON value of any type to `write` as it arrives. Return False if the text ends before the value."""
        extent = _ValueExtent()
        while (end := extent.end(self.rest)) is None:
            write(self.take(len(self.rest)))
            if not (yield from self.more()):
                return False
        write(self.take(end))
        return True


class _ValueExtent:
    """Finds the end of a JSON value in text that arrives in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def end(self, text: str) -> int | None:
        """Return where the value ends in its next part, or None if it continues."""
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
                return index  # the end of a number or a literal
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return index + 1
        return None
