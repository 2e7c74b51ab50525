"""Reads a tritonserver's log, and finds in it why a model did not load."""

import re
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress


class ServerLog:
    """Reads a server's output on a thread: the lines up to a bound are kept, each is echoed as it comes."""

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
                with suppress(OSError):  # nobody reads it any more, but the server must go on writing
                    self._echo(line)

    def join(self) -> None:
        """Wait for the last lines of a server that has ended."""
        if self._thread:
            self._thread.join(timeout=5)

    def text(self) -> str:
        return "".join(self._lines)

    def tail(self, lines: int = 20) -> str:
        return "".join(self._lines[-lines:]).rstrip()

    def unloading_started(self) -> bool:
        """Whether the server was asked to stop, and lets in no more requests."""
        return any("All models are stopped" in line for line in self._lines[-100:])

    def failure(self, code: int) -> str:
        """Why a server ended before it was ready: the model's own words, or else the log's last lines."""
        if reason := load_failure(self.text()):
            return f"the model did not load: {reason}"
        # For a flag that it does not know it prints the reason, then pages of usage.
        complaint, usage, _ = self.text().partition("\nUsage:")
        return f"tritonserver ended with code {code}: {complaint if usage else self.tail()}"


def load_failure(log: str) -> str | None:
    """Why a model did not load, from a server's log, without Python's trace; None if it does not say."""
    entry = re.search(r"failed to load '[^']+' version \d+: (.*)", log)
    if entry is None:
        return None
    # Newer servers put a message on one line, in quotes, with its own quotes and line ends escaped.
    reason = entry.group(1).strip().removesuffix('"').replace("\\n", "\n").replace('\\"', '"')
    return reason.removeprefix("Internal: ").split("\n\nAt:")[0].strip()
