"""HTTP status codes and gRPC errors of a busy and of a stopping server, as docs/guides/requests.md lists them."""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from paged_client.serving.tritonserver import TritonServer
from tests.support import faults
from tests.support.triton import MODEL, idle, metrics, post, raw_stream, tensors
from tests.support.waiting import until

LONG = {"text_input": "x", "max_tokens": 200, "ignore_eos": True}
EMBED = '{"input": "x"}'
FULL = "Error generating stream: UNAVAILABLE: the waiting queue is full: 1 requests wait (max_queue_size); retry later"
ENDED = "CANCELLED: the request was ended by a stop_request"
LATE = "Error generating stream: DEADLINE_EXCEEDED: the deadline passed before the embedding was computed"


def stop(server, request_id):
    assert post(server, {"id": request_id, "stop_request": True})[0] == 200


def closed(server):
    """Return whether the server accepts no more HTTP requests."""
    try:
        urllib.request.urlopen(f"http://{server.http_url}/v2/health/live").close()
    except urllib.error.HTTPError:
        return False
    except OSError:
        return True
    return False


def sampling(**values):
    return {"text_input": "x", "stream": True, "sampling_parameters": {"ignore_eos": True} | values}


def streamed(server, body):
    return urllib.request.Request(
        f"http://{server.http_url}/v2/models/{MODEL}/generate_stream", json.dumps(body).encode()
    )


def test_statuses_of_a_busy_and_of_a_stopping_server(tiny, tmp_path):
    repository = faults.faulty_repository(tmp_path / "repository", {"slow_steps": 400})
    options = {"dtype": "float32", "max_num_seqs": 1, "max_queue_size": 1, "first_response_ms": -1}
    with (
        TritonServer(tiny[0], options, repository=repository, engine_only=True) as server,
        raw_stream(server) as running,
        raw_stream(server) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        running.send("running", **sampling(max_tokens=200))
        assert not running.next().error
        queued = pool.submit(post, server, LONG | {"id": "queued"})
        until(lambda: metrics(server)["paged_requests{waiting}"] == 1, "the waiting request")
        assert post(server, LONG) == (400, f'{{"error":"{FULL}"}}')
        assert post(server, LONG | {"stream": True}, "generate_stream") == (400, f'data: {{"error":"{FULL}"}}\n\n')
        other.send(text_input="x")
        assert str(other.next().error) == FULL
        stop(server, "queued")
        assert queued.result() == (400, f'{{"error":"{ENDED}"}}')
        assert post(server, {"embedding_request": EMBED, "timeout_ms": 50}) == (400, f'{{"error":"{LATE}"}}')
        other.client.async_stream_infer(MODEL, tensors({"embedding_request": EMBED}), timeout=50_000)
        assert str(other.next().error) == LATE
        stop(server, "running")
        assert str(running.all()[-1].error) == ENDED

        with urllib.request.urlopen(streamed(server, LONG | {"id": "begun", "stream": True})) as reply:
            assert reply.status == 200
            assert b"text_output" in reply.readline()
            stop(server, "begun")
            assert f'data: {{"error":"{ENDED}"}}' in reply.read().decode()
        idle(server)

        running.send("last", **sampling(max_tokens=20))
        assert not running.next().error
        server.terminate()
        until(lambda: closed(server), "the end of HTTP")
        assert running.all()[-1].final  # without an error
        running.close()
        other.close()
        assert server.wait(60) == 0


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
