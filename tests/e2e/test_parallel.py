"""Tensor parallelism with two processes on a real server."""

import os
import signal

import pytest

from paged_client.cli import main
from paged_client.serving.tritonserver import TritonServer
from tests.support.processes import rank_processes
from tests.support.triton import raw_stream
from tests.support.waiting import until

pytestmark = pytest.mark.ranks


def ranks(server):
    """Return the processes of ranks 1 and up: children of the backend's stub process."""
    return rank_processes("PAGED_TEST_SERVER", server.shm_prefix)


@pytest.mark.nightly
def test_two_ranks_match_one_and_streams_fail_when_a_rank_dies(tiny, tiny_server, monkeypatch):
    request = {"text_input": "one, two", "sampling_parameters": {"temperature": 0, "ignore_eos": True}}
    with raw_stream(tiny_server) as stream:
        stream.send(**request)
        expected = stream.all()[0].text
    options = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_gpu_blocks_override": 80}
    server = TritonServer(tiny[0], options | {"tensor_parallel_size": 2}, engine_only=True)
    monkeypatch.setenv("PAGED_TEST_SERVER", server.shm_prefix)
    with server:
        (rank,) = ranks(server)
        assert main(["probe", "--url", server.grpc_url]) == 0
        with raw_stream(server) as stream:
            stream.send(**request)
            assert stream.all()[0].text == expected
            endless = {"temperature": 0, "ignore_eos": True, "max_tokens": 240}
            stream.send(text_input="one", stream=True, sampling_parameters=endless)
            assert stream.next().text is not None
            os.kill(rank, signal.SIGKILL)
            (error,) = (response.error for response in stream.all() if response.error)
            assert "INTERNAL: the engine died: RunnerDied: rank 1 of 2 has ended" in str(error)
            stream.send(**request)
            assert "UNAVAILABLE: the engine has stopped" in str(stream.next().error)
        assert main(["probe", "--url", server.grpc_url]) == 1


@pytest.mark.nightly
def test_no_worker_process_survives_a_killed_server(tiny, monkeypatch):
    server = TritonServer(tiny[0], {"device": "cpu", "tensor_parallel_size": 2}, engine_only=True)
    monkeypatch.setenv("PAGED_TEST_SERVER", server.shm_prefix)
    with server:
        assert len(ranks(server)) == 1
        server.kill()
        until(lambda: not ranks(server), "the end of every rank")
