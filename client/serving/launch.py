"""`paged serve`: a model on a real Triton server, in the foreground, until Ctrl-C."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from client.serving.repository import MODEL_NAME
from client.serving.server_files import ServerNotFoundError
from client.serving.tritonserver import ServerError, TritonServer

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
) -> int:
    """Serve `model` until Ctrl-C, SIGTERM or SIGHUP; the exit code, 0 after a clean stop.

    The first signal lets open streams end, for 30 s at most; the second stops the server at once. The
    server's warnings and errors go to standard error, all of its log where `verbose`. What goes wrong before
    it is ready is told in one message there, and gives 1.
    """
    console = Console(verbose)
    try:
        server = TritonServer(
            model,
            options,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            server_args=server_args,
            multi_lora=multi_lora,
            echo=console.log_line,
        )
        return _run(server, console)
    except (ServerNotFoundError, ServerError, ValueError, OSError) as error:
        console.say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        console.say("Stopped before the server was started.")
        return 130


def _run(server: TritonServer, console: "Console") -> int:
    stopping = threading.Event()
    with _signals_forwarded(server, console, stopping):
        try:
            server.start()
            server.wait_ready(progress=console.loading)
            console.ready(ready_message(server))
            code = _wait(server, stopping)
        except ServerError:
            if not stopping.is_set():
                raise
            code = 0  # asked to stop while it was loading
        finally:
            server.stop()
    if stopping.is_set():
        console.say("Stopped.")
        return 0
    console.say(f"error: tritonserver ended with code {code}; its last lines:\n{server.log_tail()}")
    return code if code > 0 else 1


def _wait(server: TritonServer, stopping: threading.Event) -> int:
    """Wait until the server ends by itself (its exit code) or is asked to (0)."""
    while not stopping.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return server.wait(0.2)
    return 0


@contextlib.contextmanager
def _signals_forwarded(server: TritonServer, console: "Console", stopping: threading.Event) -> Iterator[None]:
    """Inside it the first signal asks the server to stop and sets `stopping`; the next one kills it."""

    def handle(number: int, frame: object) -> None:
        if stopping.is_set():
            server.kill()
        else:
            stopping.set()
            server.terminate()
            console.say("Stopping: open streams may end, Ctrl-C again stops at once.")

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ready_message(server: TritonServer) -> str:
    """Where the server is, and what to try."""
    ports = "" if server.grpc_port == 8001 else f" --url {server.grpc_url}"
    body = json.dumps({"text_input": "The capital of France is", "stream": True, "max_tokens": 16, "temperature": 0})
    return "\n".join(
        [
            f"Ready.  HTTP {server.http_url}   gRPC {server.grpc_url}   metrics {server.metrics_url}/metrics",
            "Try:",
            f"  curl -N {server.http_url}/v2/models/{MODEL_NAME}/generate_stream -d '{body}'",
            f"  {_paged()} generate 'The capital of France is' --temperature 0 --max-tokens 16{ports}",
            "Ctrl-C stops the server.",
        ]
    )


def _paged() -> str:
    """How to call the command line: by its name where that is on PATH."""
    beside = Path(sys.executable).with_name("paged")
    if shutil.which("paged") or not beside.exists():
        return "paged"
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)


class Console:
    """What a person sees on standard error: progress while the model loads, then only what matters."""

    # Triton's own lines begin like I1231 (information), W1231 or E1231; anything else is a program's output.
    _INFORMATION = re.compile(r"I\d{4} |[+|\n]|Signal \(")
    _COMPLAINT = re.compile(r" (WARNING|ERROR) paged_llm: ")
    _INTERVAL = 10.0  # seconds between progress lines where they cannot be drawn over each other

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._draws = sys.stderr.isatty() and not verbose
        self._is_ready = False
        self._next_line = 0.0

    def log_line(self, line: str) -> None:
        """One line of the server's log. While it loads all but our own complaints is kept back: a failure is told in
        one message."""
        if self._verbose or self._COMPLAINT.search(line) or (self._is_ready and not self._INFORMATION.match(line)):
            sys.stderr.write(line)

    def loading(self, seconds: float) -> None:
        if self._draws:
            spinner = "|/-\\"[int(seconds * 10) % 4]
            sys.stderr.write(f"\r\033[K{spinner} Loading the model, {seconds:.0f} s")
            sys.stderr.flush()
        elif seconds >= self._next_line:
            self._next_line = seconds + self._INTERVAL
            self.say(f"Loading the model, {seconds:.0f} s")

    def ready(self, message: str) -> None:
        self._is_ready = True
        self._clear()
        print(message, flush=True)

    def say(self, message: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more
            self._clear()
            print(message, file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._draws:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
