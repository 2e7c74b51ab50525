"""API keys, from wherever the gateway's operator keeps them."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "PAGED_API_KEYS"


def collect(flags: Sequence[str], file: Path | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Those of the command line, of a file that has one a line, and of the environment, between commas.

    Raises ValueError for a file that cannot be read, and for a source that is there and holds no key: the gateway would
    be open to everyone.
    """
    keys = list(flags)
    if any(not key.strip() for key in flags):
        raise ValueError("--api-key: is empty")
    if file is not None:
        keys += _some(f"--api-key-file {file}", _lines(file))
    if environment.get(VARIABLE):
        keys += _some(VARIABLE, environment[VARIABLE].split(","))
    return tuple(dict.fromkeys(keys))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ValueError(f"--api-key-file {file}: {reason}") from None


def _some(source: str, keys: Sequence[str]) -> list[str]:
    found = [key.strip() for key in keys if key.strip()]
    if not found:
        raise ValueError(f"{source}: holds no key")
    return found


def is_authorized(authorization: str, keys: Sequence[str]) -> bool:
    """Whether a header brings one of the keys. Takes as long for any other of the same length."""
    kind, _, given = authorization.partition(" ")
    known = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
    return kind.lower() == "bearer" and any(known)
