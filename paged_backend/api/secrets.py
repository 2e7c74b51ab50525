"""Reads secrets from the environment or from files, so that they are not in configuration files or commands."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from paged_backend.api.errors import ConfigError

MIN_KEY_BYTES = 16
CREDENTIALS = re.compile(r"//.*@")  # user name and password of a URL


def redacted(text: str) -> str:
    """Return a text without user names and passwords of URLs."""
    return CREDENTIALS.sub("//***@", text)


def read_secret(variable: str) -> str | None:
    """Return the value of an environment variable, or the content of the file that `<variable>_FILE` names, without a
    final line break. None if neither is set. Raises ConfigError if both are set, the secret is empty, or the file
    cannot be read."""
    value, path = os.environ.get(variable), os.environ.get(f"{variable}_FILE")
    if value is not None and path is not None:
        raise ConfigError(f"{variable} and {variable}_FILE are both set; leave one of them out")
    name = variable
    if path is not None:
        name = f"{variable}_FILE={path}"
        try:
            value = Path(path).read_text().removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name}: {error}") from None
    if value == "":
        raise ConfigError(f"{name}: the secret is empty")
    return value


def read_key(variable: str) -> bytes | None:
    """Return a secret that authenticates messages; see `read_secret`. Raises ConfigError if it is too short."""
    secret = read_secret(variable)
    key = secret.encode() if secret is not None else None
    if key is not None and len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"{variable}: has {len(key)} bytes; must be at least {MIN_KEY_BYTES}")
    return key


def check_private(variable: str) -> None:
    """Raise ConfigError if other users can read the file that `<variable>_FILE` names."""
    path = os.environ.get(f"{variable}_FILE")
    if path is not None and (mode := stat.S_IMODE(os.stat(path).st_mode)) & 0o007:
        raise ConfigError(
            f"{variable}_FILE={path}: other users can access it (mode {mode:04o}); run chmod o-rwx {path}"
        )
