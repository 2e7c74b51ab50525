"""Sizes with a unit, such as `2GiB`, and counts like vLLM's `32k`.

Units of sizes: `kB`, `MB`, `GB` and `TB` are powers of 1000, in any case; `KiB`, `MiB`, `GiB` and `TiB` are powers of
1024. A letter alone is read like in vLLM: `k`, `m`, `g` and `t` are powers of 1000, `K`, `M`, `G` and `T` of 1024.
"""

from __future__ import annotations

import re
from fractions import Fraction

MIB, GIB = 1 << 20, 1 << 30
_LETTERS = "kmgt"
_COUNTS = {letter: 1000**power for power, letter in enumerate(_LETTERS, 1)}
_COUNTS |= {letter.upper(): 1024**power for power, letter in enumerate(_LETTERS, 1)}
_BYTES = {"b": 1} | {f"{letter}b": 1000**power for power, letter in enumerate(_LETTERS, 1)}
_BYTES |= {f"{letter}ib": 1024**power for power, letter in enumerate(_LETTERS, 1)}
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]+)")


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
