"""Text to tokens and tokens to text, with the model's tokenizer.

A panic in the tokenizers library is not an `Exception` and would end the calling thread. This module turns it into one.

The library releases the GIL, so tokenizing does not delay steps or responses, but it cannot be interrupted. Long texts
are therefore tokenized on a thread of their own, with a time limit for the caller.

Text above SHORT_CHARS is tokenized in the background, text above LONG_CHARS apart from shorter ones.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paged_backend.api.errors import ErrorCode, RequestError

SHORT_CHARS = 1 << 12  # such a text is tokenized, or such a JSON parsed, within 10 milliseconds
LONG_CHARS = 1 << 16  # within 0.1 seconds


class DecodeError(Exception):
    """The tokenizer could not decode the tokens."""


def decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return a function from token ids to their text, which raises DecodeError if the library fails."""
    kind = type(tokenizer)
    own = (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode)
    if isinstance(tokenizer, PreTrainedTokenizerFast) and (kind.decode, kind._decode) == own:
        # A faster way to the result of `decode`: it takes a fifth of the time.
        decode = functools.partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    else:
        decode = functools.partial(
            tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def text(ids: list[int]) -> str:
        try:
            return decode(ids)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise DecodeError(f"{type(error).__name__}: {error}") from error

    return text


class PromptTokenizer:
    """Tokenizes text, with a time limit for long text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seconds: float):
        """seconds: the time limit of `encode_long`."""
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._overdue: threading.Thread | None = None  # thread that exceeded the time limit
        self._literal: PreTrainedTokenizerBase | None = None  # created when first needed
        self._lock = threading.Lock()  # guards its creation

    def encode(self, field: str, text: str, *, special: bool = False, literal: bool = False) -> list[int]:
        """Return the token ids of the text. Raises RequestError, which names `field`, if the tokenizer fails.

        special: whether the tokenizer adds its special tokens.
        literal: whether the text of a special token is encoded like other text.
        """
        try:
            tokenizer = self._literal_tokenizer() if literal else self._tokenizer
            return list(tokenizer.encode(text, add_special_tokens=special))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{field}: the tokenizer fails on it: {reason}") from error

    def encode_long(self, field: str, text: str, *, special: bool = False, literal: bool = False) -> list[int]:
        """Like `encode`, with a time limit. May be called by one thread at a time.

        Raises RequestError if tokenizing exceeds the time limit, or if an earlier text that exceeded it is still being
        tokenized: at most one thread is ever overdue.
        """
        if self._overdue and self._overdue.is_alive():
            reason = f"another prompt is still being tokenized after tokenize_timeout={self._seconds:g} seconds"
            raise RequestError(ErrorCode.UNAVAILABLE, f"{field}: {reason}; retry later")
        done: Future[list[int]] = Future()
        work = (done, lambda: self.encode(field, text, special=special, literal=literal))
        thread = threading.Thread(target=self._work, args=work, name="tokenizer", daemon=True)
        thread.start()
        try:
            return done.result(self._seconds)
        except FutureTimeout:
            self._overdue = thread
            reason = f"tokenizing its {len(text)} characters takes more than {self._seconds:g} s (tokenize_timeout)"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{field}: {reason}") from None

    def _literal_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return a tokenizer of its own: the setting is part of the tokenizer, which several threads use."""
        with self._lock:
            if self._literal is None:
                self._literal = copy.deepcopy(self._tokenizer)
                self._literal.split_special_tokens = True
            return self._literal

    def _work(self, done: Future[list[int]], encode: Callable[[], list[int]]) -> None:
        try:
            done.set_result(encode())
        except RequestError as error:
            done.set_exception(error)
