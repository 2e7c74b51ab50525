"""Limits the prompt tokens of a step, so that sequences that decode do not wait long for their next token.

The time of a step depends on the machine, on what else runs there, and on the lengths of the contexts. It is therefore
measured, not computed: the next chunk is reduced in proportion if a step took too long, and enlarged if it took less
than the target time. If decode alone takes a large part of the target time, the target is a multiple of it, so that
prompts are not starved. While prompts arrive without a pause, a step without prompt tokens measures decode from time to
time, because more and more sequences decode.
"""

from __future__ import annotations

MIN_TOKENS = 32  # minimum prompt tokens per step; fewer save little, as every step reads all weights
DECODE_RATIO = 2.0  # minimum target, in units of the time of a step without prompt tokens
MAX_CHANGE = 2.0  # maximum factor between the sizes of two successive chunks
MAX_PREFILL_STEPS = 16  # consecutive steps with prompt tokens, after which a step without any measures decode


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
        min_tokens: prompt tokens that a step may always have. decode_ratio: as `DECODE_RATIO`."""
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
