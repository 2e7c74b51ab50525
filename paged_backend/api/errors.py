"""How a request fails: a class that stays the same, and what was wrong with which field."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from enum import Enum
from typing import Any

SHOWN_CHARS = 80  # of a name or a value in an error


class ErrorCode(Enum):
    """The stable classes that an error text starts with; the values are gRPC's names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"  # the request's own time limit
    INTERNAL = "INTERNAL"


_OUTCOMES = {
    ErrorCode.CANCELLED: "cancelled",
    ErrorCode.DEADLINE_EXCEEDED: "timeout",
    ErrorCode.INTERNAL: "error",
}


class RequestError(Exception):
    """Ends one request. `str()` tells its class and what is wrong: `INVALID_ARGUMENT: max_tokens=0: must be 1..8192`.
    What of it UTF-8 cannot carry is written out: a parameter's name, which comes from JSON, may hold halves of
    characters. A message that clients of other backends compare as a whole is `verbatim`, without a class."""

    def __init__(self, code: ErrorCode, message: str, *, verbatim: bool = False):
        text = message if verbatim else f"{code.value}: {message}"
        super().__init__(text.encode(errors="backslashreplace").decode())
        self.code = code
        self.verbatim = verbatim
        self.outcome = _OUTCOMES.get(code, "refused")  # what the metrics count it as, in mid-answer, too


class TenantLimitReached(RequestError):
    """As many requests of the tenant are open as may."""

    def __init__(self, most: int):
        super().__init__(
            ErrorCode.UNAVAILABLE,
            f"{most} requests of this cache_salt are open, which is max_tenant_requests; send it again when one has"
            " ended",
        )
        self.outcome = "tenant_full"


class QueueFull(RequestError):
    """As many requests wait as may."""

    def __init__(self, waiting: int):
        super().__init__(
            ErrorCode.UNAVAILABLE, f"{waiting} requests wait, which is max_queue_size; send it again later"
        )
        self.outcome = "queue_full"


def internal_error(error: Exception) -> RequestError:
    """Of what nobody expected."""
    return RequestError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")


def invalid_argument(field_name: str, value: Any, limit: str) -> RequestError:
    """Of a name or a value that is long, its beginning."""
    return RequestError(ErrorCode.INVALID_ARGUMENT, f"{_short(field_name)}={_short(_shown(value))}: {limit}")


def _shown(value: Any) -> str:
    """As JSON, as far as it is read."""
    try:
        return json.dumps(value[:SHOWN_CHARS] if isinstance(value, str) else value, default=str)
    except (ValueError, RecursionError):  # a number of too many digits, or brackets in brackets
        return f"({type(value).__name__})"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def closest_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Which of them was meant, if any. What is long was none, and would take long to compare."""
    return next(iter(difflib.get_close_matches(name[:SHOWN_CHARS], known, 1, cutoff)), None)


def is_utf8_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can carry: JSON may hold halves of characters (lone surrogates)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()  # megabytes in milliseconds
    except UnicodeEncodeError:
        return False
    return True
