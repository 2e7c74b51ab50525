"""Guesses of the tokens to come, which the model checks in one step (speculative decoding, arXiv:2211.17192).

A check is a chunk of the last token and k guesses that draws at every position:

    computed        ... t | g1  g2  g3 |        keys and values of t and of the guesses
    drawn                 d1  d2  d3  d4        d1 after t, d2 after g1 ...
    reached               d1  d2                g1 = d1, but g2 is not d2: what follows from g2 is nobody's

Each position draws with its own random number, guessed right or not. So the tokens are those that one at a time would
give, greedy or sampled, and there is nothing to reject by chance.
"""

from __future__ import annotations

from collections.abc import Callable

from paged_backend.scheduling.sequence import Sequence

Proposer = Callable[[Sequence, int], list[int]]  # (sequence, how many at most) -> the tokens that may follow its last


class PromptLookup:
    """What followed the last time that the sequence's latest tokens occurred in it (prompt lookup decoding; Saxena,
    2023). Costs no model, and pays where output repeats input: summaries, code, retrieval."""

    def __init__(self, *, shortest: int, longest: int):
        """How many of the latest tokens must occur; the longest run that does is taken."""
        assert 1 <= shortest <= longest
        self._lengths = range(longest, shortest - 1, -1)

    def __call__(self, sequence: Sequence, most: int) -> list[int]:
        tokens, history = sequence.tokens, sequence.history
        width = history.itemsize
        history.extend(tokens[len(history) :])
        searched = history.tobytes()
        for length in self._lengths:
            start = _last(searched, searched[-length * width :], width) if length < len(tokens) else None
            if start is not None:
                follows = start + length
                period = len(tokens) - follows  # what repeats may go on repeating
                return [tokens[follows + index % period] for index in range(most)]
        return []


def propose_placeholders(sequence: Sequence, most: int) -> list[int]:
    """Guesses that a model makes on the device, in the step that checks them: nobody needs their values here. None
    where a penalty would have to count them, or a bad word may end with the token after."""
    return [] if sequence.request.depends_on_output else [0] * most


def _last(searched: bytes, pattern: bytes, width: int) -> int | None:
    """Where the pattern last occurred before its end, in elements of `width` bytes."""
    end = len(searched) - 1
    while (start := searched.rfind(pattern, 0, end)) >= 0:
        if start % width == 0:
            return start // width
        end = start + len(pattern) - 1
    return None
