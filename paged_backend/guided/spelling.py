"""A model's tokenizer as llguidance takes it, whose tokens always spell the text that was asked for.

By itself the library makes tokens of a text as of a prompt: one that looks like a special token becomes that token, and
one that the tokenizer normalizes becomes another text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llguidance
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

SPECIAL = b"\xff"  # what the library has before the name of a special token, and no text has in it


def llguidance_tokenizer(tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_ids: Sequence[int]) -> Any:
    """vocab_size: with ids that the tokenizer has no token for. Raises whatever the library does where it does not
    know this kind of tokenizer."""
    read = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids), slices=[])
    spelling = llguidance.TokenizerWrapper(_Spelling(tokenizer, read, eos_ids[0]))
    return llguidance.LLTokenizer(spelling, eos_token=list(eos_ids))


class _Spelling:
    """As the library wants a tokenizer, over its own reading of it."""

    bos_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerFast, read: Any, eos_id: int):
        self._read = read
        self.eos_token_id = eos_id
        self.tokens = [_bytes_of(read, one) for one in range(read.vocab_size)]
        for one, added in tokenizer.added_tokens_decoder.items():
            if one < read.vocab_size and not read.is_special_token(one):  # read as if its characters stood for bytes
                self.tokens[one] = added.content.encode()

    def __call__(self, text: bytes) -> list[int]:
        """The tokenizer's own tokens where they are the text, else the longest that are, one after the other."""
        ids: list[int] = self._read.tokenize_bytes(text)
        if b"".join([self.tokens[one] for one in ids]) == text:
            return ids
        return list(self._read.greedy_tokenize(text.decode()))


def _bytes_of(read: Any, token: int) -> bytes:
    text = bytes(read.decode_bytes([token]))
    return SPECIAL + text if read.is_special_token(token) else text
