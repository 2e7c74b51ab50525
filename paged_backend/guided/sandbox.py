"""Grammars are tried in a process of their own first, with a tokenizer of single bytes and special tokens.

Some compile for minutes, take gigabytes or, nested deeply, end the process: there is no way to stop the library, but a
process can be ended.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from paged_backend.api.errors import ErrorCode
from paged_backend.utils.machine import find_python

if TYPE_CHECKING:  # the library may be missing
    from paged_backend.guided.grammar import GrammarSettings

START_SECONDS = 60  # for a new process to import what it needs, from a cold disk
POLL_SECONDS = 0.1  # between two looks at whether anybody still waits
TOO_LONG_SECONDS = 600.0  # for which one that took too long is not tried again: then, too, the machine may be busy
COMMAND = "import sys; from paged_backend.guided.sandbox_process import main; main(int(sys.argv[1]))"


class GrammarError(Exception):
    """Why there are no guides of a structure."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_ARGUMENT, *, lasts: float = math.inf):
        """lasts: seconds for which it is the answer to whoever asks for the same."""
        super().__init__(message)
        self.code = code
        self.lasts = lasts


class CompileCancelled(GrammarError):
    """Nobody waits for it any more."""

    def __init__(self) -> None:
        super().__init__("nobody waits for it", ErrorCode.CANCELLED, lasts=0)


class GrammarSandbox:
    """A process that is started when it is first needed, and again after it had to be ended. For one thread at a
    time; `stop` may be called from another."""

    def __init__(self, seconds: float, setup: Callable[[], GrammarSettings]):
        """seconds: that a grammar may take. setup: asked when a process starts."""
        self._seconds = seconds
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._fresh = True  # whether the process has tried none yet
        self._stopped = False
        self._lock = threading.Lock()  # of starting and ending

    def __call__(self, kind: str, text: str, still_wanted: Callable[[], bool]) -> str:
        """The library's grammar of a structure that it can compile. Raises GrammarError. wanted: whether anybody still
        waits for it; else the process is ended, as after its time."""
        if not still_wanted():
            raise CompileCancelled
        channel = self._started()
        try:
            channel.send_bytes(json.dumps([kind, text]).encode())
            self._wait(channel, still_wanted)
            answer = json.loads(channel.recv_bytes())
        except (EOFError, OSError):
            fresh = self._fresh
            self._end()
            self._check_stopped()
            if not fresh:  # what it tried before may have left it little memory
                return self(kind, text, still_wanted)
            raise GrammarError("it is too deep or too large to be compiled") from None
        self._fresh = False
        if "error" in answer:
            raise GrammarError(answer["error"])
        return str(answer["grammar"])

    def _wait(self, channel: Connection, still_wanted: Callable[[], bool]) -> None:
        """Until there is an answer."""
        end = time.monotonic() + self._seconds
        while not channel.poll(max(0.0, min(POLL_SECONDS, end - time.monotonic()))):
            if not still_wanted():
                self._end()
                raise CompileCancelled
            if time.monotonic() >= end:
                self._end()
                limit = f"{self._seconds:g} s (structured_outputs_timeout)"
                raise GrammarError(f"compiling it takes more than {limit}", lasts=TOO_LONG_SECONDS)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
        self._end()

    def _started(self) -> Connection:
        with self._lock:
            self._check_stopped()
            if self._channel is None:
                self._process, self._channel = _start(json.dumps(self._setup()).encode())
                self._fresh = True
            return self._channel

    def _check_stopped(self) -> None:
        if self._stopped:
            raise GrammarError("the server is stopping", ErrorCode.UNAVAILABLE, lasts=0)

    def _end(self) -> None:
        with self._lock:
            process, channel, self._process, self._channel = self._process, self._channel, None, None
        if process:
            process.kill()
            process.wait()
        if channel:
            channel.close()


def _start(setup: bytes) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [find_python(), "-c", COMMAND, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # a terminal's Ctrl-C is for the server, which lets open streams end
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    channel = Connection(ours.detach())
    try:
        channel.send_bytes(setup)
        if not channel.poll(START_SECONDS):
            raise TimeoutError(f"the process that tries grammars did not start within {START_SECONDS} s")
        channel.recv_bytes()
    except (EOFError, OSError):
        process.kill()
        process.wait()
        channel.close()
        raise
    return process, channel
