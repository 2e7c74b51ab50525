"""Stand-ins for Triton kernels, whose compilation in a process does what a test needs.

`variant(name, file)` is what to compile. Each one first writes process ids to the file.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paged_kernels.parallel_compilation import Variant


@dataclass(frozen=True)
class StubKernel:
    """A kernel that is compiled by calling a function with the file."""

    compile: Callable[[Path], None]

    def preload(self, specialization_data: str) -> None:
        self.compile(Path(json.loads(specialization_data)["file"]))


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


compiles, fails, crashes, never_ends = map(StubKernel, (_compile, _fail, _crash, _never_end))


def variant(name: str, file: Path) -> Variant:
    """Return the variant that compiles a stub of this module."""
    target = {"backend": "cuda", "arch": 90, "warp_size": 32}
    return Variant(__name__, name, json.dumps({"target": target, "file": str(file)}))
