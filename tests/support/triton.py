"""Real Triton servers, shared by the end-to-end tests, and raw clients of them."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from paged_client.serving.ports import choose_ports
from paged_client.serving.repository import resolve_model
from paged_client.serving.server_files import find_server
from paged_client.serving.tritonserver import TritonServer, server_environment
from tests.support.waiting import WAIT, until

MODEL = "paged_llm"
STARTED = "Started HTTPService"  # in the line that tritonserver prints last when it starts
START_SECONDS = 300  # after which a server that has not started is killed


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return Path(resolve_model("demo"))


@pytest.fixture(scope="session")
def server(demo_model) -> Iterator[TritonServer]:
    """A server of the demo model.

    It computes in fp32, so that its tokens equal those of transformers. One prompt near max_model_len almost fills the
    pool, so that the next one waits. No empty first responses are sent.
    """
    options = {"dtype": "float32", "num_gpu_blocks_override": 640, "max_num_seqs": 32, "first_response_ms": -1}
    with TritonServer(demo_model, options) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_server(tiny) -> Iterator[TritonServer]:
    """A server of a random model with steps of milliseconds and a pool of 24 blocks. Streams begin with an empty
    response."""
    options = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 24, "max_num_seqs": 8}
    options |= {"first_response_ms": 0, "structured_outputs_timeout": 2}
    with TritonServer(tiny[0], options) as running:
        yield running


@dataclass
class PlainServer:
    """A tritonserver that was started without the launcher."""

    http_url: str
    grpc_url: str
    metrics_url: str
    log: list[str]  # lines so far
    backends: Path | None
    process: subprocess.Popen[str]
    shm_prefix: str

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def http_port(self) -> int:
        return int(self.http_url.rpartition(":")[2])

    def terminate(self) -> None:
        self.process.terminate()

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)


@contextmanager
def plain_server(
    repository: Path, *flags: str, backends: Path | None = None, without: Path | None = None, **variables: str
) -> Iterator[PlainServer]:
    """Run tritonserver on a model repository, without the launcher.

    The environment has only `variables` and those that the server of the wheel needs. `without` is removed from
    PYTHONPATH.
    """
    files = find_server()
    ports = dict(zip(("http", "grpc", "metrics"), choose_ports(http=0, grpc=0, metrics=0), strict=True))
    backends = backends or files.backend_directory
    command = [files.binary, f"--model-repository={repository}", *flags]
    command += [f"--{name}-port={port}" for name, port in ports.items()]
    command += [f"--backend-directory={backends}"] if backends else []
    shm_prefix = f"plain_{ports['http']}_"
    command += [f"--backend-config=python,shm-region-prefix-name={shm_prefix}"]
    needed = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
    environment = {name: value for name, value in server_environment(files).items() if name in needed}
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if without is None or Path(path) != without)
    environment |= variables
    with started(command, environment, STARTED) as (process, log):
        until(lambda: listens(ports["http"]), "an open port, which the server announces too early")
        urls = (f"localhost:{port}" for port in ports.values())
        yield PlainServer(*urls, log, backends, process, shm_prefix)


@contextmanager
def started(
    command: Sequence[str | Path], environment: Mapping[str, str], ready: str, directory: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run a server from the line of its output that contains `ready` until the end of the block, where it must exit
    with 0 after SIGTERM. Yields its process and the lines of its output so far.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        log = [""]
        limit = threading.Timer(START_SECONDS, os.killpg, (process.pid, signal.SIGKILL))  # else the test never ends
        limit.start()
        while ready not in log[-1]:
            log.append(process.stdout.readline())
            assert log[-1], "".join(log)  # the server has ended
        limit.cancel()
        # Keep reading its output: a full pipe would block it.
        threading.Thread(target=log.extend, args=(process.stdout,), daemon=True).start()
        yield process, log
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        assert code == 0, f"exit code {code}\n{''.join(log)}"


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Response:
    """A response of the model, or an error of the stream."""

    text: str | None
    outputs: dict[str, list[Any]]
    error: InferenceServerException | None
    final: bool


@dataclass
class RawStream:
    """A gRPC stream of tritonclient."""

    client: grpcclient.InferenceServerClient
    responses: queue.Queue[Response] = field(default_factory=queue.Queue)

    def send(self, request_id: str = "", **inputs: Any) -> None:
        self.client.async_stream_infer(MODEL, tensors(inputs), request_id=request_id, enable_empty_final_response=True)

    def next(self) -> Response:
        return self.responses.get(timeout=WAIT)

    def all(self) -> list[Response]:
        """Return all responses up to the final one."""
        responses = [self.next()]
        while not responses[-1].final and not responses[-1].error:
            responses.append(self.next())
        return responses

    def close(self) -> None:
        """End the stream without cancelling its requests."""
        self.client.stop_stream()

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)


@contextmanager
def raw_stream(
    server: TritonServer, *, strict: bool = False, headers: dict[str, str] | None = None
) -> Iterator[RawStream]:
    """Open a stream. strict: ask for gRPC status codes; an error then ends the stream."""
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        stream = RawStream(client)
        headers = (headers or {}) | ({"triton_grpc_error": "true"} if strict else {})
        client.start_stream(lambda result, error: stream.responses.put(read(result, error)), headers=headers)
        try:
            yield stream
        except BaseException:
            stream.cancel()  # its requests may never end
            raise


@contextmanager
def raw_streams(server: TritonServer, count: int) -> Iterator[list[RawStream]]:
    with ExitStack() as stack:
        yield [stack.enter_context(raw_stream(server)) for _ in range(count)]


def read(result: Any, error: InferenceServerException | None) -> Response:
    if error is not None:
        return Response(None, {}, error, False)
    message = result.get_response()
    final = message.parameters.get("triton_final_response")
    outputs = {output.name: result.as_numpy(output.name).tolist() for output in message.outputs}
    text = outputs["text_output"][0].decode() if "text_output" in outputs else None
    return Response(text, outputs, None, final is not None and final.bool_param)


def tensors(inputs: dict[str, Any]) -> list[grpcclient.InferInput]:
    """Convert values to tensors: a str to BYTES, a bool to BOOL, a dict or list to JSON, an array as it is."""
    made = []
    for name, value in inputs.items():
        if isinstance(value, dict | list):
            value = json.dumps(value)
        if isinstance(value, np.ndarray):
            tensor, kind = value, np_to_triton_dtype(value.dtype)
        elif isinstance(value, bool):
            tensor, kind = np.array([value]), "BOOL"
        else:
            tensor, kind = np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_), "BYTES"
        made.append(grpcclient.InferInput(name, list(tensor.shape), kind))
        made[-1].set_data_from_numpy(tensor)
    return made


def post(
    server: TritonServer | PlainServer, body: dict[str, Any] | bytes, endpoint: str = "generate", *, model: str = MODEL
) -> tuple[int, str]:
    """Call the generate extension and return (HTTP status, body)."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"http://{server.http_url}/v2/models/{model}/{endpoint}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=WAIT) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics(server: TritonServer) -> dict[str, float]:
    """Return the `paged_` metrics by `name{label}`, where the label is the state, reason, kind, direction or tier."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=WAIT) as reply:
        text = reply.read().decode()
    found = {}
    for name, labels, value in re.findall(r"^(paged_\w+)\{(.*?)\} (\S+)$", text, re.M):
        label = re.search(r'(?:state|reason|le|kind|direction|tier)="(.*?)"', labels)
        found[f"{name}{{{label.group(1)}}}" if label else name] = float(value)
    return found


def idle(server: TritonServer) -> None:
    """Wait until no request runs or waits and no block is in use.

    Requesting a pool map brings the metrics up to date, which otherwise are some tenths of a second old.
    """

    def is_idle() -> bool:
        post(server, {"pool_map": True})
        now = metrics(server)
        busy = now["paged_kv_blocks{used}"] + now["paged_requests{running}"] + now["paged_requests{waiting}"]
        available = now["paged_kv_blocks{free}"] + now["paged_kv_blocks{cached}"]
        return busy == 0 and available == now["paged_kv_blocks{total}"]

    until(is_idle, "an idle server with every block free or cached")
