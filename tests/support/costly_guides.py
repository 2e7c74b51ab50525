"""Guides whose masks take a declared time by a clock that only they move."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Clock:
    """Counts the seconds of masks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.computed: list[float] = []  # seconds of each mask so far

    def __call__(self) -> float:
        return self.now


class CostlyGuide:
    """A guide without restrictions, for a scheduler alone: nothing reads its masks."""

    num_words = 1

    def __init__(self, clock: Clock, seconds: float | Callable[[int], float]):
        """seconds: cost of each mask, or a function of the number of tokens before it."""
        self.clock, self.tokens = clock, []
        self._seconds = seconds if callable(seconds) else lambda seen: seconds

    @property
    def seen(self) -> int:
        return len(self.tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        assert tokens and min(tokens) >= 0, "a placeholder token"
        self.tokens += tokens
        self.clock.now += self._seconds(self.seen)
        self.clock.computed.append(self._seconds(self.seen))
