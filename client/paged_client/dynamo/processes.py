"""Runs Dynamo's processes: a worker for each server, and a frontend for `paged serve --openai`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from types import FrameType

from paged_client.dynamo.settings import WorkerSettings
from paged_client.serving.environments import PackageEnvironment

# The frontend has requirements that conflict with other packages. aisimulate serves only planning.
FRONTEND = PackageEnvironment("dynamo", "ai-dynamo", "1.6.1", exclude=("aisimulate",))
STOP_SECONDS = 40.0  # time for workers and the frontend to finish open streams


def run_worker(settings: WorkerSettings) -> int:
    """Run the worker of one server in this process until SIGTERM or Ctrl-C, and return the exit code."""
    os.environ.update(settings.environment)
    from paged_client.dynamo import worker  # imports Dynamo's runtime, which reads the environment

    return worker.run(settings)


def run_workers(workers: Sequence[WorkerSettings]) -> int:
    """Run a worker process for each server until SIGTERM, Ctrl-C, or the end of one. Return the exit code."""
    processes = [_start(settings) for settings in workers]

    def stop(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.terminate()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        wait([process.sentinel for process in processes])
        stop(signal.SIGTERM, None)
        for process in processes:
            process.join()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return max(abs(process.exitcode or 0) for process in processes)


def _start(settings: WorkerSettings) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=_main, args=(settings,), daemon=True)
    process.start()
    return process


def _main(settings: WorkerSettings) -> None:
    sys.exit(run_worker(settings))


class Frontend:
    """Dynamo's frontend on this machine with a worker for one server, for `paged serve --openai`.

    The processes find each other in a temporary directory, and listen at 127.0.0.1; the frontend listens at `host`.

    Args:
        server_url: gRPC endpoint of the server.
        model: name of its model.
        host, port: address of the frontend.

    Raises EnvironmentSetupError if the frontend's packages cannot be installed.
    """

    needs_key = False  # the frontend has no API keys

    def __init__(self, server_url: str, model: str, host: str, port: int) -> None:
        FRONTEND.ensure()
        self.port = port
        self._host, self._server_url, self._model = host, server_url, model
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[subprocess.Popen[bytes] | multiprocessing.process.BaseProcess] = []

    def start(self) -> None:
        """Start the worker and the frontend. Does nothing if they run."""
        if self._directory is not None:
            return
        self._directory = tempfile.TemporaryDirectory(prefix="paged-dynamo-")
        local = {
            "DYN_FILE_KV": self._directory.name,
            **{f"DYN_{name}_HOST": "127.0.0.1" for name in ("TCP_RPC", "TCP_RESPONSE_STREAM", "EVENT_PLANE")},
        }
        worker = WorkerSettings(
            self._server_url, (self._model,), discovery="file", event_plane="zmq", environment=local
        )
        command = [
            *(FRONTEND.python, "-m", "dynamo.frontend", "--http-host", self._host, "--http-port", str(self.port)),
            *("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"),
            *("--enable-anthropic-api", "--migration-limit", "3"),
        ]
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        frontend = subprocess.Popen(
            [str(part) for part in command], env=environment | local, start_new_session=True, stdin=subprocess.DEVNULL
        )
        self._processes = [_start(worker), frontend]

    def stop(self, *, at_once: bool = False) -> None:
        """Accept no more requests, and let open streams finish, or cut them if `at_once`. Returns immediately."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill() if at_once else process.terminate()

    def join(self) -> None:
        """Wait until both processes have ended, after `stop`."""
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                if isinstance(process, subprocess.Popen):
                    process.wait(max(0.1, deadline - time.monotonic()))
                else:
                    process.join(max(0.1, deadline - time.monotonic()))
        self.stop(at_once=True)
        if self._directory is not None:
            self._directory.cleanup()
