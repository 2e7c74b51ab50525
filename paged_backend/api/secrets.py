"""Secrets, which are read from the environment or from files, so that no configuration file or command has them."""

from __future__ import annotations

import os
from pathlib import Path

from paged_backend.api.errors import ConfigError


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
