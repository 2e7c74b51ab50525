"""Errors: a request fails with a RequestError, a model fails to load with a ConfigError.

A message names the field or option, its value and the limit.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable
from enum import Enum
from typing import Any

SHOWN_CHARS = 80  # maximum characters of a name or a value in a message
ASLEEP = "the model is asleep; wake it with `paged wake`"
LORA_NOT_ENABLED = "LoRA feature is not enabled."  # the text of Triton's vLLM backend, without an error class
SEVERAL_LABELS = "labels; scores need a model with one"  # follows a number
GENERATES_NO_TEXT = "this model classifies prompts and generates no text"
ONLY_EMBEDS = "this model embeds prompts and generates no text"


class ConfigError(ValueError):
    """An engine option, or a file that it names, cannot be used."""


class ErrorCode(Enum):
    """The stable error classes, named like gRPC status codes. An error text starts with one of them."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"  # timeout of the request
    INTERNAL = "INTERNAL"


_OUTCOMES = {
    ErrorCode.CANCELLED: "cancelled",
    ErrorCode.DEADLINE_EXCEEDED: "timeout",
    ErrorCode.INTERNAL: "error",
}


class RequestError(Exception):
    """Fails one request. `str()` is its class and message, like `INVALID_ARGUMENT: max_tokens=0: must be 1..8192`.

    Args:
        code: the class.
        message: field, value and limit. Lone surrogates, which JSON may contain, are escaped.
        verbatim: leave out the class, for a message that clients of other backends compare as a whole.

    Attributes:
        outcome: the label `reason` of the metric `paged_requests_finished_total`.
    """

    def __init__(self, code: ErrorCode, message: str, *, verbatim: bool = False):
        text = message if verbatim else f"{code.value}: {message}"
        super().__init__(text.encode(errors="backslashreplace").decode())
        self.code = code
        self.verbatim = verbatim
        self.outcome = _OUTCOMES.get(code, "refused")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text, whatever the arguments were that it was made of."""
        return Exception.__new__, (type(self), str(self)), self.__dict__


class TenantLimitReached(RequestError):
    """The tenant has `max_tenant_requests` open requests."""

    def __init__(self, most: int):
        super().__init__(
            ErrorCode.UNAVAILABLE,
            f"{most} requests of this cache_salt are open (max_tenant_requests); retry when one has ended",
        )
        self.outcome = "tenant_full"


class QueueFull(RequestError):
    """The waiting queue holds `max_queue_size` requests."""

    def __init__(self, waiting: int):
        super().__init__(
            ErrorCode.UNAVAILABLE, f"the waiting queue is full: {waiting} requests wait (max_queue_size); retry later"
        )
        self.outcome = "queue_full"


class ModelAsleep(RequestError):
    """The model does not serve requests because of `paged sleep`."""

    def __init__(self, problem: str):
        super().__init__(ErrorCode.UNAVAILABLE, problem)


class CannotContinue(RequestError):
    """This engine would continue a request of another engine differently."""

    def __init__(self, problem: str):
        super().__init__(ErrorCode.UNAVAILABLE, problem)


def internal_error(error: Exception) -> RequestError:
    """Return the RequestError for an unexpected exception."""
    return RequestError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")


def invalid_argument(field_name: str, value: Any, limit: str) -> RequestError:
    """Return the RequestError for an invalid value. Long names and values are cut."""
    return RequestError(ErrorCode.INVALID_ARGUMENT, f"{cut(field_name)}={cut(_format(value))}: {limit}")


def _format(value: Any) -> str:
    """Return the value as JSON, or its type if JSON cannot represent it."""
    try:
        return json.dumps(value[:SHOWN_CHARS] if isinstance(value, str) else value, default=str)
    except (ValueError, RecursionError):  # integer with too many digits, or nesting too deep
        return f"({type(value).__name__})"


def cut(text: str) -> str:
    """Return a name or a value as an error message shows it."""
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def closest_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, if any. Only its first characters are compared, which is fast."""
    return next(iter(difflib.get_close_matches(name[:SHOWN_CHARS], known, 1, cutoff)), None)


def hint(name: str, known: Collection[str], others: Collection[str] = ()) -> str:
    """Return the known name that is close to an unknown name, or else all known names. others: also known, but not
    listed."""
    near = closest_match(name, [*known, *others])
    return f"did you mean {near}?" if near else f"known are {', '.join(known)}"


def is_utf8_text(value: Any) -> bool:
    """Return whether the value is a string that UTF-8 can encode. Strings from JSON may contain lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()  # takes a few milliseconds per megabyte
    except UnicodeEncodeError:
        return False
    return True
