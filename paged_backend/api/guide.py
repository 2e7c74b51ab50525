"""The interface of a guide: which tokens may come next in one output, and what to raise where none may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class GuideError(Exception):
    """No token can follow, or the guide cannot tell which; the message says why, and names the parameter."""


class Guide(Protocol):
    """What may follow in one output. Used by the engine's thread alone, once its request is queued."""

    num_words: int
    seen: int  # tokens of the output that it has been told

    def advance(self, tokens: Sequence[int]) -> None:
        """Those that follow. Raises GuideError."""

    def fill(self, words: np.ndarray) -> None:  # [num_words] int32
        """Set the bits of the tokens that may come next, and no others. Raises GuideError."""
