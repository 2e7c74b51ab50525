"""Limits the time that a step spends on the masks of structured outputs.

A mask costs microseconds in ordinary grammars, and tens of milliseconds in the worst. All masks of a step are
computed before it, so without a limit a few expensive ones would delay every request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from paged_backend.kv.sequence import Sequence
from paged_backend.scheduling.group import Group

SECONDS = 0.01  # five times what the masks of 64 ordinary grammars take
MEMORY = 0.8  # how much of a sequence's former cost is remembered with each mask


class MaskBudget:
    """Has the guides of sequences compute their next masks, while there is time. A sequence whose mask is not known
    yet does not take part in the step.

    Sequences whose masks were cheap come first, so that only the expensive ones wait. These take turns, and at least
    one mask is computed, so that all of them go on.
    """

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.thread_time):
        """seconds: limit, after which no other mask is begun. clock: returns seconds; by default those of the CPU, so
        that a busy machine does not make grammars look expensive."""
        self._seconds = seconds
        self._clock = clock
        self._left = seconds
        self._turn = 0

    def renew(self) -> None:
        """Allow the full time again."""
        self._left = self._seconds

    def prepare(self, groups: Iterable[Group]) -> None:
        """Compute the masks that these requests need for their next tokens, as far as there is time."""
        sequences = [one for group in groups if group.request.guides for one in group.sequences if one.needs_mask]
        self._turn += 1
        for sequence in sorted(sequences, key=self._order(self._seconds / max(1, len(sequences)))):
            if self._left <= 0:
                return
            self._compute(sequence)

    def _order(self, share: float) -> Callable[[Sequence], tuple[int, int, int, float]]:
        """Return the key that orders sequences: those whose masks took at most `share` seconds, new ones, the others;
        each of these by priority, and then by how long they wait."""

        def key(one: Sequence) -> tuple[int, int, int, float]:
            rank = 1 if not one.mask_turn else 0 if one.mask_seconds <= share else 2
            return rank, one.request.sampling.priority, one.mask_turn, one.mask_seconds

        return key

    def _compute(self, sequence: Sequence) -> None:
        began = self._clock()
        guide = sequence.request.guides[sequence.index]
        guide.advance(sequence.output[guide.seen :])
        seconds = self._clock() - began
        self._left -= seconds
        sequence.mask_seconds = max(seconds, MEMORY * sequence.mask_seconds)
        sequence.mask_turn = self._turn
