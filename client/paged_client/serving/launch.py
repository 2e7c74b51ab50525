"""Runs `paged serve`: a Triton server in the foreground, until Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from paged_backend.utils.machine import user_cache_directory
from paged_backend.utils.startup import NO_CHAT, ONLY_EMBEDDINGS, ONLY_LABELS
from paged_client.serving.console import Console
from paged_client.serving.environments import EnvironmentSetupError
from paged_client.serving.ports import choose_ports
from paged_client.serving.repository import served_name
from paged_client.serving.server_args import (
    LOOPBACK,
    check_grpc_args,
    hosts,
    listening_address,
    listening_at,
    open_addresses,
)
from paged_client.serving.server_files import ServerNotFoundError
from paged_client.serving.supervisor import Create, RestartPolicy, Supervisor
from paged_client.serving.tritonserver import ServerError, TritonServer

_OPEN = (
    "Warning: open to other machines: {addresses}. Triton's ports have no encryption and no authentication: who reaches"
    " them may send requests, read the metrics and the model's configuration, and change the server's log settings."
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(
    model: str = "demo",
    options: Mapping[str, object] | None = None,
    *,
    host: str = LOOPBACK,
    http_port: int = 8000,
    grpc_port: int = 8001,
    metrics_port: int = 8002,
    openai_port: int | None = None,
    dynamo: bool = False,
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
    host: address at which the server and the gateway listen; addresses in `server_args` replace it.
    restart: when to start a failed server again; None: never. openai_port: port of an OpenAI gateway, which runs in
    this process from the time when the server is ready; None: there is none. A port of 0 chooses a free one.
    dynamo: whether Dynamo's frontend takes the gateway's place.
    """
    console = Console(verbose)
    server_args = [*listening_at(host), *server_args]

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
        wanted = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
        wanted |= {} if openai_port is None else {"openai": openai_port}
        http_port, grpc_port, metrics_port, *_ = ports = choose_ports(
            **{f"--{name}-port": port for name, port in wanted.items()}
        )
        if opened := open_addresses(server_args):
            console.say(_OPEN.format(addresses=", ".join(opened)))
        if restart:
            check_grpc_args(server_args, "the probes of --restart")
        gateway = None
        if openai_port is not None:
            check_grpc_args(server_args, "the requests of --openai-port")
            url, name = f"{hosts(server_args).grpc}:{grpc_port}", served_name(options or {})
            gateway = _gateway(url, name, listening_address(server_args), ports[3], dynamo=dynamo)
        return _supervise(create, console, gateway, restart, log_file)
    except ServerError as error:
        console.say(f"error: {error}{_where_log_is(log_file)}")
        return 1
    except (ServerNotFoundError, EnvironmentSetupError, ValueError, OSError) as error:
        console.say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        console.say("Stopped before the server was started.")
        return 130


class Gateway(Protocol):
    """An HTTP server for OpenAI's clients, beside a server: `BackgroundGateway`, or Dynamo's processes."""

    needs_key: bool

    @property
    def port(self) -> int: ...

    def start(self) -> None: ...

    def stop(self, *, at_once: bool = False) -> None: ...

    def join(self) -> None: ...


def _gateway(url: str, model: str, host: str, port: int, *, dynamo: bool) -> Gateway:
    # Imported on use: without a gateway the web framework is not needed.
    if dynamo:
        from paged_client.dynamo.processes import Fleet, router_flags
        from paged_client.dynamo.settings import FrontendSettings, WorkerSettings

        worker = WorkerSettings(url, (model,), discovery="file", event_plane="zmq", publishes=False)
        return Fleet([worker], FrontendSettings(host, port, router_flags("round-robin")))
    from paged_client.openai.command import BackgroundGateway

    return BackgroundGateway(url, model, host, port)


def default_log_file(http_port: int) -> Path:
    """Return the file for the log of the server on this port, which no other server of this machine uses."""
    return user_cache_directory() / "logs" / f"serve-{http_port}.log"


def _where_log_is(log_file: Path | None) -> str:
    return f"\nThe server's log is in {log_file}" if log_file else ""


def _supervise(
    create: Create,
    console: Console,
    gateway: Gateway | None,
    policy: RestartPolicy | None,
    log_file: Path | None,
) -> int:
    stopping = threading.Event()
    on_ready = partial(_on_ready, gateway=gateway)
    supervisor = Supervisor(create, console, policy, stopping, on_ready, log_file)
    with _signals_forwarded(lambda: supervisor.server, gateway, console, stopping):
        supervisor.run()
    console.say("Stopped.")
    return 0


def _on_ready(server: TritonServer, gateway: Gateway | None) -> str:
    """Start the gateway of a server that is ready, and return what to print. Raises ValueError for a port in use."""
    if gateway:
        try:
            gateway.start()
        except OSError as error:
            raise ValueError(f"--openai-port={gateway.port}: {error.strerror}") from None
    return ready_message(server, gateway)


@contextlib.contextmanager
def _signals_forwarded(
    current: Callable[[], TritonServer | None],
    gateway: Gateway | None,
    console: Console,
    stopping: threading.Event,
) -> Iterator[None]:
    """Handle signals: the first one terminates the server and sets `stopping`, the next one kills the server.

    The gateway is stopped in the same way, and waited for at the end.

    current: returns the server that runs; None between two servers.
    """

    def handle(number: int, frame: object) -> None:
        server = current()
        if gateway:
            gateway.stop(at_once=stopping.is_set())
        if stopping.is_set():
            if server:
                server.kill()
            return
        stopping.set()
        if server:
            server.terminate()
            console.say("Stopping. Open streams may finish first. Press Ctrl-C again to stop immediately.")

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        if gateway:
            gateway.stop()
            gateway.join()
        for number, handler in previous.items():
            signal.signal(number, handler)


def ready_message(server: TritonServer, gateway: Gateway | None = None) -> str:
    """Return the endpoints of the server and commands to try."""
    urls = f"HTTP {server.http_url}   gRPC {server.grpc_url}   metrics {server.metrics_url}/metrics"
    openai = ""
    if gateway:
        host = server.http_url.rpartition(":")[0]  # the gateway listens where the server does
        openai = f"{host}:{gateway.port}/v1"
        urls += f"   OpenAI {openai}"
    return "\n".join(
        [
            f"Ready.  {urls}",
            "Try in another terminal:",
            *(f"  {command}" for command in _examples(server, openai, gateway is not None and gateway.needs_key)),
            "Press Ctrl-C to stop the server.",
        ]
    )


def _examples(server: TritonServer, openai: str, needs_key: bool) -> list[str]:
    """Return commands that the served model can answer. openai: URL of the gateway; empty: there is none."""
    url = f"{server.http_url}/v2/models/{server.model_name}"
    flags = "" if server.grpc_url == "localhost:8001" else f" --url {server.grpc_url}"
    log, prompt, film = server.log(), "The capital of France is", "A great film."
    asked: dict[str, object]
    if ONLY_LABELS in log:
        command = f"{_paged()} openai{flags}  # a gateway with /classify, /score and /rerank"
        path, asked = "classify", {"input": film}
        request = f"curl {url}/generate -d '{_json(classification_request=_json(input=film))}'"
    elif ONLY_EMBEDDINGS in log:
        command = f"{_paged()} openai{flags}  # a gateway with /v1/embeddings"
        path, asked = "embeddings", {"input": film}
        request = f"curl {url}/generate -d '{_json(embedding_request=_json(input=film))}'"
    else:
        command = f"{_paged()} chat{flags}"
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        if NO_CHAT in log:
            command = f"{_paged()} generate '{prompt}' --max-tokens 16{flags}"
            path, asked = "completions", {"prompt": prompt, "max_tokens": 16}
        body = _json(text_input=prompt, stream=True, max_tokens=16, temperature=0)
        request = f"curl -N {url}/generate_stream -d '{body}'"
    headers = " -H 'Content-Type: application/json'"
    headers += ' -H "Authorization: Bearer ${PAGED_API_KEYS%%,*}"' if needs_key else ""
    through_gateway = (
        [f"curl {openai}/{path}{headers} -d '{_json(model=server.model_name, **asked)}'"] if openai else []
    )
    if ONLY_LABELS in log or ONLY_EMBEDDINGS in log:
        return [request, *(through_gateway or [command])]
    return [command, *through_gateway, request]


def _json(**values: object) -> str:
    return json.dumps(values)


def _paged() -> str:
    """Return how to call the command line: "paged" if it is on PATH, otherwise its path."""
    beside = Path(sys.executable).with_name("paged")
    if shutil.which("paged") or not beside.exists():
        return "paged"
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)
