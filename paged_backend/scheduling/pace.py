"""How much of the prompts goes into a step, so that those being answered do not wait long for their next token.

A step's time depends on the machine, on what else runs there, and on how long the contexts have become, so it is not
computed but observed: a step that took too long makes the next chunk smaller in proportion, one that had time left
makes it larger. Where decoding by itself takes more than half of the time that a step should take, prompts get as much
as decoding does: to starve them would help nobody.
"""

from __future__ import annotations

LEAST = 32  # tokens of prompts in a step, however slow: they read all of the model's weights, as a decode step does
AT_ONCE = 2.0  # how much larger or smaller a chunk is than the one before, at the most


class Pace:
    """Tokens of prompts in a step beside sequences that decode."""

    def __init__(self, seconds: float, seconds_per_token: float, most: int):
        """seconds: that a step should take. seconds_per_token: to begin with. most: tokens of any step."""
        self._seconds = seconds
        self._most = most
        self._least = min(LEAST, most)
        self._decoding = 0.0  # seconds of the last step without prompts
        self.tokens = self._within(seconds / seconds_per_token)

    def took(self, tokens: int, seconds: float) -> None:
        """A step in which sequences decode took so long, with so many tokens of prompts in it."""
        if tokens == 0:
            self._decoding = seconds
            return
        aim = max(self._seconds, 2 * self._decoding)
        change = min(AT_ONCE, max(1 / AT_ONCE, aim / max(seconds, 1e-9)))
        if change < 1 or tokens == self.tokens:  # fewer tokens, the end of a prompt, say nothing of more
            self.tokens = self._within(self.tokens * change)

    def _within(self, tokens: float) -> int:
        return int(min(self._most, max(self._least, tokens)))
