"""Limits the prompt tokens of a step, so that sequences that decode do not wait long for their next token.

The time of a step depends on the machine, on what else runs there, and on the lengths of the contexts. It is therefore
observed, not computed: a step that took too long makes the next chunk smaller in proportion, one that had time left
makes it larger. Where decoding alone takes more than half of the target time, prefill gets as much time as decode, so
that prompts are not starved.
"""

from __future__ import annotations

MIN_TOKENS = 32  # prompt tokens per step at least: even this few read all of the model's weights, as a decode step does
MAX_CHANGE = 2.0  # factor between the sizes of two successive chunks at most


class PrefillBudget:
    """The number of prompt tokens in a step beside sequences that decode."""

    def __init__(self, step_seconds: float, seconds_per_token: float, max_tokens: int):
        """step_seconds: target time of a step. seconds_per_token: to begin with. max_tokens: of any step."""
        self._step_seconds = step_seconds
        self._max_tokens = max_tokens
        self._min_tokens = min(MIN_TOKENS, max_tokens)
        self._decode_seconds = 0.0  # time of the last step without prompt tokens
        self.tokens = self._clamp(step_seconds / seconds_per_token)

    def record_step(self, prefill_tokens: int, seconds: float) -> None:
        """Adjust the budget to the time of a step in which sequences decoded beside so many prompt tokens."""
        if prefill_tokens == 0:
            self._decode_seconds = seconds
            return
        target = max(self._step_seconds, 2 * self._decode_seconds)
        change = min(MAX_CHANGE, max(1 / MAX_CHANGE, target / max(seconds, 1e-9)))
        # A smaller chunk, the end of a prompt, does not show that a larger one would fit.
        if change < 1 or prefill_tokens == self.tokens:
            self.tokens = self._clamp(self.tokens * change)

    def _clamp(self, tokens: float) -> int:
        return int(min(self._max_tokens, max(self._min_tokens, tokens)))
