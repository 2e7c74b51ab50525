"""Servers, gateways and Redis servers on this machine, and the load that clients put on them.

A client is this project's load generator (client/paged_client/load.py), perf_analyzer, or for the gateway a load
generator over HTTP that parses only the length of each event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paged_bench._engine import WORDS, Job, between
from paged_bench._harness import ROOT, Contest, Record, latencies, not_measured
from paged_bench._processes import ProcessGroup
from paged_client import Client, load
from paged_client.dynamo.processes import Fleet
from paged_client.dynamo.settings import FrontendSettings, WorkerSettings
from paged_client.load import ResponseTimes
from paged_client.serving.ports import choose_ports
from paged_client.serving.repository import MODEL_NAME
from paged_client.serving.server_args import LOOPBACK
from paged_client.serving.server_files import perf_analyzer
from paged_client.serving.tritonserver import TritonServer
from paged_client.wire import Values

UNPACKED = ROOT / ".cache/redis/usr"  # where .ci/run unpacks Debian's packages
START_SECONDS = 60.0
MAX_ATTEMPTS = 6  # exports of perf_analyzer 2.51 are sometimes empty or truncated


# --- results -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadResult:
    """The throughput and latencies that a client measured. Times are in seconds."""

    tokens: int
    seconds: float  # time from the first request to the last response
    responses: int
    first: list[float]  # time to the first response of each request
    between: list[float]  # times between two responses of a request

    @classmethod
    def of(cls, times: Sequence[ResponseTimes], tokens: int) -> LoadResult:
        """Return the result of requests with `tokens` output tokens in total."""
        stamps = [request.stamps for request in times]
        return cls(
            tokens,
            max(arrived[-1] for arrived in stamps) - min(request.sent for request in times),
            sum(map(len, stamps)),
            [request.stamps[0] - request.sent for request in times],
            between(stamps),
        )

    def rate(self) -> float:
        """Return output tokens per second."""
        return self.tokens / self.seconds

    def records(self, what: str) -> Iterator[Record]:
        yield Record(f"output_throughput {what}", self.rate(), "tokens/s")
        yield Record(f"tokens per response {what}", self.tokens / self.responses, "tokens")
        yield from latencies(what, {"time to first response": self.first, "time between responses": self.between})


def added_latency(
    contest: Contest[LoadResult],
    baseline: str,
    setting: str,
    target: float | None = None,
    *,
    first: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[Record]:
    """Yield the median latencies of each contestant, and how much they exceed the baseline's of the same round.

    Args:
        setting: end of the figures' names.
        target: for everything that is added.
        first: targets of single contestants for what is added to the first response.
    """
    for what, field, targets in (
        ("time to first response", attrgetter("first"), first),
        ("time between responses", attrgetter("between"), {}),
    ):
        name = f"{what} p50, {setting}"
        times = {who: list(map(field, runs)) for who, runs in contest.runs.items()}
        if not all(run for rounds in times.values() for run in rounds):
            yield not_measured(name, "all tokens were in one response")
            continue
        medians = {who: [1e3 * statistics.median(run) for run in rounds] for who, rounds in times.items()}
        yield Record(f"{name} ({baseline})", statistics.median(medians[baseline]), "ms")
        for who in (name for name in medians if name != baseline):
            added = [value - base for value, base in zip(medians[who], medians[baseline], strict=True)]
            yield Record(f"{name} ({who})", statistics.median(medians[who]), "ms")
            yield Record(f"added to {name} ({who})", statistics.median(added), "ms", targets.get(who, target))


# --- load over gRPC ------------------------------------------------------------------------------------------------


class AnalyzerError(RuntimeError):
    """perf_analyzer has failed. The message has its error."""


@dataclass(frozen=True)
class TextWorkload:
    """The same requests as token ids for the engine and as text for a server."""

    jobs: list[Job]
    texts: list[str]

    @property
    def tokens(self) -> int:
        return sum(job.output for job in self.jobs)

    @property
    def requests(self) -> list[Values]:
        return [{"text_input": text, "stream": True, "sampling_parameters": self._sampling(job)} for text, job in self]

    @property
    def input_data(self) -> str:
        """The requests as input data of perf_analyzer."""
        data = [{name: [value] for name, value in request.items()} for request in self.requests]
        return json.dumps({"data": data})

    def __iter__(self) -> Iterator[tuple[str, Job]]:
        return zip(self.texts, self.jobs, strict=True)

    @staticmethod
    def _sampling(job: Job) -> str:
        return json.dumps({"max_tokens": job.output, "temperature": 0, "ignore_eos": True})


def text_workload(jobs: Sequence[Job], tokenizer: Any) -> TextWorkload:
    """Replace the random tokens of prompts by words, whose text a server tokenizes to the same tokens."""
    rng = random.Random(0)
    texts, text_jobs = [], []
    for job in jobs:
        ids = tokenizer.encode(" ".join(rng.choices(WORDS, k=len(job.prompt))), add_special_tokens=False)
        texts.append(tokenizer.decode(ids[: len(job.prompt)]))
        text_jobs.append(replace(job, prompt=tokenizer.encode(texts[-1])))
    return TextWorkload(text_jobs, texts)


def run_lean_client(server: TritonServer, work: TextWorkload, concurrency: int) -> LoadResult:
    """Run all requests with our load generator."""
    return LoadResult.of(load.closed_loop(server.grpc_url, MODEL_NAME, work.requests, concurrency), work.tokens)


def run_perf_analyzer(server: TritonServer, work: TextWorkload, *flags: str) -> LoadResult:
    """Run every request once with perf_analyzer. Raises AnalyzerError.

    With --request-count it measures a single window and does not wait for stable results.
    """
    analyzer = perf_analyzer()
    assert analyzer is not None
    binary, environment = analyzer
    with tempfile.TemporaryDirectory() as scratch:
        input_data, export = Path(scratch, "in.json"), Path(scratch, "out.json")
        input_data.write_text(work.input_data)
        command = [str(binary), "-m", MODEL_NAME, "-u", server.grpc_url, "-i", "grpc", "--async", "--streaming"]
        command += ["--input-data", str(input_data), "--request-count", str(len(work.jobs))]
        command += ["--profile-export-file", str(export), *flags]
        for _ in range(MAX_ATTEMPTS):
            export.unlink(missing_ok=True)  # perf_analyzer does not overwrite files
            completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if completed.returncode:
                reason = " ".join(completed.stderr.partition("Usage: ")[0].split())  # the error without the usage text
                raise AnalyzerError(f"perf_analyzer exits with {completed.returncode}: {reason or 'no reason given'}")
            with contextlib.suppress(json.JSONDecodeError):
                return read_export(json.loads(export.read_text()))
    raise AnalyzerError(f"{MAX_ATTEMPTS} exports of perf_analyzer were truncated")


def read_export(export: dict[str, Any]) -> LoadResult:
    """Parse an export of perf_analyzer, whose timestamps are nanoseconds.

    All requests ignore the end of sequence, so each has max_tokens output tokens.
    """
    (experiment,) = export["experiments"]
    requests = experiment["requests"]
    assert all(request.get("success", True) for request in requests)
    tokens = sum(json.loads(request["request_inputs"]["sampling_parameters"])["max_tokens"] for request in requests)
    times = [
        ResponseTimes(request["timestamp"] / 1e9, [when / 1e9 for when in request["response_timestamps"]])
        for request in requests
    ]
    return LoadResult.of(times, tokens)


def busy_cores(server: TritonServer, run: Callable[[], object]) -> dict[str, float]:
    """Return how many cores the server, the model's process and the client use during `run`.

    The process that reaches its limit is the bottleneck. The limit of the model's process is about 1, because of the
    GIL.
    """
    model = [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
    before, client, begin = [cpu_seconds([server.pid]), cpu_seconds(model)], _client_seconds(), time.perf_counter()
    run()
    wall = time.perf_counter() - begin
    after = [cpu_seconds([server.pid]), cpu_seconds(model)]
    used = [later - earlier for earlier, later in zip(before, after, strict=True)] + [_client_seconds() - client]
    return {name: seconds / wall for name, seconds in zip(("tritonserver", "model", "client"), used, strict=True)}


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time of processes so far."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _client_seconds() -> float:
    """Return the CPU time of this process and of its child processes that have ended, such as perf_analyzer."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


# --- load over HTTP ------------------------------------------------------------------------------------------------


def http_closed_loop(
    port: int, path: str, bodies: Sequence[Mapping[str, Any]], concurrency: int
) -> list[ResponseTimes]:
    """POST every body with `concurrency` of them open at any time, and return their times.

    Raises RuntimeError if the status of a response is not 200.
    """
    return asyncio.run(_closed_loop(port, [_request(path, body) for body in bodies], concurrency))


def _request(path: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


async def _closed_loop(port: int, requests: Sequence[bytes], concurrency: int) -> list[ResponseTimes]:
    remaining = iter(requests)
    results = await asyncio.gather(*(_run_connection(port, remaining) for _ in range(min(concurrency, len(requests)))))
    return [times for result in results for times in result]


async def _run_connection(port: int, remaining: Iterator[bytes]) -> list[ResponseTimes]:
    """Send requests over a connection, one after the other, until none remains."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return [await _send(request, reader, writer) for request in remaining]
    finally:
        writer.close()


async def _send(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> ResponseTimes:
    times = ResponseTimes(time.perf_counter())
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head[:20]:
        raise RuntimeError(
            f"the endpoint returned {head.splitlines()[0].decode()}: {(await reader.read(1000)).decode()}"
        )
    if b"transfer-encoding: chunked" in head:
        await _read_chunks(reader, times, events=b"text/event-stream" in head)
    else:
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
    if not times.stamps:  # not a stream
        times.stamps.append(time.perf_counter())
    return times


async def _read_chunks(reader: asyncio.StreamReader, times: ResponseTimes, *, events: bool) -> None:
    """Read the chunks of a response. Of a stream, each event is a chunk; the time of those with data is stored."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        chunk = await reader.readexactly(size + 2)
        if events and chunk.startswith(b"data: {"):
            times.stamps.append(time.perf_counter())
    await reader.readexactly(2)


# --- servers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunningGateway:
    """An OpenAI-compatible endpoint: the gateway, or Dynamo's frontend with its workers."""

    port: int
    pids: Sequence[int]  # its processes, without the servers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def gateway(server: TritonServer) -> Iterator[RunningGateway]:
    """Start a gateway in front of a server."""
    (port,) = choose_ports(port=0)
    command = [sys.executable, "-m", "paged_client", "openai", "--url", server.grpc_url, "--port", str(port)]
    with ProcessGroup(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            if not process.stdout or not process.stdout.readline():
                raise RuntimeError("the gateway did not start")
            yield RunningGateway(port, [process.pid])
        finally:
            process.terminate()
            process.wait()
            process.end()


@contextmanager
def dynamo(servers: Sequence[TritonServer], options: Mapping[str, Any], *flags: str) -> Iterator[RunningGateway]:
    """Start Dynamo's frontend, and a worker in front of each of these servers, which must be ready.

    Installs the packages of the frontend if they are missing.

    Args:
        options: the engine options of the servers.
        flags: options of the frontend.
    """
    (port,) = choose_ports(port=0)
    with tempfile.TemporaryDirectory() as scratch:
        model = _directory(options, Path(scratch, "model"))
        fleet = Fleet(
            [
                WorkerSettings(
                    server.grpc_url, (server.model_name,), model_path=model, discovery="file", event_plane="zmq"
                )
                for server in servers
            ],
            FrontendSettings(LOOPBACK, port, flags),
        )
        try:
            fleet.start()
            deadline = time.monotonic() + START_SECONDS
            while not _knows_workers(port, len(servers)):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"Dynamo's frontend did not find {len(servers)} workers")
                time.sleep(0.1)
            yield RunningGateway(port, fleet.pids)
        finally:
            fleet.stop(at_once=True)
            fleet.join()


def _directory(options: Mapping[str, Any], made: Path) -> str | None:
    """Return a directory with configuration and tokenizer; None if the model has both."""
    if "tokenizer" not in options:
        return None
    made.mkdir()
    for file in (*Path(options["tokenizer"]).glob("*.json*"), Path(options["model"], "config.json")):
        shutil.copy(file, made)
    return str(made)


def _knows_workers(port: int, count: int) -> bool:
    """Return whether a frontend lists a model, and so many workers."""
    try:
        health, models = (_get_json(port, path) for path in ("/health", "/v1/models"))
    except OSError:
        return False
    workers = [instance for instance in health["instances"] if instance["endpoint"] == "generate"]
    return len(workers) == count and bool(models["data"])


def _get_json(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
        return json.loads(reply.read())


@contextmanager
def servers_of(count: int, options: Mapping[str, Any], *, events: bool) -> Iterator[list[TritonServer]]:
    """Start servers with the same options. events: whether they publish KV cache events."""
    made = []
    with ExitStack() as stack:
        for _ in range(count):
            own = dict(options)
            if events:
                (port,) = choose_ports(events=0)
                own["kv_events_config"] = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
            server = TritonServer(own.pop("model"), own, engine_only=True)
            stack.callback(server.stop)
            server.start()
            made.append(server)
        for server in made:
            server.wait_ready()
        yield made


def computed_tokens(server: TritonServer) -> float:
    """Return the tokens that a server has computed: prompt tokens that were not cached, and output tokens."""
    with Client(server.grpc_url) as client:
        client.pool_map(timeout=60)  # brings the metrics up to date
    total = partial(_total, _metrics(f"http://{server.metrics_url}"))
    prompts, outputs = total("paged_prompt_tokens_total"), total("paged_generation_tokens_total")
    return prompts - total("paged_prefix_cache_hit_tokens_total") + outputs


def moved_streams(frontend: RunningGateway) -> float:
    """Return the number of times that Dynamo's frontend has moved an open stream to another worker."""
    return _total(_metrics(frontend.url), "dynamo_frontend_model_migration_total")


def _metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        return str(reply.read().decode())


def _total(metrics: str, name: str) -> float:
    return sum(map(float, re.findall(rf"^{name}\{{.*?\}} (\S+)$", metrics, re.M)))


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


def find_redis() -> str | None:
    """Return the path of `redis-server`, or None."""
    unpacked = UNPACKED / "bin/redis-server"
    return shutil.which("redis-server") or (str(unpacked) if unpacked.exists() else None)


class RedisServer:
    """A running `redis-server` with a log in a directory."""

    def __init__(self, directory: Path, *options: str, port: int = 0, tls: bool = False):
        """Start the server. options: command-line options. port: 0 chooses a free port. tls: accept only TLS."""
        self.port = port or choose_ports(redis=0)[0]
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        self._options = [*ports, "--save", "", "--appendonly", "no", "--dir", str(directory), *options]
        self._log = directory / "redis.log"
        self.process: ProcessGroup | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server, and wait until its port is open. Raises RuntimeError if it does not start."""
        program = find_redis()
        assert program
        paths = [os.environ.get("LD_LIBRARY_PATH"), *map(str, UNPACKED.glob("lib/*"))]
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}
        with self._log.open("ab") as log:
            self.process = ProcessGroup([program, *self._options], stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_listening():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server does not start: {self._log.read_text()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the server, if it runs."""
        if self.process:
            self.process.end()
            self.process = None

    def _is_listening(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False
