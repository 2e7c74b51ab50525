"""Text to tokens and tokens to text, with the model's tokenizer.

A panic in the tokenizers library is not an `Exception` and would end the calling thread. This module turns it into one.

The library releases the GIL, so tokenizing does not delay steps or responses.

A prompt above SHORT_CHARS is encoded in the background, one above LONG_CHARS in a process of its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paged_backend.api.errors import ErrorCode, RequestError

SHORT_CHARS = 1 << 12  # a text of this length is tokenized, or parsed as JSON, within 10 milliseconds
LONG_CHARS = 1 << 16  # within 0.1 seconds


class DecodeError(Exception):
    """The tokenizer could not decode the tokens."""


def decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return a function from token ids to their text, which raises DecodeError if the library fails."""
    kind = type(tokenizer)
    own = (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode)
    if isinstance(tokenizer, PreTrainedTokenizerFast) and (kind.decode, kind._decode) == own:
        # The same result as `decode`, in a fifth of the time.
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
    """Tokenizes text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer

    def encode(self, field: str, text: str, *, special: bool = False, literal: bool = False) -> list[int]:
        """Return the token ids of the text. Raises RequestError, which names `field`, if the tokenizer fails.

        special: whether the tokenizer adds its special tokens.
        literal: whether the text of a special token is encoded like other text.
        """
        try:
            tokenizer = self._literal_tokenizer if literal else self._tokenizer
            return list(tokenizer.encode(text, add_special_tokens=special))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{field}: the tokenizer fails on it: {reason}") from error

    @functools.cached_property
    def _literal_tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy of the tokenizer, as the setting is part of the tokenizer, which several threads use."""
        made = copy.deepcopy(self._tokenizer)
        made.split_special_tokens = True
        return made
