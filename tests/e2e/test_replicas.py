"""Data parallelism: several engines behind one model of the server."""

import os
import re
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from paged_client import Client
from paged_client.cli import main
from paged_client.serving.tritonserver import TritonServer
from tests.support.in_process import byte_tokenizer, generate_with_transformers
from tests.support.processes import children, needs_server
from tests.support.triton import metrics, post, raw_stream
from tests.support.waiting import until

pytestmark = needs_server

OPTIONS = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 4096, "max_num_seqs": 1}
GREEDY = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
SECRET = "secret-that-nobody-may-read"  # of a store that cannot be reached
CUT = "\ufffd"  # of a character that the end truncates
PROMPTS = [f"{word} {word} {word} {word}" for word in ("one", "two", "six", "ten", "red", "sky", "sea", "oak")]


@pytest.fixture(scope="module")
def replicated(long_model):
    options = OPTIONS | {
        "data_parallel_size": 2,
        "swap_space": 0.01,
        "remote_cache_url": f"redis://:{SECRET}@[::1]:1/0",
    }
    secret = {"PAGED_REMOTE_CACHE_SECRET": SECRET}
    with TritonServer(long_model[0], options, engine_only=True, environment=secret) as made:
        yield made


@pytest.fixture(scope="module")
def expected(long_model):
    tokenizer = byte_tokenizer()
    tokens = [generate_with_transformers(long_model[1], tokenizer.encode(prompt), 12) for prompt in PROMPTS]
    return [tokenizer.decode(one).rstrip(CUT) for one in tokens]


def replicas(server):
    """Return the processes of the replicas."""
    found = []
    for stub in children(server.pid):
        for process in children(stub):
            if b"paged_backend.server.connections.replica" in Path(f"/proc/{process}/cmdline").read_bytes():
                found.append(process)
    return found


def test_secrets_are_on_no_command_line_in_no_log_and_not_in_the_sandbox(replicated):
    body = {"text_input": "a", "max_tokens": 4, "regex": "[ab]{2}"}
    assert post(replicated, body)[0] == 200
    sandboxes = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            command = (process / "cmdline").read_bytes()
            assert SECRET.encode() not in command
            if b"sandbox_process" in command:
                environment = (process / "environ").read_bytes()
                sandboxes += str(Path(__file__).parents[2]).encode() in environment
                assert SECRET.encode() not in environment
    assert sandboxes
    assert "remote_cache_url" in replicated.log() and SECRET not in replicated.log()
    (models,) = re.findall(r"--model-repository=([^\0]*)", Path(f"/proc/{replicated.pid}/cmdline").read_text())
    assert SECRET in Path(models, "paged_llm/1/model.json").read_text()
    assert stat.S_IMODE(Path(models).parent.stat().st_mode) == 0o700


@contextmanager
def busy_engines(server):
    """Yield streams without an end, of which each engine runs one. Requests are placed by the number that each engine
    has open, which may include some that have just ended."""
    with ExitStack() as stack:
        streams = []
        while (found := metrics(server)["paged_requests{running}"]) < 2:
            assert len(streams) < 8, f"{found} of 2 engines run a request"
            stream = stack.enter_context(raw_stream(server))
            inputs = {"stream": True, "sampling_parameters": GREEDY | {"max_tokens": 1 << 13}}
            stream.send(text_input=f"{len(streams)}. A long story", **inputs)
            streams.append(stream)
            until(lambda: open_requests(server) == len(streams), "the placement of the request")
        yield streams
        for stream in streams:
            stream.cancel()


def open_requests(server):
    found = metrics(server)
    return found["paged_requests{running}"] + found["paged_requests{waiting}"]


def test_tokens_are_those_of_one_engine(replicated, expected):
    with Client(replicated.grpc_url) as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        for _ in range(3):
            answers = pool.map(lambda prompt: client.generate(prompt, max_tokens=12, **GREEDY).text, PROMPTS)
            assert [answer.rstrip(CUT) for answer in answers] == expected


def test_engines_run_at_the_same_time_and_their_metrics_are_added(replicated):
    assert metrics(replicated)["paged_kv_blocks{total}"] == 2 * OPTIONS["num_gpu_blocks_override"]
    with busy_engines(replicated):
        assert metrics(replicated)["paged_requests{running}"] == 2
    until(lambda: metrics(replicated)["paged_requests{running}"] == 0, "the end of both")
    until(lambda: metrics(replicated)["paged_kv_blocks{used}"] == 0, "free blocks in both engines")


def test_prompt_runs_where_its_beginning_was_computed(replicated):
    shared = "a long beginning that several prompts share, which takes many blocks"
    with Client(replicated.grpc_url) as client:
        for number in range(6):
            answer = client.generate(f"{shared} {number}", max_tokens=2, **GREEDY)
            assert (answer.receipt["cached_tokens"] > 16) == (number > 0)


def test_sessions_streams_and_requests_that_are_ended_work_in_every_engine(replicated):
    with Client(replicated.grpc_url) as client:
        for _ in range(4):
            with client.conversation() as conversation:
                first = conversation.generate("my name is Ada", max_tokens=4, **GREEDY)
                second = conversation.generate("and yours?", max_tokens=4, **GREEDY)
                assert second.num_input_tokens > first.num_input_tokens
    for prompt in PROMPTS[:4]:
        with raw_stream(replicated) as stream:
            inputs = {"stream": True, "sampling_parameters": GREEDY | {"max_tokens": 1 << 13}}
            stream.send(request_id=prompt, text_input=prompt, **inputs)
            assert stream.next().text is not None
            with Client(replicated.grpc_url) as client:
                assert client.cancel(prompt) == 1
            assert "CANCELLED" in str(stream.all()[-1].error)


def test_embeddings_and_pool_maps_are_answered(replicated):
    with Client(replicated.grpc_url) as client:
        assert client.embed("one").values == pytest.approx(client.embed("one").values, abs=1e-5)
    assert post(replicated, {"pool_map": True})[0] == 200


def test_sleep_mode_is_rejected(replicated, capsys):
    assert main(["sleep", "--url", replicated.grpc_url]) == 1
    assert "sleep mode is not supported with data_parallel_size above 1" in capsys.readouterr().err


def error_of(stream):
    """Return the error among the responses that have arrived, or None."""
    while not stream.responses.empty():
        if error := stream.next().error:
            return error
    return None


def test_death_of_a_replica_is_reported(replicated):
    """The last test of this server."""
    (replica,) = replicas(replicated)
    with busy_engines(replicated) as streams:
        os.kill(replica, signal.SIGKILL)
        found = {}

        def read_errors():
            found.update({number: error for number, stream in enumerate(streams) if (error := error_of(stream))})
            return found

        until(read_errors, "the error")
        reason = "replica 1 has ended; the other engines finish their requests"
        until(lambda: replicated.engine_failure == reason, "the line for `paged serve`")
        assert "replica 1 has ended; reload the model" in post(replicated, {"text_input": "x"})[1]
        read_errors()
        assert all("UNAVAILABLE" in str(error) for error in found.values())
        others = [stream for number, stream in enumerate(streams) if number not in found]
        assert others, "the other engine goes on"
        until(lambda: any(not stream.responses.empty() for stream in others), "more of its tokens")
        assert not any(map(error_of, others))
