"""Virtual environments beside ours, made once under the cache, for what asks for packages that ours must not have."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from client.serving.server_files import cache_directory

DONE = "made.json"  # written last: seconds and bytes
OF_ITSELF = "import importlib.metadata as m; print('\\n'.join(m.requires({package!r}) or ()))"


class EnvironmentSetupError(RuntimeError):
    """An environment could not be made; the message says why."""


class Environment(ABC):
    """A virtual environment, whatever is in it."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What messages call it."""

    @property
    @abstractmethod
    def directory(self) -> Path:
        """Another one for other contents."""

    @abstractmethod
    def _fill(self) -> None:
        """Install what is to be in it."""

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def ready(self) -> bool:
        return (self.directory / DONE).exists()

    def make(self) -> None:
        """Unless it is there. Of several processes one makes it while the others wait. Raises SetUpError."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(self.directory):
            if not self.ready:
                self._make()

    def _make(self) -> None:
        print(f"Setting up {self.label} in {self.directory}, once: some minutes", file=sys.stderr)
        started = time.monotonic()
        shutil.rmtree(self.directory, ignore_errors=True)  # what an attempt that was stopped has left
        try:
            venv.create(self.directory, with_pip=True)
            self._fill()
        except (OSError, subprocess.CalledProcessError) as error:
            raise EnvironmentSetupError(f"{self.label}: {_reason(error)}") from error
        seconds, size = time.monotonic() - started, _bytes(self.directory)
        (self.directory / DONE).write_text(json.dumps({"seconds": seconds, "bytes": size}) + "\n")
        print(f"{self.label}: set up in {seconds:.0f} s, {size / 1e9:.1f} GB", file=sys.stderr)

    def _install(self, *what: str, **variables: str) -> None:
        self._run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what, **variables)

    def _run(self, *arguments: str, **variables: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        done = subprocess.run(
            [self.python, *arguments], env=environment | variables, check=True, capture_output=True, text=True
        )
        return done.stdout


@dataclass(frozen=True)
class PackageEnvironment(Environment):
    """One package, and what it asks for."""

    name: str
    package: str  # on PyPI
    version: str
    before: tuple[str, ...] = ()  # installed first
    without: tuple[str, ...] = ()  # beginnings of its requirements that are left out, or came with `before`
    building: Mapping[str, str] = field(default_factory=dict)  # variables while it is compiled

    @property
    def label(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def directory(self) -> Path:
        return cache_directory() / "bench" / f"{self.name}-{self.version}"

    def _fill(self) -> None:
        if self.before:
            self._install(*self.before)
        self._install("--no-deps", f"{self.package}=={self.version}", **self.building)
        if wanted := self._requirements():
            self._install(*wanted, **self.building)

    def _requirements(self) -> list[str]:
        """What the package itself lists, for pip to read the markers of."""
        lines = self._run("-c", OF_ITSELF.format(package=self.package)).splitlines()
        return [line for line in lines if not line.startswith(self.without)]


@dataclass(frozen=True)
class LockedEnvironment(Environment):
    """Exactly what a file of pinned requirements lists."""

    name: str
    file: Path

    @property
    def label(self) -> str:
        return self.name

    @property
    def directory(self) -> Path:
        digest = hashlib.sha256(self.file.read_bytes()).hexdigest()[:12]
        return cache_directory() / "clients" / f"{self.name}-{digest}"

    def _fill(self) -> None:
        # Most of it is never imported, so what is gets compiled then.
        self._install("--no-deps", "--no-compile", "--requirement", str(self.file))


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    """The line in which pip says what was wrong; its last one where none does."""
    if isinstance(error, OSError):
        return str(error)
    lines = [line.strip() for line in str(error.stderr).splitlines() if line.strip()]
    return next((line for line in lines if line.lower().startswith("error:")), lines[-1] if lines else str(error))


def _bytes(directory: Path) -> int:
    return sum(file.lstat().st_size for file in directory.rglob("*"))


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    with directory.with_name(f".{directory.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
