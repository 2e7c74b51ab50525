"""Wrap a Hugging Face tokenizer for llguidance so that literal text is always encoded literally.

llguidance's own wrapper encodes the texts of a grammar as if they were prompts: a text that looks like a special token
becomes that token, and a text that the tokenizer normalizes becomes a different text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llguidance
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

SPECIAL = b"\xff"  # llguidance's prefix of special token names; it cannot occur in UTF-8 text


def llguidance_tokenizer(tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_ids: Sequence[int]) -> Any:
    """Create the LLTokenizer of a fast tokenizer.

    `vocab_size` includes ids for which the tokenizer has no token. Raises the library's own exceptions for a kind of
    tokenizer that it does not support.
    """
    base = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids), slices=[])
    wrapper = llguidance.TokenizerWrapper(_LiteralTokenizer(tokenizer, base, eos_ids[0]))
    return llguidance.LLTokenizer(wrapper, eos_token=list(eos_ids))


class _LiteralTokenizer:
    """Implements llguidance's tokenizer protocol on top of its own wrapper."""

    bos_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerFast, base: Any, eos_id: int) -> None:
        self._base = base
        self.eos_token_id = eos_id
        self.tokens = [_token_bytes(base, token) for token in range(base.vocab_size)]
        for token, added in tokenizer.added_tokens_decoder.items():
            # The wrapper maps the characters of an added token to bytes as if they were byte-level BPE.
            if token < base.vocab_size and not base.is_special_token(token):
                self.tokens[token] = added.content.encode()

    def __call__(self, text: bytes) -> list[int]:
        """Encode a text with the tokenizer if that round-trips, otherwise greedily with the longest tokens."""
        ids: list[int] = self._base.tokenize_bytes(text)
        if b"".join([self.tokens[token] for token in ids]) == text:
            return ids
        return list(self._base.greedy_tokenize(text.decode()))


def _token_bytes(base: Any, token: int) -> bytes:
    text = bytes(base.decode_bytes([token]))
    return SPECIAL + text if base.is_special_token(token) else text
