"""Runs the server of `paged serve` until it fails or is stopped. With `--restart` a failed server is started again."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paged_backend.utils import restarts
from paged_backend.utils.failure import LAST_WORDS_SECONDS, OTHERS_GO_ON
from paged_client.connection_errors import UnreachableError
from paged_client.probe import probe
from paged_client.serving.console import Console
from paged_client.serving.server_log import append_line
from paged_client.serving.stubs import exit_code, how_ended, runs, stubs
from paged_client.serving.tritonserver import ServerError, TritonServer
from paged_client.sync_client import Client
from paged_client.types import PagedError

POLL_SECONDS = 0.2  # time between two looks at the processes
STUB_HANGS = "is not healthy"  # in tritonserver's error for a request to a process that does not react

Create = Callable[[Mapping[str, str], bool], TritonServer]


@dataclass(frozen=True)
class RestartPolicy:
    """When to restart a server, and after which delay. Times are in seconds."""

    probe_interval: float = 10.0  # time between two probes
    probe_timeout: float = 30.0  # time for a probe to get its token
    failed_probes: int = 2  # failed probes in a row after which the server is restarted
    first_delay: float = 1.0
    longest_delay: float = 60.0
    healthy: float = 60.0  # time after which a ready server is healthy; if it fails later, `first_delay` applies

    def delay(self, failures: int) -> float:
        """Return the delay before a restart. failures: number of servers in a row, including this one, that failed
        before they were healthy."""
        doublings = min(failures - 1, 32)  # a long series would exceed the largest float
        return min(self.longest_delay, self.first_delay * 2**doublings)


@dataclass(frozen=True)
class Failure:
    """Why a server cannot be used any more."""

    reason: str  # one of restarts.REASONS
    message: str
    log_tail: str = ""  # the end of the server's log, if that may explain it
    has_requests: bool = False  # whether it can still answer some of its open requests
    was_healthy: bool = False  # whether the server had been ready for RestartPolicy.healthy

    def __str__(self) -> str:
        return self.message + (f" The last lines of its log:\n{self.log_tail}" if self.log_tail else "")


class Supervisor:
    """Runs a server until it is stopped or fails; with a policy, one server after the other until it is stopped.

    Args:
        create: returns a new server, given environment variables for it and whether to append to the log file.
            Raises ValueError or OSError for a port in use, or a model that does not exist.
        console: prints why the server is restarted.
        policy: when to restart it; None: never.
        stopping: set by a signal handler that has also terminated `server`.
        on_ready: called once a server is ready; returns what to print. May raise ValueError or OSError.
        log_file: the servers' log, which also gets why they are restarted.
    """

    def __init__(
        self,
        create: Create,
        console: Console,
        policy: RestartPolicy | None,
        stopping: threading.Event,
        on_ready: Callable[[TritonServer], str],
        log_file: Path | None = None,
    ):
        self._create = create
        self._console = console
        self._policy = policy
        self._stopping = stopping
        self._on_ready = on_ready
        self._log_file = log_file
        self._counts: Counter[str] = Counter()
        self.server: TritonServer | None = None  # the current server

    def run(self) -> None:
        """Run servers until `stopping` is set.

        Raises ServerError, ValueError or OSError if the first one does not start: then a restart would not help.
        Without a policy, raises ServerError when a server fails.
        """
        failures = 0
        while not self._stopping.is_set():
            failure = self._run_server()
            if failure is None:
                return
            if self._policy is None:
                raise ServerError(str(failure))
            failures = 1 if failure.was_healthy else failures + 1
            delay = self._policy.delay(failures)
            self._counts[failure.reason] += 1
            self._report(failure, f"Restart {self._counts.total()} in {delay:g} s ({failure.reason}).")
            self._stopping.wait(delay)

    def _report(self, failure: Failure, restart: str) -> None:
        """Write why a server is restarted to the console, with the end of its log, and to the log file."""
        self._console.restarting(f"{failure}\n{restart}")
        if self._log_file:
            with suppress(OSError):  # the log is kept as far as possible
                line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} paged serve: {failure.message} {restart}\n"
                append_line(self._log_file, line)

    def _run_server(self) -> Failure | None:
        """Run one server. Return why it has failed; None if it was stopped."""
        is_first = not self._counts
        try:
            server = self.server = self._create(restarts.write(self._counts), not is_first)
            server.start()
            server.wait_ready(progress=self._console.loading)
            ready = time.monotonic()
            self._console.ready(self._on_ready(server))
        except (ServerError, ValueError, OSError) as error:
            self._end_server(kill=True)
            if self._stopping.is_set():
                return None
            if is_first:
                raise
            return Failure("start_failed", f"The server did not start: {error}")
        failure = self._watch(server)
        if self._stopping.is_set():  # a signal has ended the server
            failure = None
        was_healthy = self._policy is not None and time.monotonic() - ready >= self._policy.healthy
        self._end_server(kill=failure is not None and not failure.has_requests)
        return failure and replace(failure, was_healthy=was_healthy)

    def _end_server(self, *, kill: bool) -> None:
        """Stop the current server. kill: whether not to wait for its requests, which have failed or cannot end."""
        if self.server:
            if kill:
                self.server.kill()
            self.server.stop()
        self.server = None  # not earlier: a second signal kills the server that is being stopped

    def _watch(self, server: TritonServer) -> Failure | None:
        """Wait until the server fails, and return why; None if it was stopped."""
        processes = stubs(server.pid)
        with _Prober(server, self._policy) if self._policy else nullcontext() as prober:
            while not self._stopping.is_set():
                try:
                    code = server.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    pass
                else:
                    return _exit_failure(server, code)
                if ended := [pid for pid in processes if not runs(pid)]:
                    status = exit_code(ended[0])
                    how = "has ended" if status is None else how_ended(status)
                    return Failure("stub_died", f"The engine's process {ended[0]} {how}.")
                if reason := server.engine_failure:
                    self._stopping.wait(LAST_WORDS_SECONDS)
                    has_requests = reason.endswith(OTHERS_GO_ON)
                    return Failure("engine_failed", f"The engine has failed: {reason}.", has_requests=has_requests)
                if prober and prober.failure:
                    return prober.failure
        return None


class _Prober:
    """Probes a server on a thread of its own. `failure` is set once too many probes in a row have failed."""

    def __init__(self, server: TritonServer, policy: RestartPolicy):
        self.failure: Failure | None = None
        self._url, self._model = server.grpc_url, server.model_name
        self._policy = policy
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)

    def __enter__(self) -> _Prober:
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._stop.set()  # not joined: a probe of a server that hangs ends with its time limit

    def _run(self) -> None:
        failed = 0
        with Client(self._url, self._model) as client:
            while not self._stop.wait(self._policy.probe_interval):
                try:
                    probe(client, self._policy.probe_timeout)
                    failed = 0
                except PagedError as error:
                    failed += 1
                    if failed >= self._policy.failed_probes:
                        self.failure = _probe_failure(error)
                        return


def _probe_failure(error: PagedError) -> Failure:
    late = isinstance(error, UnreachableError) or error.code in ("DEADLINE_EXCEEDED", "CANCELLED")
    if late or STUB_HANGS in str(error):
        return Failure("not_responding", f"The server does not respond: {error}")
    return Failure("engine_failed", f"The engine answers with an error: {error}")


def _exit_failure(server: TritonServer, code: int) -> Failure:
    hint = " Releases before 25.07 end so after a large HTTP body." if code == -signal.SIGSEGV else ""
    return Failure("exited", f"tritonserver {how_ended(code)}.{hint}", server.log_tail())
