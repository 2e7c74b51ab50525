"""Runs `paged serve`: a Triton server in the foreground, until Ctrl-C."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from paged_backend.utils.startup import ONLY_LABELS
from paged_client.serving.console import Console
from paged_client.serving.server_args import check_restart_args
from paged_client.serving.server_files import ServerNotFoundError, user_cache_directory
from paged_client.serving.supervisor import Create, RestartPolicy, Supervisor
from paged_client.serving.tritonserver import ServerError, TritonServer

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(
    model: str = "demo",
    options: Mapping[str, object] | None = None,
    *,
    http_port: int = 8000,
    grpc_port: int = 8001,
    metrics_port: int = 8002,
    server_args: Sequence[str] = (),
    multi_lora: Path | None = None,
    verbose: bool = False,
    log_file: Path | None = None,
    restart: RestartPolicy | None = None,
) -> int:
    """Serve `model` until Ctrl-C, SIGTERM or SIGHUP, and return the exit code: 0 after a clean stop, 1 for an error.

    The first signal lets open streams finish, for at most 30 s. The second one kills the server. Progress, a
    summary of what was loaded, and the server's warnings and errors go to standard error; with `verbose`, the whole log
    does. An error before the server is ready is printed as a single message. log_file: file for the whole log.
    restart: when to start a failed server again; None: never.
    """
    console = Console(verbose)

    def create(environment: Mapping[str, str], append_log: bool) -> TritonServer:
        server = TritonServer(
            model,
            options,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            server_args=server_args,
            multi_lora=multi_lora,
            echo=console.log_line,
            log_file=log_file,
            append_log=append_log,
            environment=environment,
        )
        if log_file and not append_log:
            console.say(f"Log: {log_file}")
        return server

    try:
        if restart:
            check_restart_args(server_args)
            return _supervise(create, console, restart, log_file)
        return _run(create({}, False), console, log_file)
    except ServerError as error:
        console.say(f"error: {error}{_where_log_is(log_file)}")
        return 1
    except (ServerNotFoundError, ValueError, OSError) as error:
        console.say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        console.say("Stopped before the server was started.")
        return 130


def default_log_file(http_port: int) -> Path:
    """Return the file for the log of the server on this port, which no other server of this machine uses."""
    return user_cache_directory() / "logs" / f"serve-{http_port}.log"


def _where_log_is(log_file: Path | None) -> str:
    return f"\nThe server's log is in {log_file}" if log_file else ""


def _supervise(create: Create, console: Console, policy: RestartPolicy, log_file: Path | None) -> int:
    stopping = threading.Event()
    supervisor = Supervisor(create, console, policy, stopping, ready_message, log_file)
    with _signals_forwarded(lambda: supervisor.server, console, stopping):
        supervisor.run()
    console.say("Stopped.")
    return 0


def _run(server: TritonServer, console: Console, log_file: Path | None) -> int:
    stopping = threading.Event()
    with _signals_forwarded(lambda: server, console, stopping):
        try:
            server.start()
            server.wait_ready(progress=console.loading)
            console.ready(ready_message(server))
            code = _wait(server, stopping)
        except ServerError:
            if not stopping.is_set():
                raise
            code = 0  # 0 although it was not ready: a signal stopped it while it was loading
        finally:
            server.stop()
    if stopping.is_set():
        console.say("Stopped.")
        return 0
    reason = f"tritonserver exited with code {code}; the last lines of its log:\n{server.log_tail()}"
    console.say(f"error: {reason}{_where_log_is(log_file)}")
    return code if code > 0 else 1


def _wait(server: TritonServer, stopping: threading.Event) -> int:
    """Wait until the server exits and return its exit code, or until `stopping` is set and return 0."""
    while not stopping.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return server.wait(0.2)
    return 0


@contextlib.contextmanager
def _signals_forwarded(
    current: Callable[[], TritonServer | None], console: Console, stopping: threading.Event
) -> Iterator[None]:
    """Handle signals: the first one terminates the server and sets `stopping`, the next one kills the server.

    current: returns the server that runs; None between two servers.
    """

    def handle(number: int, frame: object) -> None:
        server = current()
        if stopping.is_set():
            if server:
                server.kill()
            return
        stopping.set()
        if server:
            server.terminate()
            console.say("Stopping: waiting for open streams to finish. Press Ctrl-C again to stop immediately.")

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ready_message(server: TritonServer) -> str:
    """Return the endpoints of the server and commands to try."""
    return "\n".join(
        [
            f"Ready.  HTTP {server.http_url}   gRPC {server.grpc_url}   metrics {server.metrics_url}/metrics",
            "Try:",
            *(f"  {command}" for command in _examples(server)),
            "Press Ctrl-C to stop the server.",
        ]
    )


def _examples(server: TritonServer) -> list[str]:
    """Return commands that the served model can answer."""
    ports = "" if server.grpc_url == "localhost:8001" else f" --url {server.grpc_url}"
    url = f"{server.http_url}/v2/models/{server.model_name}"
    if ONLY_LABELS in server.log():
        body = json.dumps({"classification_request": json.dumps({"input": "A great film."})})
        return [
            f"curl {url}/generate -d '{body}'",
            f"{_paged()} openai{ports}  # a gateway with /classify, /score and /rerank",
        ]
    body = json.dumps({"text_input": "The capital of France is", "stream": True, "max_tokens": 16, "temperature": 0})
    return [
        f"curl -N {url}/generate_stream -d '{body}'",
        f"{_paged()} generate 'The capital of France is' --temperature 0 --max-tokens 16{ports}",
    ]


def _paged() -> str:
    """Return how to call the command line: "paged" if it is on PATH, otherwise its path."""
    beside = Path(sys.executable).with_name("paged")
    if shutil.which("paged") or not beside.exists():
        return "paged"
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)
