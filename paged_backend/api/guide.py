"""The interface of a guide, which restricts the tokens of one output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class GuideError(Exception):
    """The guide allows no token, or failed to compute the allowed tokens. The message gives the reason and the
    parameter."""


class Guide(Protocol):
    """Computes which tokens may come next in one output. Used by the engine thread only, once the request is queued.

    The mask of the first token is computed before that, so that `fill` takes no time."""

    num_words: int

    @property
    def seen(self) -> int:
        """The number of output tokens consumed so far."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Consume the next output tokens, and compute which tokens may follow. `fill` reports errors."""

    def fill(self, words: np.ndarray) -> None:  # [num_words] int32
        """Set the bits of exactly the tokens that may come next. Raises GuideError, also for errors of `advance`."""
