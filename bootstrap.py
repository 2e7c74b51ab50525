"""Sets up an environment: `python3 bootstrap.py serve`, `test` or `modern`. make calls it.

Installs a set of packages: for serving, for serving and tests, or the newest versions without the server in the wheel.
Compiles the C++ kernels for this processor meanwhile. What exists is kept. Needs only the standard library.
"""

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "kernels"))

from paged_kernels.cpu import build  # noqa: E402

SERVE = ("client", "server")
TEST = ("events", "remote", "dynamo", "bench", "test")
# The extras of pyproject.toml in each set of packages.
SETS = {"serve": SERVE, "test": (*SERVE, "tracing-json", *TEST), "modern": ("client", "gguf", "tracing", *TEST)}
# What a server and the gateway import.
IMPORTS = (
    "paged_backend.server.service, paged_client.openai.app, accelerate, gguf, transformers.models.llama.modeling_llama"
)
TIMES = "set_up_times.txt"  # in the environment: the seconds of each part, for .ci/run
PACKAGES = "Packages"


def constraints(packages: str) -> str:
    """Return the name of the file with the versions of a set of packages."""
    return "constraints-modern.txt" if packages == "modern" else "constraints.txt"


class SetUpFailed(Exception):
    """A command failed. The message has its output."""


class Environment:
    """A virtual environment, of which `set_up` makes what is missing.

    Args:
        directory: of the environment.
        packages: the name of a set of packages.
        pip_arguments: further arguments of pip.
    """

    def __init__(self, directory: Path, packages: str, pip_arguments: Sequence[str]) -> None:
        self._directory = directory
        self._packages = packages
        self._pip_arguments = pip_arguments
        self._python = directory / "bin/python"
        self.seconds: dict[str, float] = {}  # of each part that was missing

    def stamp(self, packages: str) -> Path:
        """Return the file that says that a set of packages is installed.

        It is named after the content of the files that say what to install, so that a change of either installs again
        and a mere touch does not.
        """
        files = (ROOT / "pyproject.toml").read_bytes() + (ROOT / constraints(packages)).read_bytes()
        return self._directory / f".installed-{packages}-{hashlib.sha256(files).hexdigest()[:16]}"

    def set_up(self) -> None:
        """Make the environment, install the packages, and compile the kernels. Raises SetUpFailed."""
        if not (self._directory / "bin/pip").exists():  # which is made last
            print(f"Making {self._directory} with Python {sys.version.split()[0]}", flush=True)
            with self._timed("environment"):
                self._check(sys.executable, "-m", "venv", self._directory)
        if self.stamp(self._packages).exists():
            self._compile()
            return
        print(f"Installing packages ({', '.join(SETS[self._packages])})", flush=True)
        with ThreadPoolExecutor() as pool, build.Progress() as progress:
            level = pool.submit(self._compile_level, progress)  # does not need torch
            self._install(progress)
            progress.end(PACKAGES)
            level.result()
        with ThreadPoolExecutor() as pool:
            imports = pool.submit(self._import)
            self._compile()
            imports.result()
        if "server" in SETS[self._packages]:
            self._check(self._python, "-m", "paged_client.serving.server_files", capture_output=False)
        for old in self._directory.glob(".installed-*"):
            if old not in map(self.stamp, SETS):
                old.unlink()
        for name, extras in SETS.items():
            if set(extras) <= set(SETS[self._packages]):
                self.stamp(name).touch()

    def _compile_level(self, progress: build.Progress) -> None:
        """Compile the best level. An error is reported by the compilation of the rest, which fails again."""
        with suppress(build.BuildFailed, OSError), self._timed("C++ level"):
            build.build_best(build.reporter(progress, build.supported()[:1]), common=False)
        progress.end(build.COMPILING)

    def _compile(self) -> None:
        """Compile the libraries that are missing. Without a compiler everything works, more slowly."""
        has_level = any(build.library(level).exists() for level in build.supported())
        if not (has_level and build.library(build.COMMON).exists()):
            with self._timed("C++ operators"):
                self._run(self._python, "-m", "paged_kernels.cpu.build", capture_output=False)

    def _import(self) -> None:
        """Import what a server does, which writes the bytecode of these modules, and shows that none is missing."""
        with self._timed("first import"):
            self._check(self._python, "-c", f"import {IMPORTS}")

    def _install(self, progress: build.Progress) -> None:
        # Once the project is installed, its extras are added without installing it again.
        extras, is_there = ",".join(SETS[self._packages]), self.stamp("serve").exists()
        project = [f"paged-llm-triton[{extras}]"] if is_there else ["-e", f".[{extras}]"]
        options = "--disable-pip-version-check --progress-bar=off --no-warn-conflicts --no-compile"
        pins = ["-c", constraints(self._packages)]
        command = [str(self._python), "-m", "pip", "install", *options.split(), *pins, *self._pip_arguments, *project]
        output, found, ended = list[str](), 0, threading.Event()
        pipe = subprocess.PIPE
        with (
            self._timed("packages"),
            subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=subprocess.STDOUT) as pip,
        ):
            assert pip.stdout
            for line in pip.stdout:
                output.append(line)
                if line.startswith(("Collecting ", "Processing ", "Obtaining ")):
                    found += 1
                    progress.update(PACKAGES, found, 0, "found")
                elif line.startswith("Installing collected packages: "):
                    arguments = (line.count(",") + 1, progress, ended)
                    threading.Thread(target=self._count, args=arguments, daemon=True).start()
        ended.set()
        if pip.returncode:
            raise SetUpFailed("".join(output))

    def _count(self, total: int, progress: build.Progress, ended: threading.Event) -> None:
        """Show how many packages pip has installed, which it does not print."""
        (place,) = (self._directory / "lib").glob("python*/site-packages")
        before = len(list(place.glob("*.dist-info")))
        while not ended.wait(0.5):
            new = len(list(place.glob("*.dist-info"))) - before
            progress.update(PACKAGES, min(total, new), total, "installed")

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - began

    def _run(self, *command: str | Path, capture_output: bool = True) -> "subprocess.CompletedProcess[str]":
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=capture_output, text=True, check=False)

    def _check(self, *command: str | Path, capture_output: bool = True) -> None:
        done = self._run(*command, capture_output=capture_output)
        if done.returncode:
            raise SetUpFailed(f"{' '.join(map(str, command))}\n{done.stdout or ''}{done.stderr or ''}")


def main() -> int:
    """Run the command. Returns its exit status."""
    parser = argparse.ArgumentParser(description="Set up the environment.", epilog="Arguments after -- go to pip.")
    parser.add_argument("packages", choices=SETS, help="the set of packages")
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="directory of the environment")
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:end])
    began = time.monotonic()
    environment = Environment(args.venv.absolute(), args.packages, arguments[end + 1 :])
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one at a time
        try:
            environment.set_up()
        except SetUpFailed as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    if environment.seconds:
        parts = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in environment.seconds.items())
        print(f"Set up in {time.monotonic() - began:.0f} s ({parts}; some at the same time)")
        lines = "".join(f"{part}\t{seconds:.0f}\n" for part, seconds in environment.seconds.items())
        (args.venv / TIMES).write_text(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
