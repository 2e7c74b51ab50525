"""`paged serve`, with a real tritonserver and a model that echoes its options."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from paged_client.serving.launch import default_log_file
from paged_client.serving.ports import choose_ports
from tests.support.processes import children, is_running, needs_server

ROOT = Path(__file__).resolve().parents[3]
# Streams a part, and another once there is a file `more`; with a file `endless`, never another one.
STREAMING_MODEL = """
import json, pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

senders = []

class TritonPythonModel:
    def execute(self, requests):
        here = pathlib.Path(__file__).parent
        model = pathlib.Path(json.loads((here / "model.json").read_text())["model"])
        for request in requests:
            sender = request.get_response_sender()
            for text, reason in ((b"a", b"None"), (b"b", b"length")):
                texts = {"text_output": text, "finish_reason": reason, "receipt": b"{}"}
                tensors = [pb_utils.Tensor(name, np.array([value], object)) for name, value in texts.items()]
                tensors += [
                    pb_utils.Tensor(f"num_{kind}_tokens", np.array([1], np.uint32)) for kind in ("input", "output")
                ]
                sender.send(pb_utils.InferenceResponse(tensors))
                if (model / "endless").exists():
                    senders.append(sender)
                    break
                while not (model / "more").exists():
                    time.sleep(0.01)
            else:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture
def launch(repository, tmp_path):
    """Yield a function that runs serve() in a subprocess. All of them are killed at the end."""
    script = (
        "import sys, json; from pathlib import Path; from paged_client.serving import launch, tritonserver\n"
        "tritonserver.TritonServer.__init__.__kwdefaults__['repository'] = Path(sys.argv[1])\n"
        "arguments = json.loads(sys.argv[3])\n"
        "arguments['log_file'] = Path(arguments['log_file']) if 'log_file' in arguments else None\n"
        "sys.exit(launch.serve(sys.argv[2], **arguments))"
    )
    started = []

    def start(model=tmp_path, **arguments):
        command = [sys.executable, "-c", script, str(repository), str(model), json.dumps(arguments)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_until(condition) -> None:
    """Poll until a condition holds. The time limit is that of the test."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.05)


def listening(port):
    """The IPv4 addresses at which a TCP port of this machine listens."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [line[1].split(":")[0] for line in lines if line[3] == "0A" and int(line[1].split(":")[1], 16) == port]
    return [socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in found]


def read_ready(process) -> None:
    """Wait until the server is ready. Fails with what the launcher wrote if it ends before."""
    line = process.stdout.readline()
    assert line.startswith("Ready."), line or process.communicate()[1]


def launch_anywhere(launch, **options):
    """Return (process, its ports for HTTP, gRPC and metrics)."""
    http, grpc, metrics = choose_ports(a=0, b=0, c=0)
    return launch(http_port=http, grpc_port=grpc, metrics_port=metrics, **options), http, grpc, metrics


def stop_by_ctrl_c(process):
    """Stop a process with Ctrl-C, check its exit, and return its standard error."""
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 0
    assert errors.endswith("Stopped.\n")
    return errors


@needs_server
def test_serve_prints_endpoints_and_stops_on_ctrl_c(launch):
    process, http, grpc, metrics = launch_anywhere(launch)
    shown = [process.stdout.readline() for _ in range(5)]
    assert shown[0].split() == [
        *("Ready.", "HTTP", f"localhost:{http}", "gRPC", f"localhost:{grpc}"),
        *("metrics", f"localhost:{metrics}/metrics"),
    ]
    assert shown[2].endswith(f"paged chat --url localhost:{grpc}\n")
    assert f"curl -N localhost:{http}/v2/models/paged_llm/generate_stream -d '" in shown[3]
    assert shown[4] == "Press Ctrl-C to stop the server.\n"
    assert {address for port in (http, grpc, metrics) for address in listening(port)} == {"127.0.0.1"}
    assert "Warning" not in stop_by_ctrl_c(process)


@needs_server
def test_host_opens_all_ports_and_says_so(launch):
    process, *ports = launch_anywhere(launch, host="0.0.0.0", openai_port=0)
    openai = int(process.stdout.readline().split()[-1].removesuffix("/v1").rpartition(":")[2])
    assert {address for port in (*ports, openai) for address in listening(port)} == {"0.0.0.0"}
    assert "Triton's ports have no encryption and no authentication" in stop_by_ctrl_c(process)


@needs_server
def test_ctrl_c_does_not_wait_for_an_idle_grpc_stream(launch):
    """tritonserver itself waits until the client closes its stream."""
    process, _, grpc, _ = launch_anywhere(launch, verbose=True)
    read_ready(process)
    answers = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(f"localhost:{grpc}") as stays:
        stays.start_stream(lambda result, error: answers.put(error))
        text = grpcclient.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"x"], dtype=np.object_))
        stays.async_stream_infer("paged_llm", [text])
        assert answers.get() is None
        errors = stop_by_ctrl_c(process)
    assert "exit timeout" not in errors.lower()


@needs_server
def test_ctrl_c_does_not_wait_for_an_idle_http_connection(launch):
    """tritonserver itself waits for the connection, or for its exit timeout, before it unloads models."""
    process, http, _, _ = launch_anywhere(launch, verbose=True)
    read_ready(process)
    stays = HTTPConnection("localhost", http)
    stays.request("GET", "/v2/health/ready")
    assert stays.getresponse().read() == b""
    errors = stop_by_ctrl_c(process)
    stays.close()
    assert "Found 1 HTTP service connections" in errors
    assert "exit timeout" not in errors.lower()


@needs_server
def test_ctrl_c_works_with_closed_standard_error(launch):
    process, *_ = launch_anywhere(launch, verbose=True)
    read_ready(process)
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


@needs_server
def test_second_signal_kills_a_loading_server(launch):
    process = launch(http_port=0, grpc_port=0, metrics_port=0, options={"load_seconds": 3600})
    assert process.stderr.readline().startswith("Loading the model")
    (server,) = children(process.pid)
    wait_until(lambda: children(server))
    (stub,) = children(server)
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline().startswith("Stopping")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0
    assert not is_running(server)
    assert not is_running(stub)


@needs_server
def test_serve_reports_a_failed_load_in_one_message(launch, tmp_path):
    log = tmp_path / "logs" / "serve.log"
    process = launch(http_port=0, grpc_port=0, metrics_port=0, options={"wrong": 1}, log_file=str(log))
    shown, errors = process.communicate()
    assert process.returncode == 1
    assert shown == ""
    first, *_, error, where = errors.splitlines()
    assert first == f"Log: {log}"
    assert error == "error: the model did not load: ValueError: wrong=1: unknown option"
    assert where == f"The server's log is in {log}"
    assert "wrong=1: unknown option" in log.read_text()


@needs_server
@pytest.mark.parametrize("output", ["loading: paged_llm", "initializing"])
def test_serve_reports_a_process_that_died_while_loading(launch, tmp_path, output):
    """The server itself notices only the death of a process that has connected to it."""
    log = tmp_path / "log"
    options = {"load_seconds": 3600}
    process = launch(http_port=0, grpc_port=0, metrics_port=0, options=options, log_file=str(log))
    wait_until(lambda: log.exists() and output in log.read_text())
    (server,) = children(process.pid)

    def ended():
        for stub in children(server):  # again and again, because there may be a first one that only reads the settings
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub, signal.SIGKILL)
        return process.poll() is not None

    wait_until(ended)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "error: the model did not load: its process has died while loading" in errors
    assert not is_running(server)


def test_default_log_file(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path))
    assert default_log_file(8000) == tmp_path / "logs" / "serve-8000.log"
    monkeypatch.delenv("PAGED_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_log_file(1) == tmp_path / "paged_llm" / "logs" / "serve-1.log"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_log_file(1) == Path.home() / ".cache" / "paged_llm" / "logs" / "serve-1.log"


@needs_server
@pytest.mark.parametrize("name", ["grpc", "openai"])
def test_serve_reports_a_port_in_use(launch, name):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        process = launch(**ports | {f"{name}_port": port})
        _, errors = process.communicate()
        assert process.returncode == 1
        assert errors == f"error: --{name}-port={port}: Address already in use\n"


@needs_server
def test_gateway_listens_where_the_server_does_and_ends_with_it(launch):
    (openai,) = choose_ports(any=0)
    process, *_ = launch_anywhere(launch, openai_port=openai, server_args=["--http-address=127.0.0.2"])
    line = process.stdout.readline()
    assert line.split()[-2:] == ["OpenAI", f"127.0.0.2:{openai}/v1"], line or process.communicate()[1]
    shown = [process.stdout.readline() for _ in range(5)]
    assert f"curl 127.0.0.2:{openai}/v1/chat/completions -H 'Content-Type: application/json' -d '" in shown[2]
    connection = HTTPConnection("127.0.0.2", openai)
    connection.request("GET", "/live")
    assert connection.getresponse().status == 200
    with socket.socket() as elsewhere:
        assert elsewhere.connect_ex(("127.0.0.1", openai)) != 0
    stop_by_ctrl_c(process)  # with the connection open


@needs_server
def test_ctrl_c_lets_a_stream_of_the_gateway_finish(launch, repository, tmp_path):
    (repository / "paged_llm/1/model.py").write_text(STREAMING_MODEL)
    (openai,) = choose_ports(any=0)
    process, *_ = launch_anywhere(launch, openai_port=openai)
    read_ready(process)
    connection = HTTPConnection("localhost", openai)
    connection.request("POST", "/v1/completions", json.dumps({"model": "paged_llm", "prompt": "x", "stream": True}))
    reply = connection.getresponse()
    parts = [reply.readline()]
    process.send_signal(signal.SIGINT)
    assert any(line.startswith("Stopping") for line in iter(process.stderr.readline, ""))
    (tmp_path / "more").touch()
    parts += [line for line in reply if line != b"\n"]
    *chunks, end = [part.removeprefix(b"data: ") for part in parts]
    assert end == b"[DONE]\n"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == "ab"
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
    assert process.wait(60) == 0
    with socket.socket() as later:
        assert later.connect_ex(("localhost", openai)) != 0


def error_of(event):
    """Return the error that an event of the gateway has, or None."""
    return json.loads(event).get("error") if event.startswith(b"{") else None


@needs_server
@pytest.mark.parametrize(
    ("find", "message"),
    [
        (lambda server: server, "error: tritonserver was ended by SIGKILL"),
        (lambda server: children(server)[0], "error: The engine's process {pid} was ended by SIGKILL, as when"),
    ],
    ids=["tritonserver", "stub"],
)
def test_a_killed_process_ends_streams_and_the_server(launch, repository, tmp_path, find, message):
    """Each stream has one error, also one of the gateway, and nothing answers any more."""
    (repository / "paged_llm/1/model.py").write_text(STREAMING_MODEL)
    (tmp_path / "endless").touch()
    process, http, grpc, _ = launch_anywhere(launch, openai_port=0)
    openai = process.stdout.readline().split()[-1].removesuffix("/v1")
    connection = HTTPConnection(openai, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({"model": "paged_llm", "prompt": "x", "stream": True}))
    reply = connection.getresponse()
    assert b'"a"' in reply.readline()
    answers = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(f"localhost:{grpc}") as client:
        client.start_stream(lambda result, error: answers.put(error))
        text = grpcclient.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"x"], dtype=np.object_))
        client.async_stream_infer("paged_llm", [text])
        assert answers.get(timeout=60) is None
        (server,) = children(process.pid)
        victim = find(server)
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        assert "UNAVAILABLE" in answers.get(timeout=60).status()
        assert answers.empty()
    events = [line.removeprefix(b"data: ") for line in reply if line != b"\n"]
    failed = [error for error in map(error_of, events) if error]
    assert [error["code"] for error in failed] == ["unavailable"], events
    assert process.returncode == 1
    assert message.format(pid=victim) in errors
    assert "Traceback" not in errors
    with socket.socket() as later:
        assert later.connect_ex(("localhost", http)) != 0


@needs_server
def test_a_second_signal_cuts_the_streams_of_the_gateway(launch, repository, tmp_path):
    (repository / "paged_llm/1/model.py").write_text(STREAMING_MODEL)
    (tmp_path / "endless").touch()
    process, *_ = launch_anywhere(launch, openai_port=0)
    connection = HTTPConnection(process.stdout.readline().split()[-1].removesuffix("/v1"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({"model": "paged_llm", "prompt": "x", "stream": True}))
    reply = connection.getresponse()
    assert b'"a"' in reply.readline()
    process.send_signal(signal.SIGTERM)
    assert any(line.startswith("Stopping") for line in iter(process.stderr.readline, ""))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert errors == "Stopped.\n"
    assert process.returncode == 0


@needs_server
def test_gateway_takes_the_api_keys_of_the_environment(launch, monkeypatch):
    monkeypatch.setenv("PAGED_API_KEYS", "secret")
    process, *_ = launch_anywhere(launch, openai_port=0)
    openai = process.stdout.readline().split()[-1].removesuffix("/v1")
    shown = [process.stdout.readline() for _ in range(5)]
    assert '-H "Authorization: Bearer ${PAGED_API_KEYS%%,*}"' in shown[2]
    for header, status in [({}, 401), ({"Authorization": "Bearer secret"}, 400)]:
        connection = HTTPConnection(openai)
        connection.request("POST", "/v1/completions", "{}", header)
        assert connection.getresponse().status == status
    stop_by_ctrl_c(process)


@needs_server
def test_invalid_api_keys_are_reported_before_the_server_starts(launch, monkeypatch):
    monkeypatch.setenv("PAGED_API_KEYS", ",")
    process, *_ = launch_anywhere(launch, openai_port=0)
    assert process.communicate() == ("", "error: PAGED_API_KEYS: has no key\n")
    assert process.returncode == 1


@needs_server
def test_server_exits_when_the_launcher_is_killed(launch):
    process = launch(http_port=0, grpc_port=0, metrics_port=0)
    read_ready(process)
    (server,) = children(process.pid)
    stubs = children(server)
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_running(pid) for pid in [server, *stubs]))
