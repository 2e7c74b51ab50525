"""Prints the output of `paged serve`: progress while the model loads, a summary, and later warnings and errors."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from typing import NamedTuple

from paged_backend.utils.startup import PROGRESS
from paged_client.serving.server_log import is_detail

_BYTE_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


class Phase(NamedTuple):
    """The progress of a phase of loading, as the server last reported it."""

    name: str
    done: int
    total: int
    unit: str

    @property
    def percent(self) -> int:
        return 100 * self.done // self.total

    def __str__(self) -> str:
        count = f"{self.done}/{self.total} {self.unit}"
        if self.unit == "B":
            size, unit = next((pair for pair in _BYTE_UNITS if self.total >= pair[0]), (1, "B"))
            count = f"{self.done / size:.1f}/{self.total / size:.1f} {unit}"
        return f"{self.percent}%, {count}"

    def bar(self, width: int = 24) -> str:
        filled = width * self.done // self.total
        return f"[{'#' * filled}{'-' * (width - filled)}]"


def parse_progress(text: str) -> Phase | None:
    """Return the phase that a message of the logger `paged_llm.startup` reports; None for another message."""
    match = PROGRESS.fullmatch(text)
    if match is None or not int(match["total"]):
        return None
    return Phase(match["phase"], int(match["done"]), int(match["total"]), match["unit"])


class Console:
    """Writes to standard error: progress while the model loads, then the server's warnings and errors.

    On a terminal, progress redraws one line. Elsewhere each phase gets a line, and further ones every 10 seconds.
    """

    # Log lines of Triton start with I1231 (info), W1231 or E1231. All others are output of other code.
    _INFO = re.compile(r"I\d{4} |Signal \(")
    _PYTHON_INFO = re.compile(r"[-\d]+ [:,\d]+ (?:INFO|DEBUG) \S+: ")
    _ENGINE_PROBLEM = re.compile(r" (WARNING|ERROR) paged_llm[.\w]*: ")
    _STARTUP = re.compile(r"[-\d]+ [:,\d]+ INFO paged_llm\.startup: (.*)")
    _INTERVAL = 10.0  # seconds between progress lines if standard error is not a terminal

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._redraws = sys.stderr.isatty() and not verbose
        self._is_ready = False
        self._next_line = 0.0
        self._seconds = 0.0
        self._phase: Phase | None = None
        self._activity = "Loading the model"  # shown without a phase
        # Log lines come from a thread of their own. Reentrant, because a signal handler calls `say`.
        self._lock = threading.RLock()

    def log_line(self, line: str) -> None:
        """Print a line of the server's log if it is relevant.

        While the model loads, only messages for the user and warnings and errors of the engine are: a failure to load
        is reported as one message.
        """
        with self._lock:
            startup = self._STARTUP.match(line)
            if self._verbose:
                sys.stderr.write(line)
            elif startup and (phase := parse_progress(startup[1])):
                self._show_phase(phase)
            elif startup:
                self._phase, self._activity = None, "Starting the engine"
                self._write(f"{startup[1]}\n")
            elif self._ENGINE_PROBLEM.search(line) or (self._is_ready and not self._is_info(line)):
                self._write(line)

    def _is_info(self, line: str) -> bool:
        return bool(self._INFO.match(line) or self._PYTHON_INFO.match(line) or is_detail(line))

    def _show_phase(self, phase: Phase) -> None:
        is_new = self._phase is None or self._phase.name != phase.name
        self._phase = phase
        if is_new and not self._redraws and not self._is_ready:
            self._print_progress()

    def loading(self, seconds: float) -> None:
        """Show the progress after that many seconds of loading. Called about ten times per second."""
        with self._lock:
            self._seconds = seconds
            if self._redraws:
                spinner = "|/-\\"[int(seconds * 10) % 4]
                bar = f"{self._phase.bar()} " if self._phase else ""
                line = f"{spinner} {bar}{self._progress()}"
                sys.stderr.write(f"\r\033[K{line[: _terminal_width() - 1]}")
                sys.stderr.flush()
            elif not self._verbose and seconds >= self._next_line:
                self._print_progress()

    def _progress(self) -> str:
        if self._phase is None:
            return f"{self._activity}, {self._seconds:.0f} s"
        return f"{self._phase.name[:1].upper()}{self._phase.name[1:]}: {self._phase}, {self._seconds:.0f} s"

    def _print_progress(self) -> None:
        self._next_line = self._seconds + self._INTERVAL
        self._write(f"{self._progress()}\n")

    def ready(self, message: str) -> None:
        with self._lock:
            self._is_ready = True
            self._clear()
            print(message, flush=True)

    def restarting(self, message: str) -> None:
        """Print why the server is started again, and show the progress of its start."""
        with self._lock:
            self._is_ready, self._next_line = False, 0.0
            self._phase, self._activity = None, "Loading the model"
            self.say(message)

    def say(self, message: str) -> None:
        with self._lock, contextlib.suppress(OSError):  # standard error was closed
            self._write(f"{message}\n")

    def _write(self, text: str) -> None:
        self._clear()
        sys.stderr.write(text)
        sys.stderr.flush()

    def _clear(self) -> None:
        if self._redraws:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _terminal_width() -> int:
    with contextlib.suppress(OSError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80
