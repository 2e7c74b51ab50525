"""Runs Dynamo's processes on this machine: a worker for each of some servers, and a frontend."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import util
from pathlib import Path
from types import FrameType

import paged_backend
import paged_client
from paged_client.dynamo.settings import FrontendSettings, WorkerSettings
from paged_client.openai import keys
from paged_client.serving import trampoline
from paged_client.serving.environments import PackageEnvironment
from paged_client.serving.server_args import reachable

# The frontend's requirements conflict with other packages. aisimulate, for its planner, is on NVIDIA's own index only.
FRONTEND = PackageEnvironment(
    "dynamo", "ai-dynamo", "1.6.1", preinstall=("tritonclient[grpc]>=2.51", "numpy"), exclude=("aisimulate",)
)
START_SECONDS = 120.0  # time for the frontend to list the models
STOP_SECONDS = 40.0  # time for processes to finish open streams
POLL_SECONDS = 0.2
LASTED_SECONDS = 15.0  # a process that ends earlier will not start the next time either
MIGRATION_LIMIT = 3  # workers that may fail during a request
# The router mode "kv" adds up what a request costs each server, in blocks. With these options an open request costs two
# blocks. By default it costs all of its blocks, which is more than a conversation has cached (paged_bench/README.md).
_KV_ROUTER = ("--no-router-track-active-blocks", "--router-decode-active-request-weight", "2")
_DIRECTORY = "DYN_FILE_KV"  # where Dynamo's processes find each other, with the discovery backend "file"


def router_flags(mode: str) -> tuple[str, ...]:
    """Return the options of a frontend for a way to choose a server."""
    return ("--router-mode", mode, *(_KV_ROUTER if mode == "kv" else ()))


class Fleet:
    """Dynamo's processes for some servers. It may be used in the place of a gateway (`serving.launch.Gateway`).

    With the discovery backend `file` and without $DYN_FILE_KV, the processes find each other in a temporary directory.
    They listen at 127.0.0.1 then, apart from the frontend.

    Args:
        workers: one for each server, at least one.
        frontend: settings of the frontend; None: another process is the frontend.

    Raises EnvironmentSetupError if Dynamo's packages cannot be installed, ValueError if PAGED_API_KEYS is set.
    """

    needs_key = False

    def __init__(self, workers: Sequence[WorkerSettings], frontend: FrontendSettings | None = None) -> None:
        if frontend and os.environ.get(keys.VARIABLE):
            raise ValueError(f"{keys.VARIABLE}: Dynamo's frontend has no API keys; use the gateway, or unset it")
        has_runtime = util.find_spec("dynamo") is not None and util.find_spec("dynamo._core") is not None
        if frontend or not has_runtime:
            FRONTEND.ensure()
        self._workers, self._frontend = workers, frontend
        self._python = Path(sys.executable) if has_runtime else FRONTEND.python
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._began: dict[str, float] = {}  # time.monotonic() at the start of each process
        self._variables: dict[str, str] = {}
        self._lock = threading.RLock()  # held while a process is started again; a signal may interrupt `stop`
        self._stopping, self._failed = threading.Event(), threading.Event()

    @property
    def port(self) -> int:
        return self._frontend.port if self._frontend else 0

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers and the frontend."""
        return [process.pid for process in self._processes.values()]

    def start(self) -> None:
        """Start the processes, and wait until the frontend lists the models. Does nothing if they have been started.

        Raises OSError if a process ends, or the frontend takes longer than START_SECONDS.
        """
        if self._scratch is not None:
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="paged-dynamo-")
        self._variables = self._environment(Path(self._scratch.name))
        for settings in self._workers:
            command = [str(self._python), "-m", "paged_client.dynamo.worker", json.dumps(asdict(settings))]
            self._commands[f"worker of {settings.url}"] = command
        if self._frontend:
            self._commands["frontend"] = self._frontend_command(self._frontend)
        for name in self._commands:
            self._launch(name)
        if self._frontend:
            self._wait_for_models(self._frontend)
        threading.Thread(target=self._watch, name="dynamo", daemon=True).start()

    def _watch(self) -> None:
        """Start processes again that end by themselves, until one ends soon after its start."""
        while not self._stopping.wait(POLL_SECONDS):
            with self._lock:
                for name, ended in self._ended():
                    if self._stopping.is_set():
                        return
                    if time.monotonic() < self._began[name] + LASTED_SECONDS:
                        print(f"error: {ended}", file=sys.stderr, flush=True)
                        self._failed.set()
                        return
                    print(f"{ended}; it is started again", file=sys.stderr, flush=True)
                    self._launch(name)

    def _launch(self, name: str) -> None:
        self._began[name] = time.monotonic()
        self._processes[name] = subprocess.Popen(
            trampoline.wrapped(self._commands[name]),
            env=self._variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C does not reach it
        )

    def run(self) -> int:
        """Start the processes, and run until SIGTERM, Ctrl-C, or one that does not start. Return the exit code."""

        def stop(number: int, frame: FrameType | None) -> None:
            self.stop(at_once=self._stopping.is_set())

        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.start()
            if self._frontend:
                print(f"Dynamo's frontend: http://{self._frontend.host}:{self._frontend.port}/v1", flush=True)
            while not self._stopping.is_set() and not self._failed.is_set():
                time.sleep(POLL_SECONDS)
            return 1 if self._failed.is_set() else 0
        except OSError as error:
            if self._stopping.is_set():  # a signal has ended the processes while they were starting
                return 0
            print(f"paged dynamo: {error.strerror}", file=sys.stderr, flush=True)
            return 1
        finally:
            self.stop()
            self.join()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def stop(self, *, at_once: bool = False) -> None:
        """Accept no more requests, and let open streams finish, or cut them if `at_once`. Returns immediately."""
        self._stopping.set()
        with self._lock:
            for process in self._processes.values():
                with suppress(ProcessLookupError):
                    process.kill() if at_once else process.terminate()

    def join(self) -> None:
        """Wait until all processes have ended, after `stop`."""
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _frontend_command(self, frontend: FrontendSettings) -> list[str]:
        first = self._workers[0]
        planes = ["--discovery-backend", first.discovery, "--request-plane", first.request_plane]
        planes += ["--event-plane", first.event_plane] if first.event_plane else []
        return [
            *(str(FRONTEND.python), "-m", "dynamo.frontend", *planes, "--enable-anthropic-api"),
            *("--http-host", frontend.host, "--http-port", str(frontend.port)),
            *("--migration-limit", str(MIGRATION_LIMIT), *frontend.flags),
        ]

    def _wait_for_models(self, frontend: FrontendSettings) -> None:
        serving = [settings for settings in self._workers if settings.role != "prefill"]
        wanted = {settings.served_name or model for settings in serving for model in settings.models}
        deadline = time.monotonic() + START_SECONDS
        while not wanted <= _listed_models(frontend):
            for _, ended in self._ended():
                raise OSError(0, ended)
            if time.monotonic() > deadline:
                raise OSError(0, f"Dynamo's frontend did not list {', '.join(wanted)} within {START_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def _ended(self) -> Iterator[tuple[str, str]]:
        """Yield the names of processes that have ended, each with how it has."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                yield name, f"Dynamo's {name} has ended with exit code {process.returncode}"

    def _environment(self, scratch: Path) -> dict[str, str]:
        """Return the environment variables of all processes."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
        # The head of a response is sent with its first event, which otherwise may wait 40 ms for an acknowledgement.
        environment.setdefault("DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS", "10000")
        environment.setdefault("DYN_LOG", "error,dynamo_runtime::component::client=off")  # which logs its own end
        if self._python == FRONTEND.python:  # which has other packages than this environment
            environment["PYTHONPATH"] = str(_own_packages(scratch))
        if any(settings.discovery == "file" for settings in self._workers) and _DIRECTORY not in environment:
            (scratch / "discovery").mkdir()
            environment[_DIRECTORY] = str(scratch / "discovery")
            environment["DYN_SELF_HOST_METADATA"] = "0"  # all read the model's files
            for name in ("TCP_RPC", "TCP_RESPONSE_STREAM", "EVENT_PLANE"):
                environment.setdefault(f"DYN_{name}_HOST", "127.0.0.1")
        return environment


def _own_packages(scratch: Path) -> Path:
    """Return a directory with the packages that a worker imports, and no others."""
    directory = scratch / "packages"
    directory.mkdir()
    for package in (paged_client, paged_backend):
        source = Path(str(package.__file__)).parent
        (directory / source.name).symlink_to(source)
    return directory


def _listed_models(frontend: FrontendSettings) -> set[str]:
    """Return the models that a frontend lists; none while it does not answer."""
    connection = http.client.HTTPConnection(reachable(frontend.host), frontend.port, timeout=10)
    try:
        connection.request("GET", "/v1/models")
        listed = json.loads(connection.getresponse().read())
        return {model["id"] for model in listed["data"]}
    except (OSError, ValueError, LookupError, http.client.HTTPException):
        return set()
    finally:
        connection.close()
