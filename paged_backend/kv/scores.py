"""Prompt log probabilities of the tokens of a cached block, so that later requests need not compute them again.

They are kept with blocks only if the engine computes the same logits for the same tokens in every batch. The first
token of a block is scored from the logits of the position before the block:

    position of the logits     3    4    5    6   |  7    8 ...
    token that they score      4    5    6    7   |  8    9 ...
                            |<---- block 1 ---->|
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from paged_backend.api.request import FINGERPRINT_BYTES, Fingerprint, Logprobs, TokenLogprob


class BlockScores:
    """The log probabilities of the tokens of a block, and the fingerprints of the logits that they come from.

    Takes 12 bytes for each entry of a token, and 16 for its fingerprint.
    """

    __slots__ = ("_counts", "_fingerprints", "_log_probs", "_ranks", "_tokens", "num_top")

    def __init__(self, num_top: int, logprobs: Sequence[Logprobs], fingerprints: Sequence[Fingerprint] = ()):
        """num_top: top tokens of each entry of `logprobs`. fingerprints: as many as `logprobs`, or none."""
        assert not fingerprints or len(fingerprints) == len(logprobs)
        entries = [entry for one in logprobs for entry in one]
        self.num_top = num_top
        self._counts = array("H", map(len, logprobs))
        self._tokens = array("i", [entry.token for entry in entries])
        self._log_probs = array("f", [entry.logprob for entry in entries])  # they were computed in float32
        self._ranks = array("i", [entry.rank for entry in entries])
        self._fingerprints = b"".join(fingerprints)

    def covers(self, num_top: int, *, fingerprints: bool) -> bool:
        """Return whether a request with this many top tokens, and maybe with a digest, finds all that it needs."""
        return num_top <= self.num_top and bool(self._fingerprints or not fingerprints)

    def logprobs(self, num_top: int) -> list[Logprobs]:
        """Return the log probabilities with at most this many top tokens."""
        entries = map(TokenLogprob, self._tokens, self._log_probs, self._ranks)
        return [_with_top([next(entries) for _ in range(count)], num_top) for count in self._counts]

    @property
    def fingerprints(self) -> list[Fingerprint]:
        data = self._fingerprints
        return [data[start : start + FINGERPRINT_BYTES] for start in range(0, len(data), FINGERPRINT_BYTES)]

    def merged(self, other: BlockScores | None) -> BlockScores:
        """Return scores that cover what either of the two covers."""
        if other is None or self.covers(other.num_top, fingerprints=bool(other._fingerprints)):
            return self
        most = max(self, other, key=lambda one: one.num_top)
        return BlockScores(most.num_top, most.logprobs(most.num_top), self.fingerprints or other.fingerprints)


def _with_top(entries: Sequence[TokenLogprob], num_top: int) -> Logprobs:
    """Return the entries of a token with fewer top tokens. Tokens of the same rank are in the order of their ids."""
    chosen, *others = entries
    if len(others) < num_top:
        return tuple(entries)
    best = sorted(entries, key=lambda entry: (entry.rank, entry.token))[:num_top]
    return chosen, *_without(best, chosen.token)


def _without(entries: Iterable[TokenLogprob], token: int) -> Iterable[TokenLogprob]:
    return (entry for entry in entries if entry.token != token)
