"""Virtual environments in the cache, for other engines and clients whose packages conflict with this project's."""

from __future__ import annotations

import fcntl
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

from paged_client.serving.server_files import cache_directory

COMPLETE_MARKER = "made.json"  # file written last, with the seconds and bytes that the installation took
PRINT_REQUIREMENTS = "import importlib.metadata as m; print('\\n'.join(m.requires({package!r}) or ()))"


class EnvironmentSetupError(RuntimeError):
    """An environment could not be created. The message has the reason."""


class Environment(ABC):
    """A virtual environment that is created on first use."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of the environment in messages."""

    @property
    @abstractmethod
    def directory(self) -> Path:
        """The path, which depends on the packages."""

    @abstractmethod
    def _install_packages(self) -> None:
        """Install the packages."""

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def ready(self) -> bool:
        return (self.directory / COMPLETE_MARKER).exists()

    def ensure(self) -> None:
        """Create the environment unless it exists. One process creates it while the others wait.

        Raises EnvironmentSetupError.
        """
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(self.directory):
            if not self.ready:
                self._create()

    def _create(self) -> None:
        print(f"Setting up {self.label} in {self.directory}, once: some minutes", file=sys.stderr)
        started = time.monotonic()
        shutil.rmtree(self.directory, ignore_errors=True)  # an earlier attempt may have been interrupted
        try:
            venv.create(self.directory, with_pip=True)
            self._install_packages()
        except (OSError, subprocess.CalledProcessError) as error:
            raise EnvironmentSetupError(f"{self.label}: {_reason(error)}") from error
        seconds, size = time.monotonic() - started, _bytes(self.directory)
        (self.directory / COMPLETE_MARKER).write_text(json.dumps({"seconds": seconds, "bytes": size}) + "\n")
        print(f"{self.label}: set up in {seconds:.0f} s, {size / 1e9:.1f} GB", file=sys.stderr)

    def _pip_install(self, *arguments: str, **variables: str) -> None:
        flags = ("--quiet", "--disable-pip-version-check", "--no-compile")  # bytecode is written by the first import
        self._run("-m", "pip", "install", *flags, *arguments, **variables)

    def _run(self, *arguments: str, **variables: str) -> str:
        """Run the environment's Python with further environment variables, and return its standard output."""
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        completed = subprocess.run(
            [self.python, *arguments], env=environment | variables, check=True, capture_output=True, text=True
        )
        return completed.stdout


@dataclass(frozen=True)
class PackageEnvironment(Environment):
    """An environment with one package and its requirements."""

    name: str
    package: str  # name on PyPI
    version: str
    preinstall: tuple[str, ...] = ()  # packages to install first
    exclude: tuple[str, ...] = ()  # prefixes of requirements that are not installed
    build_variables: Mapping[str, str] = field(default_factory=dict)  # environment variables for compiling it

    @property
    def label(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def directory(self) -> Path:
        return cache_directory() / "environments" / f"{self.name}-{self.version}"

    def _install_packages(self) -> None:
        if self.preinstall:
            self._pip_install(*self.preinstall)
        # pip would reuse a wheel that was compiled with other variables.
        flags = ["--no-cache-dir"] if self.build_variables else []
        self._pip_install("--no-deps", *flags, f"{self.package}=={self.version}", **self.build_variables)
        if requirements := self._requirements():
            self._pip_install(*requirements, **self.build_variables)

    def _requirements(self) -> list[str]:
        """Return the requirements of the installed package, with environment markers, without the excluded ones."""
        lines = self._run("-c", PRINT_REQUIREMENTS.format(package=self.package)).splitlines()
        return [line for line in lines if not line.startswith(self.exclude)]


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    """Return the first error line of pip, or its last line."""
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
