"""A tritonserver with the engine in it, as an object: `paged serve` runs one, and so do the tests."""

import contextlib
import http.client
import os
import re
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from client.serving.ports import choose_ports
from client.serving.repository import MODEL_NAME, resolve_models, write_repository
from client.serving.server_files import REPOSITORY_ROOT, ServerFiles, find_server, prepend
from client.serving.server_log import ServerLog

LOAD_TIMEOUT = 3600.0  # seconds; loading ends by itself, so this only bounds a hang
UNLOAD_TIMEOUT = 5  # seconds that a server without open requests gets to begin to unload its model, and to end that
EXIT_TIMEOUT = 30  # seconds that open streams get to end in, tritonserver's own default

# PR_SET_PDEATHSIG (prctl 1): the server gets SIGTERM when the launcher dies of anything, SIGKILL included.
# A process of its own does that before it becomes the server, since a preexec_fn is unsafe under threads;
# the comparison catches a launcher that died before the call.
_TRAMPOLINE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15);"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


_OWN_FLAGS = (
    *("--model-repository", "--model-store", "--http-port", "--grpc-port", "--metrics-port"),
    *("--allow-http", "--allow-metrics", "--backend-directory", "--model-control-mode", "--http-address"),
)


class ServerError(RuntimeError):
    """The server did not start, or ended; the message holds its own reason."""


class TritonServer:
    """A tritonserver that serves one model, with a model repository, ports and shared memory of its own.

    Use it as a context manager: entering starts it and waits until it is ready. It must be entered from a
    thread that outlives the server, because Linux ties the server's life to that thread.

    Args:
        model: a Hugging Face directory, a GGUF file, a name on the hub, or "demo" for the demo model, prepared if it is
            missing.
        options: engine options, laid over those of the repository's model.json.
        http_port, grpc_port, metrics_port: 0 takes a free one; the attributes hold the real ones.
        server_args: more flags for tritonserver.
        echo: gets each line of the server's log as it comes.
        repository: a directory like model_repository/ in place of the project's own.
        multi_lora: the file that lists adapters, in place of the repository's own. It stays where it is, so that
            what is written to it is served; the option `enable_lora` is set with it.

    Raises ValueError for a model that does not exist or a port in use, ServerNotFoundError, ServerError.
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
        repository: Path = REPOSITORY_ROOT / "model_repository",
        multi_lora: Path | None = None,
    ) -> None:
        ports = choose_ports(http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
        self.http_port, self.grpc_port, self.metrics_port = ports
        self._multi_lora = multi_lora
        options = {**({"enable_lora": True} if multi_lora else {}), **(options or {})}
        self._options = resolve_models({**options, "model": model})
        check_server_args(server_args)
        self._server_args = list(server_args)
        self._repository = repository
        self._files = find_server()
        # Two servers on one host must not share a name prefix in /dev/shm.
        self.shm_prefix = f"paged_{os.getpid()}_{secrets.token_hex(4)}_"
        self._log = ServerLog(echo)
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

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
        return f"localhost:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"localhost:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"localhost:{self.metrics_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def log(self) -> str:
        """What the server has printed so far: all of it while it loads, then the newest part."""
        return self._log.text()

    def log_tail(self) -> str:
        """The log's last lines."""
        return self._log.tail()

    def start(self) -> None:
        """Start the server without waiting for it."""
        assert self._process is None, "a TritonServer starts once"
        self._scratch = tempfile.TemporaryDirectory(prefix="paged-server-")
        models = Path(self._scratch.name)
        write_repository(self._repository, models, self._options, self._multi_lora)
        trampoline = [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid())]
        self._process = subprocess.Popen(
            [*trampoline, *self._command(models)],
            env=server_environment(self._files),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A terminal's Ctrl-C then reaches the launcher only, which passes it on once.
            start_new_session=True,
        )
        self._log.follow(self._process)

    def _command(self, models: Path) -> list[str]:
        command = [
            str(self._files.binary),
            f"--model-repository={models}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--exit-timeout-secs={EXIT_TIMEOUT}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            # Starting at 16 MiB saves most prompts the growing; a container's default /dev/shm has 64.
            f"--backend-config=python,shm-default-byte-size={16 << 20}",
        ]
        if self._files.backend_directory:
            command.append(f"--backend-directory={self._files.backend_directory}")
        return command + self._server_args

    def wait_ready(self, timeout: float = LOAD_TIMEOUT, progress: Callable[[float], None] | None = None) -> None:
        """Wait until the server and its model are ready, for `timeout` seconds at most.

        `progress` is called with the seconds waited, about ten times a second. Raises ServerError with the
        server's own reason where it ends instead, or with its last lines after the timeout.
        """
        begin = time.monotonic()
        while not self._is_ready():
            waited = time.monotonic() - begin
            if progress:
                progress(waited)
            if waited > timeout:
                raise ServerError(f"not ready after {timeout:.0f} s; its last lines:\n{self._log.tail()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.wait(0.1)
                raise ServerError(self._log.failure(code))

    def _is_ready(self) -> bool:
        """Whether the model answers ready. A server that has another model repository is not ours."""
        reply = _get(self.http_port, f"/v2/models/{MODEL_NAME}/ready")
        return reply is not None and reply[0] == 200

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the server ends; its exit code. Raises subprocess.TimeoutExpired."""
        assert self._process is not None, "the server was not started"
        code = self._process.wait(timeout)
        self._log.join()
        return code

    def terminate(self) -> None:
        """Ask the server to end its open streams and stop. Returns at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Stop the server at once, with its stubs."""
        if self._process is not None:
            # The session is the server's own, so its group holds the server and its stubs alone.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self, timeout: float = EXIT_TIMEOUT + 5) -> int | None:
        """Stop the server, by force after `timeout` seconds, and remove what it left; its exit code.

        Does nothing (and returns None) where it was not started, and may be called again.
        """
        if self._process is None:
            return None
        self.terminate()
        self._wait_for_the_end(timeout)
        self.kill()
        code = self.wait()
        self._clean()
        return code

    def _wait_for_the_end(self, timeout: float) -> None:
        """Wait until the server has ended or has nothing left to do: by itself it does not end while a client keeps
        an idle gRPC stream open, and unloads nothing while one keeps an HTTP connection."""
        assert self._process is not None
        busy, unloads = time.monotonic(), False
        deadline = busy + timeout
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
            if self._has_open_requests():
                busy = time.monotonic()
            elif not unloads and self._log.unloading_started():
                busy, unloads = time.monotonic(), True  # all of the time is the models' own
            elif time.monotonic() >= busy + UNLOAD_TIMEOUT:
                return

    def _has_open_requests(self) -> bool:
        """By the engine's own metrics: the server itself does not count a stream as in flight."""
        if self._options.get("disable_log_stats"):
            return True
        reply = _get(self.metrics_port, "/metrics")
        if reply is None:
            return True
        return any(float(count) > 0 for count in re.findall(r"^paged_requests\{.*\} (\S+)$", reply[1], re.M))

    def _clean(self) -> None:
        for region in Path("/dev/shm").glob(f"{self.shm_prefix}*"):
            region.unlink(missing_ok=True)
        if self._scratch:
            self._scratch.cleanup()


def _get(port: int, path: str) -> tuple[int, str] | None:
    """Status and text of what this machine's server answers; None where it does not."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def check_server_args(arguments: Sequence[str]) -> None:
    """Raises ValueError for a flag of tritonserver that would contradict what is set here."""
    for argument in arguments:
        if argument.partition("=")[0] in _OWN_FLAGS:
            raise ValueError(f"{argument}: is not for tritonserver alone; paged serve sets it, or needs it as it is")


def server_environment(files: ServerFiles) -> dict[str, str]:
    """The environment in which the server's Python stub finds this interpreter, its packages and us."""
    environment = dict(os.environ)
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    prepend(environment, "PYTHONPATH", [REPOSITORY_ROOT, REPOSITORY_ROOT / "kernels", *map(Path, sorted(packages))])
    prepend(environment, "LD_LIBRARY_PATH", list(files.library_path))
    prepend(environment, "PATH", [Path(sys.executable).parent])
    if files.backend_directory:
        # libpython looks for its standard library where it was built; it may have been moved since.
        environment["PYTHONHOME"] = sys.base_prefix
    return environment
