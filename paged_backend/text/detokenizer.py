"""Incremental detokenization: token ids to text as they arrive.

Never returns an incomplete character or part of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix

CONTEXT = 5  # prompt tokens decoded too, so that the first output token gets its leading space
TAIL = 16  # tokens that suffice to see whether a text ends inside a character of up to four bytes
INCOMPLETE = "\ufffd"  # replacement character, which a decoder returns for an incomplete character


class Detokenizer:
    """The text of one sample.

    ids    | last prompt ids | generated .................. |
                 ^ prefix          ^ decoded up to here   ^ ids after it end inside a character
    text   ... returned | held back: may be the start of a stop string |

    Owned by the responder's thread.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        record_offsets: bool = False,
        prefix_chars: int = 0,
    ):
        """stop, include_stop, min_tokens: sampling parameters.
        record_offsets: whether to fill `offsets`.
        prefix_chars: characters of an echoed prompt, which come before this text."""
        self._decode = decode
        self._ids = list(prompt_ids[-CONTEXT:])
        self._prefix = 0
        self._read = len(self._ids)
        self._prefix_text: str | None = None  # text of the ids from `prefix` to `read`, once needed
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self._record_offsets = record_offsets
        self.num_tokens = 0
        self.num_chars = prefix_chars  # characters of decoded text, including text that is held back
        self.offsets: list[int] = []  # start of each token's text, or of the character that it is part of
        self.matched_stop: str | None = None  # the stop string that ended the text

    @property
    def has_stop(self) -> bool:
        """True if a stop string may end the text, so tokens should be pushed at once."""
        return bool(self._stop)

    @property
    def stopped(self) -> bool:
        return self.matched_stop is not None

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete; it does not depend on how tokens are grouped into calls.

        When a stop string is complete, `matched_stop` is set, and `num_tokens` counts up to the token that completed
        it.
        """
        if not self._stop and not self._record_offsets:
            return self._decode_new(tokens)
        text = ""
        for token in tokens:
            text += self._release(
                self._decode_with_offset(token) if self._record_offsets else self._decode_new((token,))
            )
            if self.stopped:
                break
        return text

    def flush(self) -> str:
        """Return the text held back at the end, without bytes that do not form a character."""
        text = ""
        if self._read < len(self._ids):
            text = self._advance(self._decode(self._ids[self._prefix :]), len(self._ids)).rstrip(INCOMPLETE)
            self.num_chars += len(text)
        released = self._release(text)
        held, self._held = self._held, ""
        return released if self.stopped else released + held

    def _decode_new(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the new text up to the last token that does not end inside a character."""
        assert not self.stopped
        self.num_tokens += len(tokens)
        self._ids += tokens
        for end in range(len(self._ids), len(self._ids) - len(tokens), -1):
            if end - self._read > TAIL:  # avoids decoding a long run of invalid bytes again for each token
                tail = self._decode(self._ids[end - TAIL : end])
                if not tail or tail.endswith(INCOMPLETE):
                    continue
            text = self._decode(self._ids[self._prefix : end])
            if not text.endswith(INCOMPLETE):
                new = self._advance(text, end)
                self.num_chars += len(new)
                return new
        return ""

    def _decode_with_offset(self, token: int) -> str:
        """Add a token like `_decode_new`, and record where its text begins."""
        before, pending = self.num_chars, self._pending_text()
        new = self._decode_new((token,))
        same = commonprefix([pending, new]) if new else pending.rstrip(INCOMPLETE)  # noqa: RUF071  of characters
        self.offsets.append(before + len(same))
        return new

    def _pending_text(self) -> str:
        """Return the text of the ids after `read`: an incomplete character, or invalid bytes."""
        if not 0 < len(self._ids) - self._read <= TAIL:
            return ""
        return self._decode(self._ids[self._prefix :])[len(self._decode(self._ids[self._prefix : self._read])) :]

    def _advance(self, text: str, end: int) -> str:
        """Return the new part of `text`, the text of the ids from `prefix` to `end`, and continue from `end`."""
        if self._prefix_text is None:
            self._prefix_text = self._decode(self._ids[self._prefix : self._read])
        new = text[len(self._prefix_text) :]
        self._prefix, self._read, self._prefix_text = self._read, end, None
        return new

    def _release(self, text: str) -> str:
        """Return the text that is not part of a stop string and cannot become part of one."""
        if not self._stop:
            return text
        text = self._held + text
        if self.num_tokens > self._min_tokens and (end := self._find_stop(text)) is not None:
            self._held = ""
            return text[:end]
        keep = self._stop_prefix_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _find_stop(self, text: str) -> int | None:
        """Return the position at which the earliest stop string ends the text; None if there is none."""
        matches = [(text.find(stop), len(stop), stop) for stop in self._stop if stop in text]
        if not matches:
            return None
        start, length, self.matched_stop = min(matches)
        return start + length if self._include_stop else start

    def _stop_prefix_length(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is the beginning of a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stop) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
