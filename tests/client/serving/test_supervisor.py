"""`paged serve --restart`, with a real tritonserver and a model that loads at once and answers probes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from paged_backend.utils.failure import OTHERS_GO_ON
from paged_client.serving import supervisor
from paged_client.serving.ports import choose_ports
from paged_client.serving.server_log import ServerLog
from paged_client.serving.supervisor import Failure, RestartPolicy, Supervisor
from paged_client.serving.tritonserver import ServerError
from tests.support.faults import inject_into_repository
from tests.support.processes import children, needs_server
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
# Loads while there is a file `blocked`, fails as a dead engine does once the file `failing` has its process id, and
# reports the metric of restarts.
MODEL = """
import json, os, pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils
from paged_backend.server.metrics.metrics import Metrics
from paged_backend.utils import restarts

class TritonPythonModel:
    def initialize(self, args):
        here = pathlib.Path(__file__).parent
        model = pathlib.Path(json.loads((here / "model.json").read_text())["model"])
        self.failing = model / "failing"
        while (model / "blocked").exists():
            time.sleep(0.01)
        self.metrics = Metrics(pb_utils, {"model": "m", "version": "1"})
        for reason, count in restarts.read().items():
            self.metrics.count("restarts", count, reason)
        self.metrics.flush()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if self.failing.exists() and self.failing.read_text() == str(os.getpid()):
                error = pb_utils.TritonError("INTERNAL: the engine died: on purpose", pb_utils.TritonError.INTERNAL)
                sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            values = {"text_output": b"a", "finish_reason": b"length", "receipt": b"{}"}
            tensors = [pb_utils.Tensor(name, np.array([value], object)) for name, value in values.items()]
            tensors += [
                pb_utils.Tensor(f"num_{kind}_tokens", np.array([1], np.uint32)) for kind in ("input", "output")
            ]
            sender.send(pb_utils.InferenceResponse(tensors), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SCRIPT = """
import sys
from pathlib import Path
from paged_client.serving import launch, tritonserver
from paged_client.serving.supervisor import RestartPolicy

repository, model, log, http, grpc, metrics, *openai = sys.argv[1:]
tritonserver.TritonServer.__init__.__kwdefaults__["repository"] = Path(repository)
policy = RestartPolicy(probe_interval=0.2, probe_timeout=5, first_delay=0.1)
ports = {"http_port": int(http), "grpc_port": int(grpc), "metrics_port": int(metrics)}
ports |= {"openai_port": int(port) for port in openai}
sys.exit(launch.serve(model, log_file=Path(log), restart=policy, **ports))
"""
pytestmark = needs_server


class Launched:
    """A supervised server in a process of its own."""

    def __init__(self, repository, model, log, **more_ports):
        self.model, self.log = model, log
        self.ports = choose_ports(http=0, grpc=0, metrics=0, **more_ports)
        command = [sys.executable, "-c", SCRIPT, str(repository), str(model), str(log), *map(str, self.ports)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.output: list[str] = []
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self.output.extend, args=(stream,), daemon=True).start()

    def count(self, text):
        return "".join(self.output).count(text)

    def wait_for(self, text, times=1):
        def found():
            assert self.process.poll() is None or self.count(text) >= times, "".join(self.output)
            return self.count(text) >= times

        until(found, f"{text!r} in the output")

    @property
    def server(self):
        """The process id of tritonserver."""
        (pid,) = children(self.process.pid)
        return pid

    @property
    def stub(self):
        (pid,) = [one for one in children(self.server) if "stub" in Path(f"/proc/{one}/cmdline").read_text()]
        return pid

    def restarts(self):
        """The numbers of restarts by reason; reasons with 0 are left out."""
        with urllib.request.urlopen(f"http://localhost:{self.ports[2]}/metrics") as reply:
            found = re.findall(r'^paged_restarts_total\{.*reason="(\w+)".*\} (\d+)$', reply.read().decode(), re.M)
        return {reason: int(count) for reason, count in found if int(count)}


@pytest.fixture
def launched(repository, tmp_path):
    (repository / "paged_llm/1/model.py").write_text(MODEL)
    model = tmp_path / "model"
    model.mkdir()
    made = Launched(repository, model, tmp_path / "log")
    yield made
    made.process.kill()
    made.process.wait()


def kill_stub(launched):
    os.kill(launched.stub, signal.SIGKILL)


def stop_stub(launched):
    os.kill(launched.stub, signal.SIGSTOP)


def kill_server(launched):
    os.kill(launched.server, signal.SIGKILL)


def fail_engine(launched):
    (launched.model / "failing").write_text(str(launched.stub))


@pytest.mark.parametrize(
    ("fault", "reason", "message"),
    [
        (kill_stub, "stub_died", r"The engine's process \d+ was ended by SIGKILL"),
        (stop_stub, "not_responding", "The server does not respond: "),
        (kill_server, "exited", "tritonserver was ended by SIGKILL"),
        (fail_engine, "engine_failed", "The engine answers with an error: INTERNAL: the engine died: on purpose"),
    ],
)
def test_a_failed_server_is_restarted(launched, fault, reason, message):
    """The reason is printed, logged and counted, and the log of both servers is kept. A signal ends the new server."""
    launched.wait_for("Ready.")
    fault(launched)
    launched.wait_for("Ready.", times=2)
    assert re.search(message, "".join(launched.output)), "".join(launched.output)
    assert launched.count(f"Restart 1 in 0.1 s ({reason}).") == 1
    assert re.search(
        rf"^[-\d]+ [:\d]+ paged serve: .*{message}.* Restart 1 in 0.1 s \({reason}\)\.$", launched.log.read_text(), re.M
    )
    assert launched.restarts()[reason] == 1  # beside failed starts while another process has a port
    assert launched.log.read_text().count("Started HTTPService") == 2
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait() == 0
    until(lambda: launched.count("Stopped.") == 1)


def test_the_openai_gateway_stays_when_the_server_is_restarted(repository, tmp_path):
    (repository / "paged_llm/1/model.py").write_text(MODEL)
    made = Launched(repository, tmp_path, tmp_path / "log", openai=0)

    def complete():
        body = json.dumps({"model": "paged_llm", "prompt": "x"}).encode()
        with urllib.request.urlopen(f"http://localhost:{made.ports[3]}/v1/completions", body) as reply:
            return json.load(reply)["choices"][0]["text"]

    try:
        made.wait_for("Ready.")
        assert complete() == "a"
        kill_server(made)
        made.wait_for("Ready.", times=2)
        assert complete() == "a"
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait() == 0
    finally:
        made.process.kill()
        made.process.wait()


@pytest.mark.nightly
def test_a_dead_engine_is_restarted(repository, tiny, tmp_path):
    """The engine itself, whose runner dies in a step."""
    inject_into_repository(repository, {"dead_engine": 4})
    made = Launched(repository, tiny[0], tmp_path / "log")
    try:
        made.wait_for("Ready.", times=2)
        answer = r"The engine has failed: the engine died: "
        assert re.search(answer, "".join(made.output)), made.output
    finally:
        made.process.send_signal(signal.SIGTERM)
        made.process.wait()


def test_a_start_that_fails_is_repeated(launched):
    """First the port is taken by another process, then the model's directory is gone."""
    launched.wait_for("Ready.")
    moved = launched.model.rename(launched.model.with_name("moved"))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kill_server(launched)
        launched.wait_for("Restart 2 in")
    moved.rename(launched.model)
    launched.wait_for("Ready.", times=2)
    counts = launched.restarts()
    assert counts["exited"] == 1 and counts["start_failed"] >= 1
    assert "The server did not start" in "".join(launched.output)


def test_a_process_that_dies_while_loading_is_a_failed_start(launched):
    launched.wait_for("Ready.")
    blocked, first = launched.model / "blocked", launched.server
    blocked.touch()
    kill_server(launched)
    message = "The server did not start: the model did not load: its process has died"

    def reported():
        for server in set(children(launched.process.pid)) - {first}:
            for stub in children(server):
                with suppress(ProcessLookupError):
                    os.kill(stub, signal.SIGKILL)
        return launched.count(message) > 0

    until(reported, message)
    blocked.unlink()
    launched.wait_for("Ready.", times=2)
    counts = launched.restarts()
    assert counts["exited"] == 1 and counts["start_failed"] >= 1


def test_a_port_in_use_is_waited_for(launched):
    launched.wait_for("Ready.")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def take_port():
            try:
                other.bind(("", launched.ports[0]))
            except OSError:
                return False
            other.listen()
            return True

        os.kill(launched.process.pid, signal.SIGSTOP)  # so that it does not start a server before the port is taken
        kill_server(launched)
        until(take_port, "the server's port")
        os.kill(launched.process.pid, signal.SIGCONT)
        launched.wait_for("in use")
    launched.wait_for("Ready.", times=2)
    assert launched.restarts()["start_failed"] >= 1


def test_a_first_start_that_fails_is_not_repeated(repository, tmp_path):
    made = Launched(repository, tmp_path / "none", tmp_path / "log")
    assert made.process.wait() == 1
    until(lambda: made.count("error:") == 1)


def test_delays_grow_up_to_a_limit():
    policy = RestartPolicy(first_delay=1, longest_delay=60)
    assert [policy.delay(failures) for failures in (1, 2, 3, 7, 100)] == [1, 2, 4, 60, 60]
    assert RestartPolicy().delay(5000) == 60


def test_a_server_is_healthy_some_time_after_it_is_ready(monkeypatch):
    """Time for loading does not count: the delay doubles for servers that fail soon after they are ready."""
    now, work, delays = [0.0], iter([10, 10, 60, 10]), []  # work: for how long the servers work, in seconds

    def pass_time(seconds):
        now[0] += seconds

    def watch(server):
        pass_time(next(work))
        return Failure("exited", "tritonserver has ended.")

    monkeypatch.setattr(supervisor, "time", Mock(monotonic=lambda: now[0]))
    server = Mock(wait_ready=lambda progress: pass_time(100))
    stopping = Mock(is_set=lambda: len(delays) == 4, wait=delays.append)
    tested = Supervisor(lambda environment, append: server, Mock(), RestartPolicy(), stopping, str)
    tested._watch = watch
    tested.run()
    assert delays == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("failure", "is_killed"), [("the engine died", True), (f"replica 1 has ended{OTHERS_GO_ON}", False)]
)
def test_a_server_that_can_answer_requests_finishes_them(monkeypatch, failure, is_killed):
    monkeypatch.setattr(supervisor, "stubs", lambda pid: [])
    monkeypatch.setattr(supervisor, "LAST_WORDS_SECONDS", 0)
    server = Mock(engine_failure=failure)
    server.wait.side_effect = subprocess.TimeoutExpired("", 0)
    with pytest.raises(ServerError, match=f"The engine has failed: {failure}"):
        Supervisor(lambda environment, append: server, Mock(), None, threading.Event(), str).run()
    assert server.kill.called is is_killed
    server.stop.assert_called()


@pytest.mark.parametrize("policy", [None, RestartPolicy(first_delay=0)])
def test_a_server_whose_engine_reports_a_failure_is_ended(monkeypatch, policy):
    """Its log says so, with the server's mark. Others may write to the log: Triton logs the ids of requests. Without a
    policy the server is not started again."""
    log = ServerLog()
    line = "2026-11-27 13:00:00,000 ERROR paged_llm.failure: "
    lines = f"{line}[{log.mark}] the engine died: on purpose\n{line}a client says so\n{line}[mark] and so on"
    with subprocess.Popen([sys.executable, "-c", f"print({lines!r})"], stdout=subprocess.PIPE) as process:
        log.follow(process)
        process.wait()
        log.join()
    monkeypatch.setattr(supervisor, "stubs", lambda pid: [])
    monkeypatch.setattr(supervisor, "LAST_WORDS_SECONDS", 0)
    server = Mock(engine_failure=log.engine_failure, grpc_url="localhost:1", model_name="m")
    server.wait.side_effect = subprocess.TimeoutExpired("", 0)
    console, stopping = Mock(), threading.Event()
    console.restarting.side_effect = lambda message: stopping.set()
    tested = Supervisor(lambda environment, append: server, console, policy, stopping, str)
    message = "The engine has failed: the engine died: on purpose."
    if policy is None:
        with pytest.raises(ServerError, match=message):
            tested.run()
    else:
        tested.run()
        assert console.restarting.call_args.args[0] == f"{message}\nRestart 1 in 0 s (engine_failed)."
    server.kill.assert_called()


def test_a_second_signal_finds_the_server_that_is_being_stopped():
    found = []
    stopping = threading.Event()
    server = Mock(stop=lambda: found.append(supervisor.server))
    server.wait_ready.side_effect = lambda progress: stopping.set()
    supervisor = Supervisor(lambda environment, append: server, Mock(), RestartPolicy(), stopping, str)
    supervisor._watch = lambda server: None
    supervisor.run()
    assert found == [server]
    assert supervisor.server is None
