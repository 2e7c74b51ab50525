"""Runs the OpenAI gateway in front of servers."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from paged_client import Client
from paged_client.serving.ports import choose_ports
from paged_client.serving.tritonserver import TritonServer

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class RunningGateway:
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def gateway(servers: Sequence[TritonServer], *flags: str) -> Iterator[RunningGateway]:
    """Start a gateway in front of these servers."""
    (port,) = choose_ports(port=0)
    urls = [part for server in servers for part in ("--url", server.grpc_url)]
    command = [sys.executable, "-m", "paged_client", "openai", *urls, "--port", str(port), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        try:
            if not process.stdout or not process.stdout.readline():
                raise RuntimeError("the gateway did not start")
            yield RunningGateway(port, process.pid)
        finally:
            process.terminate()
            process.wait()


@contextmanager
def servers_of(
    count: int, options: Mapping[str, Any], *, events: bool
) -> Iterator[tuple[list[TritonServer], list[str]]]:
    """Start servers with the same options. Yield them, and the gateway's flags for their KV cache events.

    Args:
        events: whether they publish events.
    """
    made, flags = [], []
    with ExitStack() as stack:
        for _ in range(count):
            own = dict(options)
            if events:
                places = [f"tcp://127.0.0.1:{port}" for port in choose_ports(events=0, replay=0)]
                own["kv_events_config"] = {
                    "enable_kv_cache_events": True,
                    "endpoint": places[0],
                    "replay_endpoint": places[1],
                }
                flags += ["--kv-events", ",".join(places)]
            server = TritonServer(own.pop("model"), own, engine_only=True)
            stack.callback(server.stop)
            server.start()
            made.append(server)
        for server in made:
            server.wait_ready()
        yield made, flags


def computed_tokens(server: TritonServer) -> float:
    """Return the tokens that a server has computed: of prompts, without those that were cached, and of outputs."""
    with Client(server.grpc_url) as client:
        client.pool_map(timeout=60)  # brings the metrics up to date
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=60) as reply:
        text = reply.read().decode()

    def total(name: str) -> float:
        return sum(map(float, re.findall(rf"^{name}\{{.*?\}} (\S+)$", text, re.M)))

    prompts, outputs = total("paged_prompt_tokens_total"), total("paged_generation_tokens_total")
    return prompts - total("paged_prefix_cache_hit_tokens_total") + outputs


@contextmanager
def trace_receiver() -> Iterator[str]:
    """Run an HTTP server that accepts all traces and drops them. Yield its endpoint."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Accept) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        finally:
            server.shutdown()


class _Accept(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass
