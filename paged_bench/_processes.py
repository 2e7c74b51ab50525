"""Processes that a benchmark starts, and that end with it even if it is killed with SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LEADER = Path(__file__).parent / "_children" / "leader.py"


class ProcessGroup(subprocess.Popen[bytes]):
    """A process that leads a process group of its own. The group is killed when this process ends."""

    def __init__(self, command: Sequence[str | Path], **options: Any) -> None:
        """Start a program. options: arguments of `Popen`."""
        theirs, self._ours = os.pipe()
        leader = [sys.executable, "-I", "-S", LEADER, str(theirs), *command]
        try:
            super().__init__([str(part) for part in leader], pass_fds=[theirs], **options)
        finally:
            os.close(theirs)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the group, if there are any."""
        with suppress(ProcessLookupError):  # it has ended, or has not created its group yet
            os.killpg(self.pid, number)

    def end(self) -> None:
        """Kill the group, and wait for its leader."""
        self.signal_group(signal.SIGKILL)
        self.kill()  # needed if it has not created its group yet
        self.wait()
        os.close(self._ours)
