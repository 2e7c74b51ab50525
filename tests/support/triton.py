"""Real Triton servers, shared by the end-to-end tests, and raw clients of them."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
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
from paged_client.serving.server_files import REPOSITORY_ROOT, find_server
from paged_client.serving.tritonserver import TritonServer, server_environment
from tests.support.waiting import WAIT, until

MODEL = "paged_llm"
STARTED = "Started HTTPService"  # in the line that tritonserver prints last when it starts
REPOSITORY = REPOSITORY_ROOT / "model_repository"
# On a busy machine, tritonserver 2.51 sometimes never finishes loading several models at once.
ONE_AT_A_TIME = "--model-load-thread-count=1"
SHORT_LAYERS = 2  # of `short_model`
START_SECONDS = 300  # after which a server that has not started is killed


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return Path(resolve_model("demo"))


@dataclass
class DemoServer:
    """The addresses of `paged serve demo`, and what it printed until it was ready."""

    http_url: str
    grpc_url: str
    metrics_url: str
    openai_url: str
    output: str
    errors: str


ABORTED = "boost::interprocess::lock_exception"  # of tritonserver 2.51, in one start of many hundreds on a busy machine


@pytest.fixture(scope="session")
def demo_server(demo_model, tmp_path_factory) -> Iterator[DemoServer]:
    """The demo model in its default configuration, for tests whose outputs have to make sense."""
    started = ExitStack()
    try:
        found = started.enter_context(_demo_server(tmp_path_factory.mktemp("demo_server")))
    except AssertionError as error:
        if ABORTED not in str(error):
            raise
        found = started.enter_context(_demo_server(tmp_path_factory.mktemp("demo_server")))
    with started:
        yield found


@contextmanager
def _demo_server(directory: Path) -> Iterator[DemoServer]:
    names = ("http", "grpc", "metrics", "openai")
    ports = dict(zip(names, choose_ports(http=0, grpc=0, metrics=0, openai=0), strict=True))
    flags = [f"--{name}-port={port}" for name, port in ports.items()]
    command = [sys.executable, "-m", "paged_client", "serve", "demo", *flags, f"--log-file={directory / 'log'}"]
    with (directory / "errors").open("w") as errors:
        process = subprocess.Popen(command, cwd=REPOSITORY_ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
    output = [""]
    try:
        while not output[-1].startswith("Press Ctrl-C"):
            output.append(process.stdout.readline())  # type: ignore[union-attr]
            assert output[-1], (directory / "errors").read_text()
        urls = {f"{name}_url": f"localhost:{port}" for name, port in ports.items()}
        yield DemoServer(**urls, output="".join(output), errors=(directory / "errors").read_text())
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    assert process.returncode == 0
    assert "Started GRPCInferenceService" in (directory / "log").read_text()


@pytest.fixture(scope="session")
def short_model(demo_model, tmp_path_factory) -> Path:
    """The directory of the demo model's first two layers: its tokenizer, chat template and vocabulary, at a fourth of
    the cost."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("short") / "model"
    shutil.copytree(demo_model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": SHORT_LAYERS}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(demo_model / "model.safetensors")
    left_out = re.compile(r"\.layers\.(\d+)\.")
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if not (found := left_out.search(name)) or int(found[1]) < SHORT_LAYERS
    }
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def server(short_model) -> Iterator[TritonServer]:
    """A server of `short_model`.

    It computes in fp32, so that its tokens equal those of transformers. One prompt near max_model_len almost fills the
    pool, so that the next one waits. Its steps are short, so that a test that cancels one does not wait for long. No
    empty first responses are sent.
    """
    options = {"dtype": "float32", "num_gpu_blocks_override": 640, "max_num_seqs": 32, "first_response_ms": -1}
    options |= {"max_num_batched_tokens": 256}
    with TritonServer(short_model, options, server_args=[ONE_AT_A_TIME]) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_server(tiny, tmp_path_factory) -> Iterator[TritonServer]:
    """A server of a random model with steps of milliseconds and a pool of 24 blocks. Streams begin with an empty
    response. It also has a streaming copy of the model `llmapi`, and one of `ensemble` that is not decoupled."""
    repository = tmp_path_factory.mktemp("tiny_server") / "models"
    shutil.copytree(REPOSITORY, repository, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(repository / "llmapi", repository / "llmapi_streaming")
    config = repository / "llmapi_streaming" / "config.pbtxt"
    config.write_text(config.read_text().replace("decoupled: false", "decoupled: true"))
    shutil.copytree(repository / "ensemble", repository / "ensemble_single")
    config = repository / "ensemble_single" / "config.pbtxt"
    text = config.read_text().replace("decoupled: true", "decoupled: false")
    config.write_text(text.replace('name: "ensemble"', 'name: "ensemble_single"'))
    options = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 24, "max_num_seqs": 8}
    options |= {"first_response_ms": 0, "structured_outputs_timeout": 2}
    with TritonServer(tiny[0], options, repository=repository, server_args=[ONE_AT_A_TIME]) as running:
        yield running


@pytest.fixture(scope="session")
def adapters(tiny, tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    """(directory of the list of `adapted_server`, three LoRA adapters by name)"""
    from tests.support.adapters import make_adapter

    place = tmp_path_factory.mktemp("lora")
    return place, {name: make_adapter(tiny[1], place / name, seed=seed, std=0.5) for seed, name in enumerate("abc")}


@pytest.fixture(scope="session")
def traces() -> Iterator[Any]:
    """The receiver of the traces of `adapted_server`."""
    from tests.support.otlp import otlp_receiver

    with otlp_receiver() as receiver:
        yield receiver


CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.content.split('</think>')[-1] }}]{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}-{% else %}+{% endif %}"
)
# With top_k=1 sampling is greedy, so that outputs can be compared.
GENERATION_CONFIG = {"do_sample": True, "temperature": 0.6, "top_k": 1, "repetition_penalty": 1.4, "max_new_tokens": 7}


@pytest.fixture(scope="session")
def adapted_model(tiny, tmp_path_factory) -> Path:
    """The directory of the tiny model with a variable in its chat template and sampling parameters of its own."""
    directory = tmp_path_factory.mktemp("adapted") / "model"
    shutil.copytree(tiny[0], directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    return directory


@pytest.fixture(scope="session")
def adapted_server(adapted_model, adapters, traces) -> Iterator[TritonServer]:
    """A server of `adapted_model` with the LoRA adapters a and b, which traces every request and has no metrics."""
    from tests.support.adapters import write_adapter_list

    listed = write_adapter_list(adapters[0], {"a": "a", "b": "b"})
    options = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 8, "max_loras": 2}
    options |= {"otlp_traces_endpoint": traces.endpoint, "disable_log_stats": True}
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_SERVICE_NAME": "chat-backend"}
    more = {"environment": environment, "server_args": [ONE_AT_A_TIME], "multi_lora": listed}
    with TritonServer(adapted_model, options, **more) as running:
        yield running


@pytest.fixture(scope="session")
def two_servers(tiny) -> Iterator[list[tuple[TritonServer, str]]]:
    """Two equal servers that publish events of their prefix cache, each with the endpoints of its events."""
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            endpoints = [f"tcp://127.0.0.1:{port}" for port in choose_ports(events=0, replay=0)]
            events = dict(zip(("endpoint", "replay_endpoint"), endpoints, strict=True))
            options = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 256}
            options |= {"kv_events_config": {"enable_kv_cache_events": True} | events}
            server = stack.enter_context(TritonServer(tiny[0], options, engine_only=True))
            made.append((server, ",".join(endpoints)))
        yield made


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
    command = [files.binary, f"--model-repository={repository}", ONE_AT_A_TIME, *flags]
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


Server = TritonServer | PlainServer | DemoServer


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
    model: str
    responses: queue.Queue[Response] = field(default_factory=queue.Queue)

    def send(self, request_id: str = "", **inputs: Any) -> None:
        self.client.async_stream_infer(
            self.model, tensors(inputs), request_id=request_id, enable_empty_final_response=True
        )

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
    server: Server,
    *,
    model: str = MODEL,
    strict: bool = False,
    headers: dict[str, str] | None = None,
) -> Iterator[RawStream]:
    """Open a stream. strict: ask for gRPC status codes; an error then ends the stream."""
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        stream = RawStream(client, model)
        headers = (headers or {}) | ({"triton_grpc_error": "true"} if strict else {})
        client.start_stream(lambda result, error: stream.responses.put(read(result, error)), headers=headers)
        try:
            yield stream
        except BaseException:
            stream.cancel()  # its requests may never end
            raise


@contextmanager
def raw_streams(server: TritonServer, count: int, *, model: str = MODEL) -> Iterator[list[RawStream]]:
    with ExitStack() as stack:
        yield [stack.enter_context(raw_stream(server, model=model)) for _ in range(count)]


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
    server: Server,
    body: dict[str, Any] | bytes,
    endpoint: str = "generate",
    *,
    model: str = MODEL,
) -> tuple[int, str]:
    """Call the generate extension and return (HTTP status, body)."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"http://{server.http_url}/v2/models/{model}/{endpoint}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=WAIT) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics(server: Server) -> dict[str, float]:
    """Return the `paged_` metrics by `name{label}`, where the label is the state, reason, kind, direction or tier."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=WAIT) as reply:
        text = reply.read().decode()
    found = {}
    for name, labels, value in re.findall(r"^(paged_\w+)\{(.*?)\} (\S+)$", text, re.M):
        label = re.search(r'(?:state|reason|le|kind|direction|tier)="(.*?)"', labels)
        found[f"{name}{{{label.group(1)}}}" if label else name] = float(value)
    return found


def idle(server: Server, *, model: str = MODEL) -> None:
    """Wait until no request runs or waits and no block is in use.

    Requesting a pool map brings the metrics up to date, which otherwise are some tenths of a second old.
    """

    def is_idle() -> bool:
        post(server, {"pool_map": True}, model=model)
        now = metrics(server)
        busy = now["paged_kv_blocks{used}"] + now["paged_requests{running}"] + now["paged_requests{waiting}"]
        available = now["paged_kv_blocks{free}"] + now["paged_kv_blocks{cached}"]
        return busy == 0 and available == now["paged_kv_blocks{total}"]

    until(is_idle, "an idle server with every block free or cached")
