"""A contestant in another environment: a child process that is awake only while it is asked (_children/protocol.py)."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paged_bench._workload import Job, Run

CHILDREN = Path(__file__).parent / "_children"
OURS_ALONE = ("PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS")
LOAD_SECONDS, RUN_SECONDS, CLOSE_SECONDS = 600.0, 900.0, 30.0  # which only bound a hang


class ChildError(RuntimeError):
    """The child cannot be used; the message says why."""


class Child:
    """`log` gets what it prints. It makes a process group of its own, which is stopped between two commands: threads
    that wait by spinning take no core from the others."""

    def __init__(self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None):
        """environment: variables on top of ours, less those that would make it find our packages or hold back its
        threads."""
        own = {name: value for name, value in os.environ.items() if name not in OURS_ALONE}
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [str(one) for one in command],
                env=own | dict(environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            )

    def load(self, **options: Any) -> dict[str, Any]:
        """What it runs with. Raises ChildError."""
        return self._ask("load", options, LOAD_SECONDS)

    def __call__(self, jobs: Sequence[Job]) -> Run:
        """Raises ChildError."""
        asked = [{"prompt": job.prompt, "output": job.output, "arrival": job.arrival, "n": job.n} for job in jobs]
        return Run(requests=len(jobs), **self._ask("run", {"jobs": asked}, RUN_SECONDS))

    def close(self) -> None:
        """Let it end by itself, which takes its shared memory along; all of its group that does not is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # of a command that it never read
            self._process.stdin.close()
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.kill()  # where it had no group yet
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, what: str, arguments: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        with self._awake():
            try:
                self._write(json.dumps({"do": what, "with": arguments}) + "\n")
                reply = json.loads(self._line(seconds))
            except (OSError, ValueError) as error:
                raise ChildError(f"{what}: {error}; its log is {self._log}") from error
        if "error" in reply:
            raise ChildError(f"{what}: {reply['error']}; its log is {self._log}")
        answer: dict[str, Any] = reply["ok"]
        return answer

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended, or not begun: whoever reads from it sees that
            os.killpg(self._process.pid, number)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def _line(self, seconds: float) -> bytes:
        """Raises ValueError where none comes."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise ValueError(f"no answer in {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ValueError(f"it ended with {self._process.wait()}")
        return line
