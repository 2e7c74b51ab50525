"""A worker of `paged dynamo` with a real server, called as Dynamo's frontend calls it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paged_client import Client
from paged_client.dynamo.processes import Fleet
from paged_client.dynamo.settings import WorkerSettings
from tests.support.dynamo import ROOT, Discovery
from tests.support.in_process import byte_tokenizer
from tests.support.processes import children, needs_server
from tests.support.triton import idle, metrics
from tests.support.waiting import WAIT, until

pytest.importorskip("dynamo._core", reason="no runtime of Dynamo")
pytestmark = needs_server
PROMPT = byte_tokenizer().encode("The sea is")
GREEDY = {"stop_conditions": {"max_tokens": 12, "ignore_eos": True}, "sampling_options": {"temperature": 0.0}}

COMMON = {"model": "paged_llm", "token_ids": PROMPT}


@pytest.fixture(scope="module")
def answers(tiny_server, tmp_path_factory):
    """Greedy, several samples, and refused requests."""
    requests = [
        COMMON | GREEDY | {"output_options": {"logprobs": 2}},
        COMMON | GREEDY | {"sampling_options": {"temperature": 1.0, "seed": 1, "n": 2}},
        COMMON | {"sampling_options": {"top_p": 7.0}},
        COMMON | {"sampling_options": {"typical_p": 0.5}},
        COMMON | {"token_ids": [10**6]},
    ]
    return call(tiny_server, tmp_path_factory.mktemp("discovery"), requests)


def call(server, directory, requests):
    """Return [(chunks, error)] of requests that one worker has served."""
    discovery = Discovery.at(directory)
    with discovery.worker(server):
        command = [sys.executable, Path(__file__).with_name("dynamo_calls.py")]
        environment, text = discovery.environment, json.dumps(requests)
        called = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, timeout=WAIT)
    assert called.returncode == 0, called.stderr
    return json.loads(called.stdout.splitlines()[-1])


@pytest.fixture
def engine(tiny_server):
    with Client(tiny_server.grpc_url) as made:
        yield made


def test_chunks_have_the_tokens_of_the_engine(answers, engine):
    chunks, error = answers[0]
    expected = engine.generate(PROMPT, temperature=0, ignore_eos=True, max_tokens=12, logprobs=2, return_token_ids=True)
    assert error is None
    assert [token for chunk in chunks for token in chunk["token_ids"]] == list(expected.token_ids)
    logprobs = [value for chunk in chunks for value in chunk["log_probs"]]
    assert logprobs == pytest.approx([one[0].logprob for one in expected.logprobs], abs=1e-4)
    assert [chunk.get("finish_reason") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["finish_reason"] == "length"
    usage = chunks[-1]["completion_usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 12)


def test_chunks_of_several_samples(answers, engine):
    chunks, error = answers[1]
    expected = engine.generate(
        PROMPT, temperature=1.0, seed=1, n=2, ignore_eos=True, max_tokens=12, return_token_ids=True
    )
    assert error is None
    for index, sample in enumerate((expected, *expected.others)):
        found = [token for chunk in chunks if chunk["index"] == index for token in chunk["token_ids"]]
        assert found == list(sample.token_ids)
    assert sum("completion_usage" in chunk for chunk in chunks) == 1


def test_a_stopped_request_ends_in_the_engine(server, tmp_path):
    before = metrics(server)["paged_requests_finished_total{cancelled}"]
    endless = {"stop_conditions": {"max_tokens": 4000, "ignore_eos": True}, "stop_after": 2}
    ((chunks, _),) = call(server, tmp_path, [COMMON | endless])
    assert sum(len(chunk["token_ids"]) for chunk in chunks) < 4000
    idle(server)
    assert metrics(server)["paged_requests_finished_total{cancelled}"] > before


@pytest.mark.parametrize(
    ("index", "message"), [(2, "top_p=7.0: must be"), (3, "typical_p=0.5: not supported"), (4, "1000000: must be")]
)
def test_bad_requests_name_the_field(answers, index, message):
    chunks, error = answers[index]
    assert chunks == []
    assert error.startswith("InvalidArgument")
    assert message in error


@pytest.fixture
def fleet(tiny_server, tmp_path, monkeypatch):
    """The processes of one worker, and their discovery."""
    discovery = Discovery.at(tmp_path)
    for name in ("DYN_FILE_KV", "DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"):
        monkeypatch.setenv(name, discovery.environment[name])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/kernels:{ROOT}/client")
    made = Fleet([WorkerSettings(tiny_server.grpc_url, ("paged_llm",), discovery="file", event_plane="zmq")])
    yield made, discovery
    made.stop()
    made.join()


def workers():
    """Return the process ids of this process's workers."""
    return {pid for pid in children(os.getpid()) if b"dynamo.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_a_worker_that_dies_is_started_again(fleet, monkeypatch, capfd):
    processes, discovery = fleet
    monkeypatch.setattr("paged_client.dynamo.processes.LASTED_SECONDS", 0)
    processes.start()
    until(lambda: discovery.instances() == 1, "the worker")
    (first,) = workers()
    os.kill(first, signal.SIGKILL)
    until(lambda: workers() and first not in workers(), "another worker")
    until(lambda: "it is started again" in capfd.readouterr().err, "the reason")


def test_a_worker_that_cannot_start_ends_the_command(tiny_server, tmp_path):
    discovery = Discovery.at(tmp_path)
    flags = ["--url", tiny_server.grpc_url, "--discovery-backend", "file", "--tool-call-parser", "bogus"]
    environment = discovery.environment | {"PYTHONPATH": f"{ROOT}:{ROOT}/kernels:{ROOT}/client"}
    command = [sys.executable, "-m", "paged_client", "dynamo", *flags]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT)
    assert ended.returncode == 1
    assert "paged dynamo: --tool-call-parser bogus: must be none, " in ended.stderr
    assert "has ended with exit code 1" in ended.stderr
