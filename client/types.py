"""What the clients return and raise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_ERROR_CLASS = re.compile(r"\s*([A-Z][A-Z_]+): *(.*)", re.DOTALL)


@dataclass(frozen=True)
class Delta:
    """One streamed piece of one sample. A piece may hold several tokens, or none that are printable yet."""

    text: str
    num_output_tokens: int  # of this piece
    finish_reason: str | None  # "stop", "length" or "timeout" on the sample's last piece, None before
    index: int = 0  # of the sample, for n > 1


@dataclass(frozen=True)
class Completion:
    """A whole answer. `finish_reason` is "stop", "length", "timeout", or "cancelled" where the caller ended it."""

    text: str
    finish_reason: str
    num_input_tokens: int  # of the prompt; 0 where it was cancelled before the first piece came
    num_output_tokens: int
    others: tuple[Completion, ...] = ()  # the samples after the first, for n > 1
    # What the whole request took: tokens found in the cache, blocks, seconds queued, in the prompt and after it.
    receipt: Mapping[str, float] | None = field(default=None, compare=False)


class PagedError(Exception):
    """A request that failed. `code` is the stable class, `message` the reason without it.

    The server's own classes are INVALID_ARGUMENT, UNAVAILABLE, CANCELLED and INTERNAL. The transport adds
    DEADLINE_EXCEEDED (the `timeout` ran out), UNAVAILABLE (no server, or it went away), NOT_FOUND (no such
    model) and whatever else gRPC has a name for. UNKNOWN: the server gave a message and no class.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @classmethod
    def parse(cls, text: str, code: str = "UNKNOWN") -> PagedError:
        """Split "CLASS: message"; text that names no class gets `code`."""
        match = _ERROR_CLASS.fullmatch(text)
        return cls(match[1], match[2]) if match else cls(code, text.strip())
