"""Sizes with a unit, such as `2GiB`, and counts like vLLM's `32k`.

Units of sizes: `kB`, `MB`, `GB` and `TB` are powers of 1000, in any case; `KiB`, `MiB`, `GiB` and `TiB` are powers of
1024. A letter alone is read like in vLLM: `k`, `m`, `g` and `t` are powers of 1000, `K`, `M`, `G` and `T` of 1024.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from paged_backend.api.options import Check, parse_string

MIB, GIB = 1 << 20, 1 << 30
_LETTERS = "kmgt"
_COUNTS = {letter: 1000**power for power, letter in enumerate(_LETTERS, 1)}
_COUNTS |= {letter.upper(): 1024**power for power, letter in enumerate(_LETTERS, 1)}
_BYTES = {"b": 1} | {f"{letter}b": 1000**power for power, letter in enumerate(_LETTERS, 1)}
_BYTES |= {f"{letter}ib": 1024**power for power, letter in enumerate(_LETTERS, 1)}
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]+)")
_EXAMPLES = {True: '"500MB" or "2GiB"', False: '"8k"'}


def parse_quantity(text: str, *, bytes: bool = True) -> Fraction | None:
    """Return the number that a text with a unit stands for, None without a valid unit.

    Args:
        text: a number and a unit.
        bytes: whether it is a size, for which units of bytes are valid as well.
    """
    match = _NUMBER.fullmatch(text.strip())
    if not match:
        return None
    number, unit = match.groups()
    factor = _COUNTS.get(unit) or (_BYTES.get(unit.lower()) if bytes else None)
    return Fraction(number) * factor if factor else None


@dataclass(frozen=True)
class Quantity:
    """The check of an option whose value may be a text with a unit.

    Args:
        check: check of the option's value as a number.
        unit: bytes in one unit of the option; None for an option that is a count.
        whole: whether the number is rounded down to an integer.
    """

    check: Check
    unit: int | None
    whole: bool = True

    def __call__(self, value: Any) -> str | None:
        problem = self.check(value)
        return problem and f"{problem}, or with a unit like {_EXAMPLES[self.unit is not None]}"

    def parse(self, value: Any) -> Any:
        """Return the number of units that a value stands for, or the value itself if that would be rejected."""
        if not isinstance(value, str):
            return value
        quantity = parse_quantity(value, bytes=self.unit is not None)
        if quantity is None:
            return parse_string(value)
        units = quantity / (self.unit or 1)
        number = int(units) if self.whole else float(units)
        return number if self.check(number) is None else value


def in_bytes(check: Check) -> Quantity:
    return Quantity(check, 1)


def in_mib(check: Check) -> Quantity:
    return Quantity(check, MIB)


def in_gib(check: Check) -> Quantity:
    return Quantity(check, GIB, whole=False)


def count(check: Check) -> Quantity:
    return Quantity(check, None)
