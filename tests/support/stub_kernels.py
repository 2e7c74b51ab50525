"""Stand-ins for variants of Triton kernels, whose compilation in a process does what a test needs.

Each of them first writes process ids to a file.
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


def _log(file: Path, *ids: int) -> None:
    with file.open("a") as lines:
        lines.write(" ".join(map(str, ids)) + "\n")


def _compile(file: Path) -> None:
    _log(file, os.getpid())


def _fail(file: Path) -> None:
    _log(file, os.getpid())
    raise RuntimeError("not compilable")


def _crash(file: Path) -> None:
    _log(file, os.getpid())
    os.kill(os.getpid(), signal.SIGSEGV)


def _never_end(file: Path) -> None:
    """Run a program that never ends, as Triton runs ptxas."""
    program = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    _log(file, os.getpid(), program.pid)
    program.wait()


COMPILERS = {"compiles": _compile, "fails": _fail, "crashes": _crash, "never_ends": _never_end}


@dataclass(frozen=True)
class StubVariant:
    """A variant of a kernel that is compiled by a function of this module."""

    name: str
    file: Path

    def compile(self) -> None:
        COMPILERS[self.name](self.file)
