"""Contestants in other environments: child processes that are stopped between commands (_children/protocol.py)."""

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
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS")  # environment variables
LOAD_SECONDS, RUN_SECONDS, CLOSE_SECONDS = 600.0, 900.0, 30.0  # bounds of a hang only


class ChildError(RuntimeError):
    """The child process has failed. The message has the reason and the path of its log."""


class Child:
    """A child process that runs jobs.

    It creates its own process group, which is stopped between commands, so that threads that wait by spinning do not
    take CPU time from other contestants.

    Args:
        command: command line of the child.
        log: file for its standard error.
        environment: further environment variables. Those in NOT_INHERITED, which would make it find our packages or
            limit its threads, are not passed on.
    """

    def __init__(self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [str(one) for one in command],
                env=inherited | dict(environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            )

    @property
    def pid(self) -> int:
        """The identifier of the process."""
        return self._process.pid

    def load(self, **options: Any) -> dict[str, Any]:
        """Load the model and return the settings that the child uses. Raises ChildError."""
        return self._command("load", options, LOAD_SECONDS)

    def quantize(self, **options: Any) -> None:
        """Write a model file with other weights, if the child can. Raises ChildError."""
        self._command("quantize", options, RUN_SECONDS)

    def __call__(self, jobs: Sequence[Job]) -> Run:
        """Run jobs. Raises ChildError."""
        encoded = [{"prompt": job.prompt, "output": job.output, "arrival": job.arrival, "n": job.n} for job in jobs]
        return Run(requests=len(jobs), **self._command("run", {"jobs": encoded}, RUN_SECONDS))

    def close(self) -> None:
        """Let the child exit, which frees its shared memory, and kill the processes of its group that do not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # a command was not read
            self._process.stdin.close()
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.kill()  # needed if it has not created its group yet
        self._process.wait()
        self._process.stdout.close()

    def _command(self, name: str, arguments: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a command and return its result."""
        with self._running():
            try:
                self._write(json.dumps({"do": name, "with": arguments}) + "\n")
                reply = json.loads(self._read_line(seconds))
            except (OSError, ValueError) as error:
                raise ChildError(f"{name}: {error}; its log is {self._log}") from error
        if "error" in reply:
            raise ChildError(f"{name}: {reply['error']}; its log is {self._log}")
        result: dict[str, Any] = reply["ok"]
        return result

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Continue the process group, and stop it at the end."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has exited, or not created its group yet: reading from it reports that
            os.killpg(self._process.pid, number)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def _read_line(self, seconds: float) -> bytes:
        """Read a line. Raises ValueError after `seconds`, and if the child has exited."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise ValueError(f"no answer in {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ValueError(f"it exited with {self._process.wait()}")
        return line
