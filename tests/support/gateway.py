"""Runs `paged openai` on a thread or as a process, and sends plain HTTP requests to it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar
from unittest.mock import patch

from paged_client import cli
from paged_client.openai import command
from paged_client.serving.ports import choose_ports
from tests.support.fake_servers import FakeServerState, grpc_server
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
WAIT = 120  # time limit of a request, in seconds


@dataclass
class Gateway:
    port: int
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, body: dict[str, Any] | bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send a POST request, or without a body a GET request. Return the status and the parsed JSON body."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=WAIT) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the parsed events of a stream, without its end marker."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=WAIT) as reply:
            *events, end = reply.read().decode().split("\n\n")[:-1]
        assert end == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def metrics(self) -> dict[str, float]:
        """Return metrics by name and labels, as they are formatted."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=WAIT) as reply:
            return {name: float(value) for name, value in re.findall(r"^(\w\S*) (\S+)$", reply.read().decode(), re.M)}


class _Registered(command._Server):
    """A server of a gateway that its port finds, so that a thread can be told to end."""

    running: ClassVar[dict[int, command._Server]] = {}

    def serve_on(self, listener: socket.socket) -> None:
        self.running[listener.getsockname()[1]] = self
        super().serve_on(listener)


@contextmanager
def gateway(server_url: str, *flags: str) -> Iterator[Gateway]:
    """Run the command on a thread of this process, which needs no imports of its own."""
    (port,) = choose_ports(port=0)
    arguments, codes = ["openai", "--url", server_url, "--port", str(port), *flags], list[int]()
    thread = threading.Thread(target=lambda: codes.append(cli.main(arguments)), daemon=True)
    with patch.object(command, "_Server", _Registered):
        thread.start()
        until(lambda: port in _Registered.running or not thread.is_alive(), "the gateway")
    server = _Registered.running.pop(port, None)
    assert server, f"paged {' '.join(arguments)} ended with {codes}"
    try:
        until(lambda: server.started, "the gateway's start")
        yield Gateway(port)
    finally:
        server.should_exit = True
        thread.join(WAIT)
    assert codes == [0]


@contextmanager
def gateway_process(server_url: str, *flags: str, errors: IO[str] | None = None) -> Iterator[Gateway]:
    """Run the command as a process. `errors` receives its standard error."""
    (port,) = choose_ports(port=0)
    arguments = [sys.executable, "-m", "paged_client", "openai", "--url", server_url, "--port", str(port), *flags]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/kernels:{ROOT}/client"}
    with subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:
        assert process.stdout
        try:
            line = process.stdout.readline()
            assert f":{port}/v1" in line, "it listens once it has said where"
            yield Gateway(port, process)
        finally:
            process.terminate()
            process.wait(WAIT)


@contextmanager
def recording_server(port: int = 0) -> Iterator[FakeServerState]:
    """Start a fake server that follows `scripted_response`, and records requests and their sampling parameters.

    port: 0 chooses a free one.
    """
    with grpc_server(port) as seen:
        seen.scripted_response = {"say": ["Hello", " there"]}
        own = seen.script

        def script(inputs: dict[str, Any], request_id: str) -> dict[str, Any]:
            if inputs.keys() & {"pool_map", "adapters"}:
                return own(inputs, request_id)
            seen.requests.append({**inputs, "request_id": request_id})
            seen.sampling.append(json.loads(inputs["sampling_parameters"]))
            seen.asked.set()
            return seen.scripted_response(inputs) if callable(seen.scripted_response) else seen.scripted_response

        seen.script = script
        yield seen


@contextmanager
def respond_with(
    fake: FakeServerState, by_inputs: Callable[[dict[str, Any]], dict[str, Any]] | None = None, **script: Any
) -> Iterator[None]:
    """Set the response script of a recording server (see fake_servers.py), or a function that returns one."""
    before, fake.scripted_response = fake.scripted_response, by_inputs or script
    try:
        yield
    finally:
        fake.scripted_response = before


PROMPT = {"model": "paged_llm", "prompt": "x"}
CHAT = {"model": "paged_llm", "messages": [{"role": "user", "content": "x"}]}
BODIES = {"/v1/completions": PROMPT, "/v1/chat/completions": CHAT}


def error_of(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Check the format of an error response, and return the error."""
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return body["error"]
