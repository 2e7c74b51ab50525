"""How a request fails: a class that stays the same, and what was wrong with which field."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any


class ErrorCode(Enum):
    """The stable classes that an error text starts with; the values are gRPC's names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"  # the request's own time limit
    INTERNAL = "INTERNAL"


class RequestError(Exception):
    """Ends one request. `str()` tells its class and what is wrong: `INVALID_ARGUMENT: max_tokens=0: must be 1..8192`.
    What of it UTF-8 cannot carry is written out: a parameter's name, which comes from JSON, may hold halves of
    characters. A message that clients of other backends compare as a whole is `verbatim`, without a class."""

    def __init__(self, code: ErrorCode, message: str, *, verbatim: bool = False):
        text = message if verbatim else f"{code.value}: {message}"
        super().__init__(text.encode(errors="backslashreplace").decode())
        self.code = code
        self.verbatim = verbatim


class QueueFull(RequestError):
    """As many requests wait as may."""

    def __init__(self, waiting: int):
        super().__init__(
            ErrorCode.UNAVAILABLE, f"{waiting} requests wait, which is max_queue_size; send it again later"
        )


def invalid(field_name: str, value: Any, limit: str) -> RequestError:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return RequestError(ErrorCode.INVALID_ARGUMENT, f"{field_name}={shown}: {limit}")


def is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can carry: JSON may hold halves of characters (lone surrogates)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()  # megabytes in milliseconds
    except UnicodeEncodeError:
        return False
    return True
