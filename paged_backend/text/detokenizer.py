"""Token ids to text as they come: never half a character, never part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix

CONTEXT = 5  # prompt tokens decoded along, so that the first output token gets the space it has in context
TAIL = 16  # tokens that tell whether a long text ends inside a character, which has four bytes at the most
INCOMPLETE = "\ufffd"  # what a decoder puts where bytes of a character are still missing


class Detokenizer:
    """The text of one request.

    ids    | prompt's last few | generated .................. |
                 ^ prefix          ^ sent up to here    ^ ids whose text is not yet a whole character
    text   ... sent | held back: it may be the start of a stop string |

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
        """stop, include_stop, min_tokens: as the sampling parameters. notes_offsets: whether to fill `offsets`.
        num_before: characters of the text that stand before what these tokens give."""
        self._decode = decode
        self._ids = list(prompt_ids[-CONTEXT:])
        self._prefix = 0
        self._read = len(self._ids)
        self._prefix_text: str | None = None  # of the ids from `prefix` to `read`, once it is asked for
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self._notes_offsets = record_offsets
        self.num_tokens = 0
        self.num_chars = prefix_chars  # certain so far, held back or not
        self.offsets: list[int] = []  # where each token's text begins, or the character that it is a part of
        self.met: str | None = None  # the stop string that is complete

    @property
    def watches(self) -> bool:
        """Whether a stop string may end the output, so that tokens should not wait to be pushed."""
        return bool(self._stop)

    @property
    def stopped(self) -> bool:
        return self.met is not None

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens made certain: the same whether they come one by one or at once. Sets `met` where a
        stop string is complete; `num_tokens` then tells with which of them."""
        if not self._stop and not self._notes_offsets:
            return self._read_on(tokens)
        text = ""
        for token in tokens:
            text += self._release(self._note(token) if self._notes_offsets else self._read_on((token,)))
            if self.stopped:
                break
        return text

    def flush(self) -> str:
        """What is left at the end: held back text, but not the bytes that have not become a character."""
        text = ""
        if self._read < len(self._ids):
            text = self._advance(self._decode(self._ids[self._prefix :]), len(self._ids)).rstrip(INCOMPLETE)
            self.num_chars += len(text)
        released = self._release(text)
        held, self._held = self._held, ""
        return released if self.stopped else released + held

    def _read_on(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, up to the last of them after which no character is cut."""
        assert not self.stopped
        self.num_tokens += len(tokens)
        self._ids += tokens
        for end in range(len(self._ids), len(self._ids) - len(tokens), -1):
            if end - self._read > TAIL:  # or a long run of what never becomes a character would be decoded each time
                tail = self._decode(self._ids[end - TAIL : end])
                if not tail or tail.endswith(INCOMPLETE):
                    continue
            text = self._decode(self._ids[self._prefix : end])
            if not text.endswith(INCOMPLETE):
                new = self._advance(text, end)
                self.num_chars += len(new)
                return new
        return ""

    def _note(self, token: int) -> str:
        """As `_read_on`, and where the token's own text begins."""
        before, uncertain = self.num_chars, self._uncertain()
        new = self._read_on((token,))
        same = commonprefix([uncertain, new]) if new else uncertain.rstrip(INCOMPLETE)  # noqa: RUF071  of characters
        self.offsets.append(before + len(same))
        return new

    def _uncertain(self) -> str:
        """What the tokens look like after which a character is cut: an incomplete character, or bytes of none."""
        if not 0 < len(self._ids) - self._read <= TAIL:
            return ""
        return self._decode(self._ids[self._prefix :])[len(self._decode(self._ids[self._prefix : self._read])) :]

    def _advance(self, text: str, end: int) -> str:
        """What of `text`, that of all ids from `prefix` to `end`, is new."""
        if self._prefix_text is None:
            self._prefix_text = self._decode(self._ids[self._prefix : self._read])
        new = text[len(self._prefix_text) :]
        self._prefix, self._read, self._prefix_text = self._read, end, None
        return new

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        if self.num_tokens > self._min_tokens and (end := self._find_stop(text)) is not None:
            self._held = ""
            return text[:end]
        keep = self._could_begin_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _find_stop(self, text: str) -> int | None:
        """Where the output ends: at the stop string that begins first."""
        found = [(text.find(stop), len(stop), stop) for stop in self._stop if stop in text]
        if not found:
            return None
        start, length, self.met = min(found)
        return start + length if self._include_stop else start

    def _could_begin_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(len(stop) for stop in self._stop) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
