"""Compile a grammar in a sandbox process, with a tokenizer of single bytes and special tokens.

Some grammars compile for minutes, take gigabytes or, deeply nested, overflow the stack. llguidance cannot be
interrupted, but a process can be killed.
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

if TYPE_CHECKING:  # llguidance is optional
    from paged_backend.guided.grammar import GrammarSettings

START_SECONDS = 60  # time limit for a new process to import its modules from a cold disk
POLL_SECONDS = 0.1  # interval of checks whether a request still waits
TIMEOUT_CACHE_SECONDS = 600.0  # a timed-out grammar is retried after this time: the machine may have been busy
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL", "TMPDIR")
COMMAND = "import sys; from paged_backend.guided.sandbox_process import main; main(int(sys.argv[1]))"


class GrammarError(Exception):
    """A structure cannot be compiled. The message gives the reason."""

    def __init__(
        self, message: str, code: ErrorCode = ErrorCode.INVALID_ARGUMENT, *, cache_seconds: float = math.inf
    ) -> None:
        """`cache_seconds` is how long the error is returned for the same structure without compiling it again."""
        super().__init__(message)
        self.code = code
        self.cache_seconds = cache_seconds


class CompileCancelled(GrammarError):
    """No request waits for the structure any more."""

    def __init__(self) -> None:
        super().__init__("cancelled", ErrorCode.CANCELLED, cache_seconds=0)


class GrammarSandbox:
    """Owns a sandbox process, which is started on demand and replaced after it had to be killed.

    Use it from one thread at a time; `stop` may be called from another thread.
    """

    def __init__(self, seconds: float, settings: Callable[[], GrammarSettings]) -> None:
        """`seconds` limits the time to compile one grammar. `settings` is called whenever a process starts."""
        self._seconds = seconds
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._fresh = True  # True until the process has compiled a grammar
        self._stopped = False
        self._lock = threading.Lock()  # held while the process is started or killed

    def compile(self, kind: str, text: str, still_wanted: Callable[[], bool]) -> str:
        """Return the llguidance grammar of a structure that compiles in the sandbox.

        The process is killed at the time limit, or once `still_wanted` returns False. Raises GrammarError.
        """
        if not still_wanted():
            raise CompileCancelled
        channel = self._start()
        try:
            channel.send_bytes(json.dumps([kind, text]).encode())
            self._wait(channel, still_wanted)
            answer = json.loads(channel.recv_bytes())
        except (EOFError, OSError):
            fresh = self._fresh
            self._kill()
            self._check_stopped()
            if not fresh:  # retries in a new process, as earlier grammars may have left little memory
                return self.compile(kind, text, still_wanted)
            raise GrammarError("it is too deep or too large to be compiled") from None
        self._fresh = False
        if "error" in answer:
            raise GrammarError(answer["error"])
        return str(answer["grammar"])

    def _wait(self, channel: Connection, still_wanted: Callable[[], bool]) -> None:
        """Wait until the process has answered."""
        end = time.monotonic() + self._seconds
        while not channel.poll(max(0.0, min(POLL_SECONDS, end - time.monotonic()))):
            if not still_wanted():
                self._kill()
                raise CompileCancelled
            if time.monotonic() >= end:
                self._kill()
                limit = f"{self._seconds:g} s (structured_outputs_timeout)"
                raise GrammarError(f"compiling it takes more than {limit}", cache_seconds=TIMEOUT_CACHE_SECONDS)

    def stop(self) -> None:
        """Kill the process. Compilations from then on fail."""
        with self._lock:
            self._stopped = True
        self._kill()

    def _start(self) -> Connection:
        with self._lock:
            self._check_stopped()
            if self._channel is None:
                self._process, self._channel = _start_process(json.dumps(self._settings()).encode())
                self._fresh = True
            return self._channel

    def _check_stopped(self) -> None:
        if self._stopped:
            raise GrammarError("the server is stopping", ErrorCode.UNAVAILABLE, cache_seconds=0)

    def _kill(self) -> None:
        with self._lock:
            process, channel, self._process, self._channel = self._process, self._channel, None, None
        if process:
            process.kill()
            process.wait()
        if channel:
            channel.close()


def _environment() -> dict[str, str]:
    """Return what Python needs to run, and nothing else of this process's environment, which may have secrets."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _start_process(settings: bytes) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [find_python(), "-c", COMMAND, str(theirs.fileno())],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C in a terminal must only reach the server, which drains open streams
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    channel = Connection(ours.detach())
    try:
        channel.send_bytes(settings)
        if not channel.poll(START_SECONDS):
            raise TimeoutError(f"the grammar sandbox process did not start within {START_SECONDS} s")
        channel.recv_bytes()
    except (EOFError, OSError):
        process.kill()
        process.wait()
        channel.close()
        raise
    return process, channel
