"""Python processes that end with the process that started them: the ranks and replicas of an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from paged_backend.utils.machine import find_python


def start_module(
    module: str, *arguments: str, first: bytes, environment: Mapping[str, str], stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Run a module in a new process, which finds the modules that this process finds, and whose standard input is a
    pipe: it is closed when this process ends.

    first: what is written to the pipe first. It may be secret: other users can read arguments, but no pipe.
    environment: variables that differ from this process's. stdout: as in `subprocess.Popen`. Raises OSError.
    """
    process = subprocess.Popen(
        [find_python(), "-m", module, *arguments],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=stdout,
        start_new_session=True,  # a terminal's Ctrl-C then reaches the server only, which drains open streams
    )
    assert process.stdin
    with suppress(BrokenPipeError):  # it has ended, which its caller notices
        process.stdin.write(first)
        process.stdin.flush()
    return process


def end_process(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a process to end by itself, kill it if it takes longer, and close its pipes."""
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with suppress(BrokenPipeError):  # it has ended without reading its first line
                pipe.close()
