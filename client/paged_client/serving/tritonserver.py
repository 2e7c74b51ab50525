"""Runs a tritonserver that serves one model. Used by `paged serve`, the benchmarks and the tests."""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from paged_backend.utils import failure
from paged_client.openai import keys
from paged_client.serving import trampoline
from paged_client.serving.ports import choose_ports
from paged_client.serving.repository import resolve_models, served_name, write_repository
from paged_client.serving.scratch import Scratch
from paged_client.serving.server_args import LOOPBACK, check_server_args, hosts, listening_at
from paged_client.serving.server_files import MODEL_REPOSITORY, REPOSITORY_ROOT, ServerFiles, find_server, prepend
from paged_client.serving.server_log import PROCESS_DIED, ServerLog
from paged_client.serving.stubs import LoadingStubs

LOAD_TIMEOUT = 3600.0  # seconds; loading has its own limits, this one only bounds a hang
UNLOAD_TIMEOUT = 5  # seconds for an idle server to start unloading its model, and again to finish
EXIT_TIMEOUT = 30  # seconds for open streams to finish; tritonserver's default


class ServerError(RuntimeError):
    """The server did not start or has exited. The message has the server's reason."""


class TritonServer:
    """A tritonserver that serves one model, with its own model repository, ports and shared memory.

    It is a context manager: entering it starts the server and waits until it is ready. Enter it from a thread that
    outlives the server, because Linux ends the server with the thread that started it.

    Args:
        model: Hugging Face directory, GGUF file, name on the hub, or "demo" for the demo model, which is downloaded if
            it is missing.
        options: engine options, which override those in the repository's model.json.
            `served_model_name` is also the attribute `model_name`.
        http_port, grpc_port, metrics_port: 0 chooses a free port. The attributes have the chosen ports.
        server_args: further options for tritonserver. Without options for its addresses it listens at 127.0.0.1.
        echo: called with each line of the server's log.
        repository: model repository to use instead of the project's.
        engine_only: serve only the engine's model of the repository, which is ready sooner.
        log_file: file for the server's whole log, which `start` overwrites. Its directory is created.
        append_log: keep what the file has.
        environment: further environment variables of the server.
        multi_lora: JSON file that lists LoRA adapters, instead of the repository's. The server reads this file itself,
            so that later changes take effect. Sets the option `enable_lora`.

    Raises ValueError for a model that does not exist or a port that is in use, ServerNotFoundError, ServerError.
    """

    def __init__(
        self,
        model: str | Path,
        options: Mapping[str, object] | None = None,
        *,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        server_args: Sequence[str] = (),
        echo: Callable[[str], None] | None = None,
        repository: Path = MODEL_REPOSITORY,
        engine_only: bool = False,
        multi_lora: Path | None = None,
        log_file: Path | None = None,
        append_log: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        ports = choose_ports(http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
        self.http_port, self.grpc_port, self.metrics_port = ports
        self._multi_lora = multi_lora
        options = {**({"enable_lora": True} if multi_lora else {}), **(options or {})}
        self._options = resolve_models({**options, "model": model})
        self.model_name = served_name(self._options)
        check_server_args(server_args)
        self._server_args = [*listening_at(LOOPBACK), *server_args]  # of repeated options the last one counts
        self._hosts = hosts(self._server_args)
        self._repository, self._engine_only = repository, engine_only
        self._files = find_server()
        self._scratch = Scratch()
        self.shm_prefix = self._scratch.shm_prefix
        self._log = ServerLog(echo, log_file, append=append_log)
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "TritonServer":
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        return f"{self._hosts.http}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{self._hosts.grpc}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"{self._hosts.metrics}:{self.metrics_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def log(self) -> str:
        """Return the log so far. Once it exceeds ServerLog.LIMIT lines, the oldest part is dropped."""
        return self._log.text()

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        return self._log.tail()

    @property
    def engine_failure(self) -> str | None:
        """Why the engine answers no more requests; None if it has not said so."""
        return self._log.engine_failure

    def start(self) -> None:
        """Start the server without waiting for it."""
        assert self._process is None, "a TritonServer starts once"
        self._log.open()
        self._scratch.create()
        models = self._scratch.path / "models"
        write_repository(self._repository, models, self._options, self._multi_lora, engine_only=self._engine_only)
        self._process = subprocess.Popen(
            trampoline.wrapped(self._command(models)),
            env=server_environment(self._files) | self._environment | {failure.MARK: self._log.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # In a new session, Ctrl-C reaches only the launcher, which then terminates the server.
            start_new_session=True,
        )
        self._log.follow(self._process)

    def _command(self, models: Path) -> list[str]:
        arguments = [
            f"--model-repository={models}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--exit-timeout-secs={EXIT_TIMEOUT}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            # 16 MiB are enough for most requests without growing; the default /dev/shm of a container has 64 MiB.
            f"--backend-config=python,shm-default-byte-size={16 << 20}",
        ]
        if self._repository == MODEL_REPOSITORY:  # its configurations are complete
            arguments.append("--disable-auto-complete-config")  # would start the process of each model twice
        return self._files.command([*arguments, *self._server_args])

    def wait_ready(self, timeout: float = LOAD_TIMEOUT, progress: Callable[[float], None] | None = None) -> None:
        """Wait until the server and its model are ready.

        Args:
            timeout: maximum time to wait, in seconds.
            progress: called about ten times per second with the seconds waited.

        Raises ServerError with the server's reason if it exits, or with the last lines of its log after the timeout, or
        if a process of its models has died. Such a server is killed, because it would not end by itself.
        """
        begin, loading = time.monotonic(), LoadingStubs(self.pid)
        while not self._is_ready():
            waited = time.monotonic() - begin
            if progress:
                progress(waited)
            if waited > timeout:
                raise ServerError(f"not ready after {timeout:.0f} s; its last lines:\n{self._log.tail()}")
            if dead := loading.died():
                self.kill()
                raise ServerError(f"{PROCESS_DIED} (process {dead}); the last lines of the log:\n{self._log.tail()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.wait(0.1)
                raise ServerError(self._log.failure(code))

    def _is_ready(self) -> bool:
        """Return whether the model is ready, and the metrics, which the server starts last.

        Another server on the port does not have the model and is not ready.
        """
        reply = _get(self.http_url, f"/v2/models/{self.model_name}/ready")
        return reply is not None and reply[0] == 200 and _get(self.metrics_url, "/metrics") is not None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the server exits and return its exit code. Raises subprocess.TimeoutExpired."""
        assert self._process is not None, "the server was not started"
        code = self._process.wait(timeout)
        self._log.join()
        return code

    def terminate(self) -> None:
        """Send SIGTERM, after which the server finishes its open streams and exits. Returns immediately."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the server and the stub processes of its Python backend."""
        if self._process is not None:
            # The server has its own session, so its process group has only the server and its stubs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self, timeout: float = EXIT_TIMEOUT + 5) -> int | None:
        """Stop the server, remove its files and shared memory, and return its exit code.

        After `timeout` seconds the server is killed. Returns None if it was not started. May be called repeatedly.
        """
        if self._process is None:
            return None
        self.terminate()
        self._wait_until_exited_or_idle(timeout)
        self.kill()
        code = self.wait()
        self._scratch.remove()
        return code

    def _wait_until_exited_or_idle(self, timeout: float) -> None:
        """Wait until the server has exited, or has no open requests and does not finish unloading.

        A server does not exit while a client keeps an idle gRPC stream open, and does not unload its models while one
        keeps an HTTP connection open.
        """
        assert self._process is not None
        last_busy, unloading = time.monotonic(), False
        deadline = last_busy + timeout
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
            if self._has_open_requests():
                last_busy = time.monotonic()
            elif not unloading and self._log.unloading_started():
                last_busy, unloading = time.monotonic(), True  # reset, so that unloading gets the full UNLOAD_TIMEOUT
            elif time.monotonic() >= last_busy + UNLOAD_TIMEOUT:
                return

    def _has_open_requests(self) -> bool:
        """Return whether the engine's metrics show requests: the server does not count open streams itself."""
        if self._options.get("disable_log_stats"):
            return True
        reply = _get(self.metrics_url, "/metrics")
        if reply is None:
            return True
        return any(float(count) > 0 for count in re.findall(r"^paged_requests\{.*\} (\S+)$", reply[1], re.M))


def _get(address: str, path: str) -> tuple[int, str] | None:
    """Return the status and the body of a GET request to HOST:PORT; None without a reply."""
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def server_environment(files: ServerFiles) -> dict[str, str]:
    """Return an environment in which the server's Python stub finds this interpreter, its packages and this project."""
    environment = {name: value for name, value in os.environ.items() if name != keys.VARIABLE}  # the gateway's API keys
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    prepend(environment, "PYTHONPATH", [REPOSITORY_ROOT, REPOSITORY_ROOT / "kernels", *map(Path, sorted(packages))])
    prepend(environment, "LD_LIBRARY_PATH", list(files.library_path))
    prepend(environment, "PATH", [Path(sys.executable).parent])
    if files.backend_directory:
        # libpython looks for the standard library where it was built, which may not exist on this machine.
        environment["PYTHONHOME"] = sys.base_prefix
    return environment
