"""Reads numbers and flags of requests. They may be strings, as Triton's request parameters often are.

Each function returns a value that is not one unchanged, for the caller to reject.
"""

from __future__ import annotations

from typing import Any

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def to_integer(value: Any) -> Any:
    """Return the integer for a string like "12" or a number like 12.0."""
    if isinstance(value, str) and _is_plain(value):
        try:
            return int(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_number(value: Any) -> Any:
    """Return the number for a string like "0.5"."""
    if isinstance(value, str) and _is_plain(value):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def to_flag(value: Any) -> Any:
    """Return the flag for 0 or 1, or for the string "0", "1", "true" or "false"."""
    return _FLAGS.get(str(value).lower(), value) if isinstance(value, str | int) else value


def _is_plain(text: str) -> bool:
    """Return whether the string has none of the digits that Python accepts and JSON does not, like `1_0`."""
    return text.isascii() and "_" not in text
