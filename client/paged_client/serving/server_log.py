"""Reads the log of a tritonserver, and finds in it why a model did not load."""

import os
import re
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from paged_backend.utils import failure
from paged_client.serving.stubs import how_ended

# Lines that only the log file needs: tables, empty messages, and the stacks of a process that was ended by a signal, as
# tritonserver and Python's faulthandler write them.
_DETAIL = re.compile(
    r'[+|\n]|I\d{4} [^\]]*\] ?\n| *\d+# 0x|(Current t|T)hread 0x|  File ".*", line \d+ in |  <no Pyth|Extension mod'
)
_TAIL_SEARCHED = 1000  # lines at the end that are searched for the last messages
PROCESS_DIED = "the model did not load: its process has died while loading"


def is_detail(line: str) -> bool:
    """Return whether a line of the log is not a message, but part of a table or of a stack dump."""
    return _DETAIL.match(line) is not None


class LogFile:
    """A file that gets everything that is written. Beyond MAX_BYTES, it is renamed to NAME.1 and begins anew."""

    MAX_BYTES = 64 << 20

    def __init__(self, path: Path, *, append: bool = False) -> None:
        """Create the file and its directory. append: keep what the file has. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._file: FileIO | None = _open(path, "ab" if append else "wb")
        self._size = self._file.tell()

    def write(self, line: bytes) -> None:
        """Write a line. Raises OSError once if that is not possible, and drops all later lines."""
        if self._file is None:
            return
        try:
            if self._size + len(line) > self.MAX_BYTES:
                self._file.close()
                os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
                self._file, self._size = _open(self._path, "wb"), 0
            self._file.write(line)
            self._size += len(line)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _open(path: Path, mode: str) -> FileIO:
    """Open a file, which only this user can read if it is new."""
    return FileIO(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def append_line(path: Path, line: str) -> None:
    """Add a line to the log of a server that has ended. Raises OSError."""
    file = LogFile(path, append=True)
    file.write(line.encode())
    file.close()


class ServerLog:
    """Reads a server's output on a thread.

    It keeps the last LIMIT lines, passes each line to `echo`, and writes it to the file at `path`.
    """

    LIMIT = 20_000  # lines

    def __init__(
        self, echo: Callable[[str], None] | None = None, path: Path | None = None, *, append: bool = False
    ) -> None:
        self._echo = echo
        self._path = path
        self._append = append
        self._file: LogFile | None = None
        self._lines: list[str] = []
        self._thread: threading.Thread | None = None
        self.mark = secrets.token_hex(8)  # marks the server's own lines about failures; passed in its environment
        self.engine_failure: str | None = None  # why the engine answers no more requests

    def open(self) -> None:
        """Create the file. Raises OSError."""
        if self._path:
            self._file = LogFile(self._path, append=self._append)

    def follow(self, process: "subprocess.Popen[bytes]") -> None:
        self._thread = threading.Thread(target=self._read, args=[process.stdout], daemon=True)
        self._thread.start()

    def _read(self, stream: Iterable[bytes]) -> None:
        for raw in stream:
            self._add(raw.decode(errors="replace"))
            if self._file:
                try:
                    self._file.write(raw)
                except OSError as error:  # e.g. no space left
                    self._add(f"W0000 {self._path}: {error.strerror}; the log is no longer written to this file\n")
        if self._file:
            self._file.close()

    def _add(self, line: str) -> None:
        self._lines.append(line)
        if reason := failure.reported(line, self.mark):
            self.engine_failure = reason
        if len(self._lines) > self.LIMIT:
            del self._lines[: self.LIMIT // 2]
        if self._echo:
            with suppress(OSError):  # standard error was closed; the server's output must still be read
                self._echo(line)

    def join(self) -> None:
        """Wait for the last lines of a server that has exited."""
        if self._thread:
            self._thread.join(timeout=5)

    def text(self) -> str:
        return "".join(self._lines)

    def tail(self, lines: int = 10) -> str:
        """Return the last messages."""
        return "".join([line for line in self._lines[-_TAIL_SEARCHED:] if not is_detail(line)][-lines:]).rstrip()

    def unloading_started(self) -> bool:
        """Return whether the server is stopping and accepts no more requests."""
        return any("All models are stopped" in line for line in self._lines[-100:])

    def failure(self, code: int) -> str:
        """Return why the server exited before it was ready: the error of the model, or else the end of the log."""
        if reason := load_failure(self.text()):
            if re.fullmatch(r"Stub process '.*' is not healthy\.?", reason):
                return PROCESS_DIED
            return f"the model did not load: {reason}"
        # After an unknown option the server prints the error, and then its whole usage text.
        error, usage, _ = self.text().partition("\nUsage:")
        return f"tritonserver {how_ended(code)}: {error if usage else self.tail()}"


def load_failure(log: str) -> str | None:
    """Return why a model did not load, without the Python traceback; None if the log has no such error."""
    entry = re.search(r"failed to load '[^']+' version \d+: (.*)", log)
    if entry is None:
        return None
    # Newer servers write a message as one line in quotes, with escaped quotes and newlines.
    reason = entry.group(1).strip().removesuffix('"').replace("\\n", "\n").replace('\\"', '"')
    reason = reason.removeprefix("Internal: ").split("\n\nAt:")[0].strip()
    return reason.removeprefix("TritonModelException: ").removeprefix("ConfigError: ")
