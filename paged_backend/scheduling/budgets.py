"""Limits of a step: its prompt tokens, and the time for the masks of structured outputs.

The number of prompt tokens is limited to keep decoding sequences from waiting long for their next token. The time of a
step depends on the machine, on what else runs there, and on the lengths of the contexts. It is therefore measured, not
computed: the next chunk is reduced in proportion if a step took too long, and enlarged if it took less than the target
time. If decode alone takes a large part of the target time, the target is a multiple of it, which keeps prompts from
starving. While prompts arrive without a pause, a step without prompt tokens measures decode from time to time, because
more and more sequences decode.

A mask costs microseconds in ordinary grammars, and tens of milliseconds in the worst. All masks of a step are computed
before it, so without a limit a few expensive ones would delay every request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from paged_backend.kv.sequence import Sequence
from paged_backend.scheduling.group import Group

MIN_TOKENS = 32  # minimum prompt tokens per step; fewer save little, as every step reads all weights
DECODE_RATIO = 2.0  # minimum target, in units of the time of a step without prompt tokens
MAX_CHANGE = 2.0  # maximum factor between the sizes of two successive chunks
MAX_PREFILL_STEPS = 16  # consecutive steps with prompt tokens, after which a step without any measures decode
MASK_SECONDS = 0.01  # five times what the masks of 64 ordinary grammars take
MASK_MEMORY = 0.8  # how much of a sequence's former cost is remembered with each mask


class PrefillBudget:
    """Limits the number of prompt tokens in a step that also decodes."""

    def __init__(
        self,
        step_seconds: float,
        seconds_per_token: float,
        max_tokens: int,
        *,
        min_tokens: int = MIN_TOKENS,
        decode_ratio: float = DECODE_RATIO,
    ):
        """step_seconds: target time of a step. seconds_per_token: initial estimate. max_tokens: limit of any step.
        min_tokens: prompt tokens that a step may always have. decode_ratio: see `DECODE_RATIO`."""
        self._step_seconds = step_seconds
        self._max_tokens = max_tokens
        self._min_tokens = min(min_tokens, max_tokens)
        self._decode_ratio = decode_ratio
        self._decode_seconds = 0.0  # time of the last step without prompt tokens
        self._prefill_steps = 0  # steps since then
        self._tokens = self._clamp(step_seconds / seconds_per_token)

    @property
    def tokens(self) -> int:
        """The maximum number of prompt tokens in the next step that also decodes."""
        return self._tokens if self._prefill_steps < MAX_PREFILL_STEPS else 0

    def record_step(self, prefill_tokens: int, seconds: float) -> None:
        """Adjust the budget to the time of a step that decoded and computed `prefill_tokens` prompt tokens."""
        if prefill_tokens == 0:
            self._decode_seconds, self._prefill_steps = seconds, 0
            return
        self._prefill_steps += 1
        target = max(self._step_seconds, self._decode_ratio * self._decode_seconds)
        change = min(MAX_CHANGE, max(1 / MAX_CHANGE, target / max(seconds, 1e-9)))
        # The last chunk of a prompt may be smaller, which does not show that a larger one would fit.
        if change < 1 or prefill_tokens == self._tokens:
            self._tokens = self._clamp(self._tokens * change)

    def _clamp(self, tokens: float) -> int:
        return int(min(self._max_tokens, max(self._min_tokens, tokens)))


class MaskBudget:
    """Computes the next masks of guided sequences, within a time limit. A sequence without its mask does not take part
    in the step.

    Sequences whose masks were cheap come first, so only the expensive ones wait. These take turns, and at least one
    mask is computed, so all of them make progress.
    """

    def __init__(self, seconds: float = MASK_SECONDS, clock: Callable[[], float] = time.thread_time):
        """seconds: time limit, after which no further mask is begun. clock: returns seconds; by default CPU time,
        because a busy machine does not make grammars more expensive."""
        self._seconds = seconds
        self._clock = clock
        self._left = seconds
        self._turn = 0

    def renew(self) -> None:
        """Allow the full time again."""
        self._left = self._seconds

    def prepare(self, groups: Iterable[Group]) -> None:
        """Compute the masks that these requests need for their next tokens, as far as there is time."""
        sequences = [
            sequence for group in groups if group.request.guides for sequence in group.sequences if sequence.needs_mask
        ]
        self._turn += 1
        for sequence in sorted(sequences, key=self._order(self._seconds / max(1, len(sequences)))):
            if self._left <= 0:
                return
            self._compute(sequence)

    def _order(self, share: float) -> Callable[[Sequence], tuple[int, int, int, float]]:
        """Return the sort key of sequences: those whose masks took at most `share` seconds, then new ones, then the
        others; within each class by priority, then by how long they wait."""

        def key(sequence: Sequence) -> tuple[int, int, int, float]:
            rank = 1 if not sequence.mask_turn else 0 if sequence.mask_seconds <= share else 2
            return rank, sequence.request.sampling.priority, sequence.mask_turn, sequence.mask_seconds

        return key

    def _compute(self, sequence: Sequence) -> None:
        began = self._clock()
        guide = sequence.request.guides[sequence.index]
        guide.advance(sequence.output[guide.seen :])
        seconds = self._clock() - began
        self._left -= seconds
        sequence.mask_seconds = max(seconds, MASK_MEMORY * sequence.mask_seconds)
        sequence.mask_turn = self._turn
