"""How a field of a dataclass is an engine option: what it must be, and what it does, stand with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any

Check = Callable[[Any], str | None]  # None, or what the value must be


def option(check: Check, help: str, default: Any = MISSING, *, optional: bool = False) -> Any:
    return field(default=default, metadata={"check": check, "help": help, "optional": optional})


def whole(low: int, high: int | None = None) -> Check:
    limit = f"must be a whole number of at least {low}" if high is None else f"must be a whole number {low}..{high}"

    def check(value: Any) -> str | None:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return None if is_whole and value >= low and (high is None or value <= high) else limit

    return check
