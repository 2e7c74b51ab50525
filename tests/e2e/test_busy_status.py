"""A busy server: HTTP status codes and gRPC errors, as docs/guides/requests.md lists them, and lost connections."""

import json
import os
import signal
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from paged_client.serving.tritonserver import TritonServer
from tests.support import faults
from tests.support.triton import MODEL, ONE_AT_A_TIME, idle, metrics, post, raw_stream, tensors
from tests.support.trtllm_streams import ASKED, opened
from tests.support.waiting import until

LONG = {"text_input": "x", "max_tokens": 200, "ignore_eos": True}
EMBED = '{"input": "x"}'
FULL = "Error generating stream: UNAVAILABLE: the waiting queue is full: 1 requests wait (max_queue_size); retry later"
ENDED = "CANCELLED: the request was ended by a stop_request"
LATE = "Error generating stream: DEADLINE_EXCEEDED: the deadline passed before the embedding was computed"


def stop(server, request_id):
    assert post(server, {"id": request_id, "stop_request": True})[0] == 200


def sampling(**values):
    return {"text_input": "x", "stream": True, "sampling_parameters": {"ignore_eos": True} | values}


def streamed(server, body):
    return urllib.request.Request(
        f"http://{server.http_url}/v2/models/{MODEL}/generate_stream", json.dumps(body).encode()
    )


@pytest.fixture(scope="module")
def slow(tiny, tmp_path_factory):
    """A server of one request at a time, whose steps take at least 400 ms. Streams begin with an empty response."""
    repository = faults.faulty_repository(tmp_path_factory.mktemp("slow") / "repository", {"slow_steps": 400})
    options = {"dtype": "float32", "max_num_seqs": 1, "max_queue_size": 1, "first_response_ms": 0}
    with TritonServer(tiny[0], options, repository=repository, server_args=[ONE_AT_A_TIME]) as running:
        yield running


def runs_one(server):
    until(lambda: metrics(server)["paged_requests{running}"] == 1, "a running request")


def test_statuses_of_a_busy_server(slow):
    with raw_stream(slow) as running, raw_stream(slow) as other, ThreadPoolExecutor(1) as pool:
        running.send("running", **sampling(max_tokens=200))
        runs_one(slow)
        queued = pool.submit(post, slow, LONG | {"id": "queued"})
        until(lambda: metrics(slow)["paged_requests{waiting}"] == 1, "the waiting request")
        assert post(slow, LONG) == (400, f'{{"error":"{FULL}"}}')
        assert post(slow, LONG | {"stream": True}, "generate_stream") == (400, f'data: {{"error":"{FULL}"}}\n\n')
        other.send(text_input="x")
        assert str(other.next().error) == FULL
        stop(slow, "queued")
        assert queued.result() == (400, f'{{"error":"{ENDED}"}}')
        assert post(slow, {"embedding_request": EMBED, "timeout_ms": 50}) == (400, f'{{"error":"{LATE}"}}')
        other.client.async_stream_infer(MODEL, tensors({"embedding_request": EMBED}), timeout=50_000)
        assert str(other.next().error) == LATE
        stop(slow, "running")
        assert str(running.all()[-1].error) == ENDED

        with urllib.request.urlopen(streamed(slow, LONG | {"id": "begun", "stream": True})) as reply:
            assert reply.status == 200
            assert b"text_output" in reply.readline()
            stop(slow, "begun")
            assert f'data: {{"error":"{ENDED}"}}' in reply.read().decode()
        idle(slow)


def cancelled(server):
    return metrics(server)["paged_requests_finished_total{cancelled}"]


def test_an_http_disconnect_before_the_first_token_is_detected(slow):
    """It waits behind another request; the server has written an empty response."""
    before = cancelled(slow)
    body = json.dumps({"text_input": "x", "stream": True, "max_tokens": 30, "ignore_eos": True}).encode()
    head = f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with raw_stream(slow) as first:
        first.send("first", **sampling(max_tokens=200))
        runs_one(slow)
        with socket.create_connection(("localhost", slow.http_port)) as connection:
            connection.sendall(head.encode() + body)
            reply = b""
            while b'"text_output":""' not in reply:
                reply += connection.recv(4096)
        until(lambda: cancelled(slow) == before + 1, "the cancellation")
        assert metrics(slow)["paged_requests{running}"] == 1
        stop(slow, "first")
        assert str(first.all()[-1].error) == ENDED
    idle(slow)


def test_errors_of_triton_over_grpc(tiny_server):
    tensor = grpcclient.InferInput("text_input", [1], "BYTES").set_data_from_numpy(np.array([b"x"], object))
    wrong = grpcclient.InferInput("other", [1], "INT32").set_data_from_numpy(np.array([1], np.int32))
    for model, inputs, text in (
        ("other", [tensor], "Request for unknown model: 'other' is not found"),
        (MODEL, [wrong], f"unexpected inference input 'other' for model '{MODEL}'"),
    ):
        with raw_stream(
            tiny_server
        ) as stream:  # Triton 2.51 may never go on with a stream whose request it has rejected
            stream.client.async_stream_infer(model, inputs)
            error = stream.next().error
            assert (error.status(), error.message()) == (None, text)
            stream.cancel()
    with grpcclient.InferenceServerClient(tiny_server.grpc_url) as client:
        with pytest.raises(InferenceServerException, match="doesn't support models with decoupled") as caught:
            client.infer(MODEL, [tensor])
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    idle(tiny_server)


CRASH = "Fatal Python error: Segmentation fault"


def kill(server, model):
    """Kill the process of this model, as a crash would; its id is in the server's log."""
    crashes = server.log().count(CRASH)
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            line = (process / "cmdline").read_bytes().decode(errors="replace")
            if process.name.isdigit() and server.shm_prefix in line and f"/{model}/1/model.py" in line:
                os.kill(int(process.name), signal.SIGSEGV)
                until(lambda: server.log().count(CRASH) > crashes, "the tracebacks of its threads")
                return
    raise AssertionError(f"no process of {model}")


def test_a_killed_model_leaves_nothing_behind(slow):
    """No blocks stay in use and no client waits forever. The last test of this server.

    The server itself loses the open requests of a model whose process dies. The requests run for longer than a minute,
    so they cannot end before.
    """
    before = cancelled(slow)
    long = ASKED | {"max_tokens": [[200]]}
    with opened(slow, "ensemble") as lost, opened(slow) as stream:
        lost.send(**long)
        runs_one(slow)
        kill(slow, "ensemble")
        until(lambda: cancelled(slow) == before + 1, "a cancellation")
        idle(slow)
        stream.send(**long)
        runs_one(slow)
        kill(slow, MODEL)
        with pytest.raises(InferenceServerException, match=r"^UNAVAILABLE: the engine's model was unloaded, or has"):
            stream.all()
        slow.kill()  # stopping it would wait for the lost requests
