"""Keeps the text of special tokens that a client types, such as `<|im_end|>`, from becoming these tokens.

Before messages are rendered, each such text is replaced by a mark, which no template writes. So the special tokens in
the rendered prompt are the template's own. A piece between two of them that contains marks gets the typed text back,
and is encoded by a tokenizer that knows no special tokens. Messages without such a text are encoded as usual.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

_FIRST, _LAST = 0xE000, 0xF8FF  # characters for private use, which templates neither write nor change
_NONCE_CHARS = 8


class TypedTokens:
    """Finds the special tokens of one tokenizer in values of JSON."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._texts = sorted(special, key=len, reverse=True)[: _LAST - _FIRST]
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")

    def hide(self, value: Any) -> tuple[Any, Marks | None]:
        """Return the value with a mark in place of each special token in its strings, and the marks; None instead of
        the marks if there are none."""
        nonce = "".join(chr(_FIRST + secrets.randbelow(_LAST - _FIRST)) for _ in range(_NONCE_CHARS))
        marks, num_found = {text: f"{nonce}{chr(_FIRST + index)}" for index, text in enumerate(self._texts)}, 0

        def mark(text: str) -> str:
            nonlocal num_found
            text, count = self._pattern.subn(lambda match: marks[match[0]], text)
            num_found += count
            return text

        hidden = _replace_strings(value, mark)
        return hidden, Marks(nonce, self._texts, self._pattern) if num_found else None


@dataclass(frozen=True)
class Marks:
    """The marks in the values of one request."""

    nonce: str
    texts: list[str]  # texts of special tokens; the mark of texts[i] ends with the character _FIRST + i
    pattern: re.Pattern[str]  # matches a special token

    def pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a rendered prompt, with the typed texts in place of marks, and whether special tokens in
        the part were typed."""
        begin = end = 0
        for match in (*self.pattern.finditer(rendered), None):
            text_end = match.start() if match else len(rendered)
            if self.nonce in (text := rendered[end:text_end]):
                if begin < end:
                    yield rendered[begin:end], False
                yield self._restored(text), True
                begin = text_end
            end = match.end() if match else text_end
        if begin < len(rendered):
            yield rendered[begin:], False

    def _restored(self, text: str) -> str:
        return re.sub(f"{self.nonce}(.)", lambda match: self.texts[ord(match[1]) - _FIRST], text)


def _replace_strings(value: Any, replace: Callable[[str], str]) -> Any:
    """Return a value of JSON with every string replaced, including the names in objects."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, list):
        return [_replace_strings(item, replace) for item in value]
    if isinstance(value, dict):
        return {replace(name): _replace_strings(item, replace) for name, item in value.items()}
    return value
