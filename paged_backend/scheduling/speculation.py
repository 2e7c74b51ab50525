"""Speculative decoding (arXiv:2211.17192): draft tokens that the model verifies in one step.

A sequence with k draft tokens computes a chunk of its last token and the drafts, and samples at every position:

    computed        ... t | g1  g2  g3 |        keys and values of t and of the draft tokens
    sampled               d1  d2  d3  d4        d1 after t, d2 after g1 ...
    accepted              d1  d2                g1 = d1, but g2 is not d2, so d3 and d4 are dropped

Each position samples with its own random number, whether or not its draft token is accepted. The output is therefore
the same as with one token at a time, greedy or sampled, and no token is rejected at random.
"""

from __future__ import annotations

from collections.abc import Callable

from paged_backend.kv.sequence import Sequence

Proposer = Callable[[Sequence, int], list[int]]  # (sequence, limit) -> at most `limit` draft tokens


class PromptLookup:
    """Proposes the tokens that followed the previous occurrence of the sequence's latest tokens (prompt lookup
    decoding; Saxena, 2023). Needs no draft model. Useful if the output repeats the input, as in summaries, code and
    retrieval.
    """

    def __init__(self, *, shortest: int, longest: int):
        """shortest, longest: how many of the latest tokens to look up; the longest match is used."""
        assert 1 <= shortest <= longest
        self._lengths = range(longest, shortest - 1, -1)

    def __call__(self, sequence: Sequence, limit: int) -> list[int]:
        tokens, history = sequence.tokens, sequence.history
        width = history.itemsize
        history.extend(tokens[len(history) :])
        searched = history.tobytes()
        for length in self._lengths:
            start = _find_last(searched, searched[-length * width :], width) if length < len(tokens) else None
            if start is not None:
                following = start + length
                period = len(tokens) - following  # assumes that the repeated text continues
                return [tokens[following + index % period] for index in range(limit)]
        return []


def propose_placeholders(sequence: Sequence, limit: int) -> list[int]:
    """Return placeholders for draft tokens that a draft model makes on the device, in the step that verifies them.

    Empty for requests with penalties or bad words of several tokens, which depend on the preceding tokens. With a
    thinking budget, so few that none of them decides whether a token is forced.
    """
    request = sequence.request
    if request.depends_on_output:
        return []
    if request.thinking:
        limit = min(limit, request.thinking.unforced(sequence.reasoning(len(sequence.tokens))))
    return [0] * limit


def _find_last(searched: bytes, pattern: bytes, width: int) -> int | None:
    """Return where the pattern last occurs before its end, in elements of `width` bytes, or None."""
    end = len(searched) - 1
    while (start := searched.rfind(pattern, 0, end)) >= 0:
        if start % width == 0:
            return start // width
        end = start + len(pattern) - 1
    return None
