"""Clients that send requests and do not read responses.

Triton has no backpressure towards the engine, so the buffered responses are limited (max_response_mib). Other clients
are not affected, and all memory is released once the slow readers continue or disconnect.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from paged_client.serving.tritonserver import TritonServer
from tests.support.stress.checker import check
from tests.support.stress.footprint import resident
from tests.support.stress.plans import Plan, to_json
from tests.support.stress.requests import MODEL, RETURN_FLAGS, StressRequest, record_expected
from tests.support.stress.server import OPTIONS, save_printable, wait_until_idle
from tests.support.triton import idle, metrics, post
from tests.support.waiting import until

READERS, MIB = 4, 1  # number of readers; MiB of responses per request
# 240 tokens of eight samples are several MiB with 20 logprobs per token, and less than one MiB without.
SAMPLING = {"temperature": 1, "seed": 1, "n": 8, "logprobs": 20, "max_tokens": 240, "ignore_eos": True}
SMALL = {"text_input": "abc", "sampling_parameters": json.dumps({"temperature": 0, "max_tokens": 8})}


@pytest.fixture(scope="module")
def small_answers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("printable")
    save_printable(directory)
    options = OPTIONS | {"num_gpu_blocks_override": 4096, "max_num_seqs": 64, "max_response_mib": MIB}
    with TritonServer(directory, options, engine_only=True) as running:
        yield running
        running.kill()  # a killed client may keep the server from stopping: see tests/support/stress


@pytest.fixture(scope="module")
def asked(small_answers):
    (request,) = record_expected(small_answers.http_url, [StressRequest("Call/me", SAMPLING)])
    return request


class Stopped:
    """A process of gRPC clients that stops itself once each stream has its first tokens.

    A signal of this process could arrive after it has read everything.
    """

    def __init__(self, server, request):
        plans = [Plan(f"slow{number}", "grpc", request, allowed_ends=("UNAVAILABLE",)) for number in range(READERS)]
        self.history = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.stress.client_process",
                str(server.http_port),
                server.grpc_url,
                "return_logprobs",
                "--stop",
            ],
            stdin=subprocess.PIPE,
            stdout=self.history,
            text=True,
        )
        self.process.stdin.write("".join(json.dumps(to_json(plan)) + "\n" for plan in plans))
        self.process.stdin.close()
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def read_on(self):
        """Read the buffered responses: each stream gets its own tokens, and the error that ended it."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.wait() == 0
        self.history.seek(0)
        events = [json.loads(line) for line in self.history]
        verdict = check(events)
        assert not verdict.problems, str(verdict)
        assert verdict.outcomes == {"UNAVAILABLE": READERS}
        errors = [event["error"] for event in events if event["kind"] == "terminal"]
        assert all(f"its answer is larger than max_response_mib={MIB}" in error for error in errors)

    def die(self):
        self.process.kill()
        self.process.wait()


class Sockets:
    """HTTP connections that are never read."""

    def __init__(self, server, request):
        inputs = {"text_input": request.text, "stream": True, "return_logprobs": True, **RETURN_FLAGS}
        body = json.dumps(inputs | {"sampling_parameters": json.dumps(request.sampling)}).encode()
        head = f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.sockets = []
        for _ in range(READERS):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", server.http_port))
            one.sendall(head.encode() + body)
            self.sockets.append(one)

    def die(self):
        for one in self.sockets:
            one.close()


@pytest.mark.parametrize(
    ("readers", "end"),
    [
        (Stopped, "read_on"),
        pytest.param(Stopped, "die", marks=pytest.mark.nightly),
        pytest.param(Sockets, "die", marks=pytest.mark.nightly),
    ],
)
def test_slow_readers_do_not_affect_others_and_use_bounded_memory(small_answers, asked, readers, end, figures):
    server = small_answers
    status, alone = post(server, SMALL)
    assert status == 200
    _, before = wait_until_idle(server)
    if readers is Stopped and end == "die":
        del before["processes"]["tritonserver"]  # it may keep the socket of such a stream: see tests/support/stress
    memory, failed = resident(server.pid), metrics(server)["paged_requests_finished_total{refused}"]
    slow = readers(server, asked)

    def all_have_failed():
        assert post(server, SMALL) == (200, alone)
        return metrics(server)["paged_requests_finished_total{refused}"] == failed + READERS

    until(all_have_failed, "the end of the responses that are not read")
    idle(server)  # before anything is read
    grown = {name: (now - memory[name]) / 2**20 for name, now in resident(server.pid).items()}
    assert grown["tritonserver"] < 4 * READERS * MIB
    figures(f"MiB kept for {READERS} answers of {MIB} MiB: {grown}")
    getattr(slow, end)()
    _, after = wait_until_idle(server, before)
    assert after["shm"] == before["shm"]
    for process, held in before["processes"].items():
        assert after["processes"][process] == held, process
