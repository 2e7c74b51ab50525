"""From a prompt's text to its tokens.

The library works outside of Python's lock, so that no step and no answer waits for it; but it cannot be ended, either.
Long texts are therefore tokenized on a thread of their own, and who waits for one does so for a limited time.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from typing import TYPE_CHECKING

from paged_backend.errors import ErrorCode, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG_CHARS = 1 << 16  # from which on a text is a long one: a tenth of a second at the most


class Tokenizing:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, seconds: float):
        """seconds: that a long text may take."""
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._late: threading.Thread | None = None  # that nobody waits for any more

    def encode(self, field: str, text: str, *, special: bool = False) -> list[int]:
        """special: whether the tokenizer adds its special tokens. Raises RequestError, which names the field, for a
        text that the tokenizer fails on."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special))
        except BaseException as error:  # what the library panics of is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{field}: the tokenizer fails on it: {reason}") from error

    def encode_long(self, field: str, text: str, *, special: bool = False) -> list[int]:
        """As `encode`, for one thread at a time. Raises RequestError as well where it takes too long, and where one
        that did is not over yet: there is never more than one of those."""
        if self._late and self._late.is_alive():
            reason = f"another prompt still is tokenized after tokenize_timeout={self._seconds:g} seconds"
            raise RequestError(ErrorCode.UNAVAILABLE, f"{field}: {reason}; send it again later")
        done: Future[list[int]] = Future()
        thread = threading.Thread(target=self._work, args=(done, field, text, special), name="tokenizer", daemon=True)
        thread.start()
        try:
            return done.result(self._seconds)
        except TookTooLong:
            self._late = thread
            reason = f"tokenizing its {len(text)} characters takes more than {self._seconds:g} s (tokenize_timeout)"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{field}: {reason}") from None

    def _work(self, done: Future[list[int]], field: str, text: str, special: bool) -> None:
        try:
            done.set_result(self.encode(field, text, special=special))
        except RequestError as error:
            done.set_exception(error)
