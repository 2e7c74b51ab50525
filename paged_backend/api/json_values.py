"""Reads values that clients and operators write: JSON without repeated keys, and numbers and flags that are strings.

Triton's request parameters and model directories often have "true", "2" or "0.5". The functions for them return any
other value unchanged, for the caller to reject.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from paged_backend.api.errors import cut

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def parse(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if it is invalid, has a key twice, or is nested too deep.

    Python's parser would take the last value of a key that is there twice, and a proxy that checks a request may take
    the first.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        counts = Counter(name for name, _ in pairs)  # linear time, even for thousands of names
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the key {cut(json.dumps(twice))} is there twice")
    return unique


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
