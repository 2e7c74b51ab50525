"""Tests of `paged serve` and TritonServer, with a real tritonserver and a model that echoes its options."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from client.commands.arguments import parse_pairs
from client.serving import demo_model
from client.serving.launch import Console
from client.serving.ports import choose_ports
from client.serving.repository import check_options, resolve_model, resolve_models, write_repository
from client.serving.server_files import ServerNotFoundError, find_server, perf_analyzer
from client.serving.server_log import load_failure
from client.serving.tritonserver import ServerError, TritonServer
from paged_backend.api.config import EngineConfig
from paged_backend.api.limits import InputLimits

ROOT = Path(__file__).resolve().parents[2]
ECHO_MODEL = """
import json, pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils
import paged_backend.api.request  # the project is importable

class TritonPythonModel:
    def initialize(self, args):
        self.options = json.loads((pathlib.Path(__file__).parent / "model.json").read_text())
        if "wrong" in self.options:
            raise ValueError(f"wrong={self.options['wrong']}: unknown option")
        time.sleep(self.options.get("load_seconds", 0))

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            output = pb_utils.Tensor("text_output", np.array([json.dumps(self.options)], object))
            sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        print("finalized", flush=True)
"""


def _server_is_there() -> bool:
    try:
        find_server()
    except ServerNotFoundError:
        return False
    return True


needs_server = pytest.mark.skipif(not _server_is_there(), reason="no tritonserver")


@pytest.fixture
def repository(tmp_path):
    """A model repository like the project's, with a model that loads immediately."""
    version = tmp_path / "repository" / "paged_llm" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(ECHO_MODEL)
    (version / "model.json").write_text('{"model": "replaced", "block_size": 16}')
    config = (ROOT / "model_repository/paged_llm/config.pbtxt").read_text()
    (version.parent / "config.pbtxt").write_text(config)
    return version.parent.parent


@pytest.fixture
def launch(repository, tmp_path):
    """Yield a function that runs serve() in a subprocess. All of them are killed at the end."""
    script = (
        "import sys, json; from pathlib import Path; from client.serving import launch, tritonserver\n"
        "tritonserver.TritonServer.__init__.__kwdefaults__['repository'] = Path(sys.argv[1])\n"
        "sys.exit(launch.serve(sys.argv[2], **json.loads(sys.argv[3])))"
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


def echoed_options(server: TritonServer) -> dict:
    url = f"http://127.0.0.1:{server.http_port}/v2/models/paged_llm/generate_stream"
    request = urllib.request.Request(url, data=b'{"text_input": "x"}')
    with urllib.request.urlopen(request, timeout=60) as reply:
        event = reply.read().decode()
    return json.loads(json.loads(event.removeprefix("data: "))["text_output"])


def is_running(pid: int) -> bool:
    """Return whether a process runs. A zombie (state Z) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Return the child processes of all threads of `pid`."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in lists for child in file.read_text().split()]


def wait_until(condition) -> None:
    """Poll until a condition holds. The time limit is that of the test."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.05)


def test_all_ports_in_use_are_reported():
    with socket.socket() as one, socket.socket() as two:
        for holder in (one, two):
            holder.bind(("", 0))
            holder.listen()
        first, second = (holder.getsockname()[1] for holder in (one, two))
        with pytest.raises(ValueError, match=rf"http_port={first}: .*; metrics_port={second}: "):
            choose_ports(http_port=first, grpc_port=0, metrics_port=second)


def test_same_port_twice_is_rejected():
    (port,) = choose_ports(any=0)
    with pytest.raises(ValueError, match=f"grpc_port={port}"):
        choose_ports(http_port=port, grpc_port=port)


def test_port_out_of_range_is_rejected():
    with pytest.raises(ValueError, match=r"http_port=65536: must be 0\.\.65535"):
        choose_ports(http_port=65536)


def test_chosen_ports_differ():
    assert len(set(choose_ports(a=0, b=0, c=0))) == 3


def test_missing_model_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="/no/such/model"):
        resolve_model("/no/such/model")
    assert resolve_model(tmp_path) == str(tmp_path)
    assert resolve_model("owner/model-1.5B") == "owner/model-1.5B"


def test_speculative_model_is_resolved_like_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model, "prepare", lambda: tmp_path)
    for name in ("model", "speculative_model"):
        assert resolve_models({"model": "owner/model", "seed": 1, name: "demo"})[name] == str(tmp_path)
        with pytest.raises(ValueError, match=f"^{name}='/no/such/model': must be 'demo', a directory"):
            resolve_models({name: "/no/such/model"})
    assert resolve_models({"speculative_model": None}) == {"speculative_model": None}


@pytest.mark.parametrize("flag", ["--http-port=1", "--allow-http=false", "--model-repository=/m"])
def test_reserved_server_options_are_rejected(tmp_path, flag):
    with pytest.raises(ValueError, match=f"{flag}: cannot be set"):
        TritonServer(tmp_path, server_args=["--log-verbose=1", flag])


def test_options_override_the_repository(repository, tmp_path):
    write_repository(repository, tmp_path / "copy", {"model": "/m", "seed": 7})
    written = json.loads((tmp_path / "copy/paged_llm/1/model.json").read_text())
    assert written == {"model": "/m", "block_size": 16, "seed": 7}
    assert (tmp_path / "copy/paged_llm/config.pbtxt").is_file()


def test_limits_on_the_command_line_are_merged_with_those_of_model_json(repository, tmp_path):
    options = repository / "paged_llm/1/model.json"
    options.write_text(json.dumps({"model": "m", "limits": {"max_tools": 1, "max_choices": 1}}))
    pairs = parse_pairs("-o", ["limits.max_tools=8", 'limits={"max_messages": 4}', "max_stop_strings=2"])
    check_options({"model": "m"} | pairs)
    write_repository(repository, tmp_path / "copy", pairs)
    config = EngineConfig.from_file(tmp_path / "copy/paged_llm/1/model.json")
    assert config.limits == InputLimits(max_tools=8, max_choices=1, max_messages=4, max_stop_strings=2)


def test_repository_without_the_model_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="has no paged_llm/"):
        write_repository(tmp_path, tmp_path / "copy", {})


def test_repository_options_are_the_documented_defaults():
    assert json.loads((ROOT / "model_repository/paged_llm/1/model.json").read_text()) == {
        "model": ".cache/models/SmolLM2-135M-Instruct",
        "dtype": "auto",
        "block_size": 16,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
    }


@pytest.mark.parametrize(
    "log",
    [
        "E1 x] \"failed to load 'm' version 1: Internal: ValueError: a\\nb\\n\\nAt:\\n  f\\n\"\nI1 ",
        "E1 x.cc:654] failed to load 'm' version 1: Internal: ValueError: a\\nb\\n\\nAt:\nI1 more\n",
    ],
)
def test_load_failure_is_parsed_from_the_log(log):
    assert load_failure(log) == "ValueError: a\nb"


def test_load_failure_keeps_its_quotes():
    assert (
        load_failure('E1 x] "failed to load \'m\' version 1: dtype=\\"x\\": no\\n\\nAt:\\n  f\\n"\n') == 'dtype="x": no'
    )


def test_log_without_load_failure():
    assert load_failure("I1121 all is well\n") is None


def test_console_hides_info_lines(capsys):
    console = Console(verbose=False)
    console.log_line("E1121 while loading\n")
    console.log_line("2026-11-21 10:00:00,000 ERROR paged_llm: disk_cache_dir: cannot be used\n")
    console.ready("Ready.")
    console.log_line("I1121 information\n")
    console.log_line("W1121 warning\n")
    console.log_line("Traceback\n")
    shown = capsys.readouterr()
    assert shown.out == "Ready.\n"
    ours, *rest = shown.err.splitlines()
    assert ours.endswith("ERROR paged_llm: disk_cache_dir: cannot be used")
    assert rest == ["W1121 warning", "Traceback"]


def test_verbose_console_shows_all_lines(capsys):
    Console(verbose=True).log_line("I1121 information\n")
    assert capsys.readouterr().err == "I1121 information\n"


@needs_server
def test_two_servers_run_side_by_side_and_clean_up(repository, tmp_path):
    with (
        TritonServer(tmp_path, {"seed": 1}, repository=repository) as one,
        TritonServer(tmp_path, {"seed": 2}, repository=repository) as two,
    ):
        assert echoed_options(one) == {"model": str(tmp_path), "block_size": 16, "seed": 1}
        assert echoed_options(two)["seed"] == 2
        prefixes = [one.shm_prefix, two.shm_prefix]
        assert all(list(Path("/dev/shm").glob(f"{prefix}*")) for prefix in prefixes)
        pids = [pid for server in (one, two) for pid in (server.pid, *children(server.pid))]
        assert len(pids) == 4, "a server and a stub each"
    assert "finalized" in one.log()
    assert not any(is_running(pid) for pid in pids)
    assert not any(list(Path("/dev/shm").glob(f"{prefix}*")) for prefix in prefixes)
    assert one.stop() == 0, "stopping again changes nothing"


@needs_server
def test_failed_load_reports_the_models_error(repository, tmp_path):
    server = TritonServer(tmp_path, {"wrong": 1}, repository=repository)
    with pytest.raises(ServerError, match=r"^the model did not load: ValueError: wrong=1: unknown option$"):
        server.__enter__()
    assert not is_running(server.pid)
    assert not list(Path("/dev/shm").glob(f"{server.shm_prefix}*"))


@needs_server
def test_unknown_server_option_is_reported(repository, tmp_path):
    server = TritonServer(tmp_path, repository=repository, server_args=["--nonsense"])
    with pytest.raises(ServerError, match=r"exited with code 1: .*unrecognized option '--nonsense'$"):
        server.__enter__()


@needs_server
def test_load_timeout(repository, tmp_path):
    server = TritonServer(tmp_path, {"load_seconds": 60}, repository=repository)
    server.start()
    with pytest.raises(ServerError, match="not ready after 0 s"):
        server.wait_ready(timeout=0)
    server.kill()
    assert server.stop() == -signal.SIGKILL


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
    shown = [process.stdout.readline() for _ in range(4)]
    assert shown[0].split() == [
        *("Ready.", "HTTP", f"localhost:{http}", "gRPC", f"localhost:{grpc}"),
        *("metrics", f"localhost:{metrics}/metrics"),
    ]
    assert f"curl -N localhost:{http}/v2/models/paged_llm/generate_stream -d '" in shown[2]
    assert "paged generate" in shown[3]
    assert f"--url localhost:{grpc}" in shown[3]
    stop_by_ctrl_c(process)


@needs_server
def test_ctrl_c_does_not_wait_for_an_idle_grpc_stream(launch):
    """tritonserver itself waits until the client closes its stream."""
    process, _, grpc, _ = launch_anywhere(launch, verbose=True)
    assert process.stdout.readline().startswith("Ready.")
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
    assert process.stdout.readline().startswith("Ready.")
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
    assert process.stdout.readline().startswith("Ready.")
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
def test_serve_reports_a_failed_load_in_one_message(launch):
    process = launch(http_port=0, grpc_port=0, metrics_port=0, options={"wrong": 1})
    shown, errors = process.communicate()
    assert process.returncode == 1
    assert shown == ""
    assert errors.splitlines()[-1] == "error: the model did not load: ValueError: wrong=1: unknown option"


@needs_server
def test_serve_reports_a_port_in_use(launch):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        process = launch(http_port=0, grpc_port=holder.getsockname()[1], metrics_port=0)
        _, errors = process.communicate()
        assert process.returncode == 1
        assert errors == f"error: grpc_port={holder.getsockname()[1]}: Address already in use\n"


@needs_server
def test_server_exits_when_the_launcher_is_killed(launch):
    process = launch(http_port=0, grpc_port=0, metrics_port=0)
    assert process.stdout.readline().startswith("Ready.")
    (server,) = children(process.pid)
    stubs = children(server)
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_running(pid) for pid in [server, *stubs]))


def test_perf_analyzer_runs_in_its_environment():
    found = perf_analyzer()
    if found is None:
        pytest.skip("no perf_analyzer for this machine")
    binary, environment = found
    shown = subprocess.run([binary, "--version"], env=environment, capture_output=True, text=True, check=True)
    assert "Perf Analyzer Version" in shown.stdout + shown.stderr
    assert environment.items() >= {key: os.environ[key] for key in ("PATH", "HOME")}.items()
