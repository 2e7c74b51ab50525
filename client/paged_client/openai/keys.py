"""The API keys of the gateway."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "PAGED_API_KEYS"


def collect(flags: Sequence[str], file: Path | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys of the command line, of a file with one per line, and of PAGED_API_KEYS, separated by commas.

    Raises ValueError for a file that cannot be read, and for a source that is given but has no key, which would leave
    the gateway without authentication.
    """
    keys = list(flags)
    if any(not key.strip() for key in flags):
        raise ValueError("--api-key: is empty")
    if file is not None:
        keys += _nonempty(f"--api-key-file {file}", _lines(file))
    if environment.get(VARIABLE):
        keys += _nonempty(VARIABLE, environment[VARIABLE].split(","))
    return tuple(dict.fromkeys(keys))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ValueError(f"--api-key-file {file}: {reason}") from None


def _nonempty(source: str, keys: Sequence[str]) -> list[str]:
    stripped = [key.strip() for key in keys if key.strip()]
    if not stripped:
        raise ValueError(f"{source}: has no key")
    return stripped


def is_authorized(authorization: str, keys: Sequence[str]) -> bool:
    """Return whether an Authorization header has one of the keys. All keys are compared in constant time."""
    kind, _, given = authorization.partition(" ")
    matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
    return kind.lower() == "bearer" and any(matches)
