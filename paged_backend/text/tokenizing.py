"""From a prompt's text to its tokens, and from tokens to their text.

What the library panics of is no Exception, and would end the thread that meets it: here it becomes one.

The library works outside of Python's lock, so that no step and no answer waits for it; but it cannot be ended, either.
Long texts are therefore tokenized on a thread of their own, and who waits for one does so for a limited time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paged_backend.api.errors import ErrorCode, RequestError

LONG_CHARS = 1 << 16  # from which on a text is a long one: a tenth of a second at the most


class DecodeError(Exception):
    """Tokens that the tokenizer makes no text of."""


def decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """From token ids to their text. It raises DecodeError, whatever the library does."""
    kind = type(tokenizer)
    own = (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode)
    if isinstance(tokenizer, PreTrainedTokenizerFast) and (kind.decode, kind._decode) == own:
        # All that those two come to, in a fifth of the time.
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
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
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
        except FutureTimeout:
            self._late = thread
            reason = f"tokenizing its {len(text)} characters takes more than {self._seconds:g} s (tokenize_timeout)"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{field}: {reason}") from None

    def _work(self, done: Future[list[int]], field: str, text: str, special: bool) -> None:
        try:
            done.set_result(self.encode(field, text, special=special))
        except RequestError as error:
            done.set_exception(error)
