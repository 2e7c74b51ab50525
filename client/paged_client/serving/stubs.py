"""The processes of a server's Python models."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

STUB_NAME = "triton_python_b"  # triton_python_backend_stub, as the kernel shortens it
DEAD_SECONDS = 5.0  # time for a server to notice that a connected process has died


def stubs(pid: int) -> list[int]:
    """Return the processes of the server's Python models."""
    return [child for child in _children(pid) if _name(child).startswith(STUB_NAME)]


def runs(pid: int) -> bool:
    """Return whether a process runs. A zombie (state Z) does not. True if the state cannot be read, as without a free
    file descriptor."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def how_ended(code: int) -> str:
    """Return how a process ended, for a message. code: its exit code; a negative code is the number of a signal."""
    if code >= 0:
        return f"exited with code {code}"
    cause = ", as when the machine or its container is out of memory" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{cause}"


def exit_code(pid: int) -> int | None:
    """Return the exit code of a process that its parent has not waited for; None if that cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        return os.waitstatus_to_exitcode(int(Path(f"/proc/{pid}/stat").read_text().split()[-1]))
    return None


class LoadingStubs:
    """Watches the processes of a server that loads its models, which waits forever for one that dies before it has
    connected to the server."""

    def __init__(self, server: int):
        """server: its process id."""
        self._server = server
        self._dead_since: dict[int, float] = {}

    def died(self) -> int | None:
        """Return a process that has been dead for DEAD_SECONDS without the server noticing, or None."""
        now = time.monotonic()
        # Children are not found by name: a new process may not have its own name yet.
        dead = [pid for pid in _children(self._server) if not runs(pid)]
        self._dead_since = {pid: self._dead_since.get(pid, now) for pid in dead}
        return next((pid for pid, since in self._dead_since.items() if now - since >= DEAD_SECONDS), None)


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            pids += map(int, file.read_text().split())
    return pids


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
