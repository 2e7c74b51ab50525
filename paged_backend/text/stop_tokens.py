"""Tokens that end an output: single stop tokens, which the engine checks, and stop words of several tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paged_backend.api.sampling_params import SamplingParams

Word = list[int]


@dataclass(frozen=True, eq=False)
class StopTokens:
    """The stop tokens and stop words of one request."""

    ids: frozenset[int] = frozenset()  # stop tokens; exclude the end of sequence unless `ignore_eos` is set
    words: Mapping[int, Sequence[Word]] = field(default_factory=dict)  # stop words by their last token
    min_tokens: int = 0  # minimum tokens before a word can end the output

    @classmethod
    def of(cls, sampling: SamplingParams, eos: frozenset[int]) -> StopTokens:
        """Return the stop tokens and stop words of the sampling parameters. eos: the model's end-of-sequence tokens."""
        words: dict[int, list[Word]] = {}
        for word in sampling.stop_words_token_ids:
            words.setdefault(word[-1], []).append(list(word))
        ids = sampling.stop_token_ids
        return cls(ids if sampling.ignore_eos else ids - eos, words, sampling.min_tokens)

    def find(self, before: Sequence[int], new: Sequence[int]) -> tuple[int, Word] | None:
        """Find the first stop word that ends within `new`, the tokens after `before`.

        Returns the number of new tokens up to its end, and the word.
        """
        for count, token in enumerate(new, 1):
            for word in self.words.get(token, ()) if len(before) + count > self.min_tokens else ():
                if _ends_with(before, new[:count], word):
                    return count, word
        return None

    def reason(self, token: int) -> str | None:
        """Return the stop reason of an output that the engine ended with this token; None for the end of sequence."""
        return str(token) if token in self.ids else None


def _ends_with(before: Sequence[int], new: Sequence[int], word: Word) -> bool:
    missing = max(0, len(word) - len(new))
    tail = [*before[len(before) - missing :], *new[-len(word) :]] if missing <= len(before) else []
    return tail == word


def stop_word_reason(word: Word) -> str:
    """Return the stop reason of an output that a stop word ended."""
    return json.dumps(word)
