"""Reads the log of a tritonserver, and finds in it why a model did not load."""

import re
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress


class ServerLog:
    """Reads a server's output on a thread. It keeps the last LIMIT lines and passes each line to `echo`."""

    LIMIT = 20_000  # lines

    def __init__(self, echo: Callable[[str], None] | None) -> None:
        self._echo = echo
        self._lines: list[str] = []
        self._thread: threading.Thread | None = None

    def follow(self, process: "subprocess.Popen[bytes]") -> None:
        self._thread = threading.Thread(target=self._read, args=[process.stdout], daemon=True)
        self._thread.start()

    def _read(self, stream: Iterable[bytes]) -> None:
        for raw in stream:
            line = raw.decode(errors="replace")
            self._lines.append(line)
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

    def tail(self, lines: int = 20) -> str:
        return "".join(self._lines[-lines:]).rstrip()

    def unloading_started(self) -> bool:
        """Return whether the server is stopping and accepts no more requests."""
        return any("All models are stopped" in line for line in self._lines[-100:])

    def failure(self, code: int) -> str:
        """Return why the server exited before it was ready: the error of the model, or else the end of the log."""
        if reason := load_failure(self.text()):
            return f"the model did not load: {reason}"
        # After an unknown option the server prints the error, and then its whole usage text.
        error, usage, _ = self.text().partition("\nUsage:")
        return f"tritonserver exited with code {code}: {error if usage else self.tail()}"


def load_failure(log: str) -> str | None:
    """Return why a model did not load, without the Python traceback; None if the log has no such error."""
    entry = re.search(r"failed to load '[^']+' version \d+: (.*)", log)
    if entry is None:
        return None
    # Newer servers write a message as one line in quotes, with escaped quotes and newlines.
    reason = entry.group(1).strip().removesuffix('"').replace("\\n", "\n").replace('\\"', '"')
    return reason.removeprefix("Internal: ").split("\n\nAt:")[0].strip()
