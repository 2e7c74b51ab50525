"""A virtual environment whose packages are pinned in a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from paged_client.serving.environments import Environment
from paged_client.serving.server_files import cache_directory


@dataclass(frozen=True)
class LockedEnvironment(Environment):
    """An environment with exactly the packages of a file of pinned requirements."""

    name: str
    file: Path

    @property
    def label(self) -> str:
        return self.name

    @property
    def directory(self) -> Path:
        digest = hashlib.sha256(self.file.read_bytes()).hexdigest()[:12]
        return cache_directory() / "clients" / f"{self.name}-{digest}"

    def _install_packages(self) -> None:
        # Most modules are never imported, so they are not compiled in advance.
        self._pip_install("--no-deps", "--no-compile", "--requirement", str(self.file))
