"""The thinking budget: a limit of the reasoning in each output of a request.

Reasoning is between a begin mark and an end mark, which are sequences of tokens. When it has used the budget, the rest
of the end mark is forced. What is forced follows from the tokens alone. Preemption, draft tokens and a move to another
server do not change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Reasoning(NamedTuple):
    """The reasoning in the first tokens of a prompt and its output."""

    length: int  # number of these tokens
    is_open: bool = False  # whether they end inside reasoning
    used: int = 0  # tokens that count: without marks, but with the beginning of an end mark
    matched: int = 0  # how many tokens of the next mark they end with


class ThinkingBudget(NamedTuple):
    """How many tokens of reasoning an output may have, and the marks around reasoning."""

    limit: int
    begin: tuple[int, ...]
    end: tuple[int, ...]

    def after_prompt(self, prompt: Sequence[int]) -> Reasoning:
        """Return the reasoning at the end of a prompt. Only reasoning that is still open there counts."""
        size, tokens = len(self.begin), tuple(prompt)
        most = len(tokens) - size
        last = (start for start in range(most, -1, -1) if tokens[start : start + size] == self.begin)
        start = next(last, max(0, most + 1))
        state = self.follow(Reasoning(start), tokens[start:])
        return state if state.is_open else state._replace(used=0)

    def follow(self, state: Reasoning, tokens: Iterable[int]) -> Reasoning:
        """Return the reasoning after more tokens. It ends before a placeholder, unless that token is forced."""
        length, is_open, used, matched = state
        for token in tokens:
            if token < 0:
                forced = self.forced_token(Reasoning(length, is_open, used, matched))
                if forced is None:
                    break
                token = forced
            mark = self.end if is_open else self.begin
            length += 1
            used += is_open
            if not matched and token != mark[0]:
                continue
            matched = _matched(mark, matched, token)
            if matched == len(mark):
                used -= matched if is_open else 0
                is_open, matched = not is_open, 0
        return Reasoning(length, is_open, used, matched)

    def forced_token(self, state: Reasoning) -> int | None:
        """Return the next token if it is forced."""
        return self.end[state.matched] if state.is_open and state.used >= self.limit else None

    def opening_token(self, state: Reasoning) -> int | None:
        """Return the next token that would begin reasoning without any budget left, after which the end is forced."""
        opens = not state.is_open and state.matched == len(self.begin) - 1
        return self.begin[-1] if opens and state.used >= self.limit else None

    def unforced(self, state: Reasoning) -> int:
        """Return how many tokens may follow before any can be forced. Negative: the next token is forced."""
        return self.limit - state.used - 1


def _matched(mark: tuple[int, ...], matched: int, token: int) -> int:
    """Return how many tokens of a mark are matched after one more token."""
    seen = (*mark[:matched], token)
    return next(size for size in range(len(seen), -1, -1) if seen[len(seen) - size :] == mark[:size])
