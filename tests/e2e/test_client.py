"""The client library and the command line with the real engine, over both protocols."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from paged_client import AsyncClient, Client, PagedError
from tests.support.triton import idle
from tests.support.waiting import WAIT

ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}
LONG = {"temperature": 0, "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(params=["grpc", "http"])
def protocol(request):
    return request.param


@pytest.fixture
def url(server, protocol):
    return {"grpc": server.grpc_url, "http": server.http_url}[protocol]


@pytest.fixture
def client(url, protocol):
    with Client(url, protocol=protocol) as made:
        yield made


def test_streaming_and_non_streaming_responses_agree(client):
    whole = client.generate("The sea is", max_tokens=24, **GREEDY)
    with client.stream("The sea is", max_tokens=24, **GREEDY) as stream:
        deltas = list(stream)
    assert stream.completion == whole
    assert not whole.text.startswith("The sea is")
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (whole.finish_reason, whole.num_output_tokens) == ("length", 24)
    assert whole.num_input_tokens > 0


def test_a_receipt_reports_usage(client, protocol):
    prompt = "A receipt lists what was bought and what it cost. " * 4
    first, second = (client.generate(prompt, max_tokens=4, temperature=0, cache_salt=protocol) for _ in range(2))
    assert second == first
    assert (first.receipt["cached_tokens"], second.receipt["cached_tokens"]) == (0, first.num_input_tokens - 1)
    full = (first.num_input_tokens - 1) // 16
    assert (first.receipt["blocks_reused"], second.receipt["blocks_reused"]) == (0, full)
    assert (first.receipt["blocks_new"], second.receipt["blocks_copied"]) == (-(-(first.num_input_tokens + 3) // 16), 1)
    assert second.receipt["generated_tokens"] == 4
    assert second.receipt["preemptions"] == 0
    assert all(second.receipt[f"{phase}_seconds"] > 0 for phase in ("queued", "prefill", "decode"))


def test_messages_are_rendered_with_the_chat_template(client, short_model):
    from transformers import AutoTokenizer

    answer = client.generate(messages=QUESTION, max_tokens=8, **GREEDY)
    rendered = AutoTokenizer.from_pretrained(short_model).apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )
    assert client.generate(rendered, max_tokens=8, **GREEDY).text == answer.text


@pytest.mark.parametrize(
    ("sampling", "named"),
    [({"max_tokens": 0}, "max_tokens=0"), ({"temprature": 1}, "temprature"), ({"top_p": 2}, "top_p=2")],
)
def test_server_errors_map_to_exception_classes(client, sampling, named):
    with pytest.raises(PagedError, match=named) as raised:
        client.generate("x", **sampling)
    assert raised.value.code == "INVALID_ARGUMENT"


def test_closing_a_stream_frees_its_blocks(client, server):
    with client.stream("Once", **LONG) as stream:
        assert next(stream).num_output_tokens > 0
    assert stream.completion.finish_reason == "cancelled"
    idle(server)


def test_best_of(client, server):
    sampling = {"max_tokens": 8, "temperature": 1.2, "seed": 5, "logprobs": 0}
    every = client.generate("Once upon a time", n=4, **sampling)
    best = max((every, *every.others), key=lambda one: one.cumulative_logprob)
    found = client.generate("Once upon a time", best_of=4, **sampling)
    assert (found.text, found.others) == (best.text, ())
    idle(server)


def test_stop_request_over_the_client(client, server):
    with client.stream("Once upon a time", request_id="mine", **LONG) as stream:
        next(stream)
        assert client.cancel("mine") == 1
        with pytest.raises(PagedError, match="CANCELLED: the request was ended by a stop_request"):
            list(stream)
    assert client.cancel("mine") == 0
    idle(server)


def test_a_timeout_returns_partial_output(client, server):
    answer = client.generate("Once upon a time", timeout_ms=1500, **LONG)
    assert (answer.finish_reason, answer.text != "") == ("timeout", True)
    idle(server)


def test_a_timeout_frees_the_blocks(client, server):
    with pytest.raises(PagedError) as raised:
        client.generate("Once", timeout=0.3, **LONG)
    assert raised.value.code == "DEADLINE_EXCEEDED"
    idle(server)


def test_asyncio_concurrent_streams_and_cancellation(url, protocol, server):
    async def scenario():
        async with AsyncClient(url, protocol=protocol) as client:
            lost = asyncio.create_task(client.generate("Once", **LONG))
            same = await asyncio.gather(*(client.generate("The sea is", max_tokens=8, **GREEDY) for _ in range(4)))
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
            assert lost.cancelled()
            return {answer.text for answer in same}

    assert len(asyncio.run(asyncio.wait_for(scenario(), WAIT))) == 1
    idle(server)


def test_the_command_line(url, protocol, client):
    command = [sys.executable, "-m", "paged_client", "generate", "--url", url, "--protocol", protocol]
    flags = ["--max-tokens", "8", "--temperature", "0", "--stats"]
    done = subprocess.run(
        [*command, *flags], cwd=ROOT, input="The sea is\n", capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == client.generate("The sea is", max_tokens=8, **GREEDY).text + "\n"
    assert "8 output tokens (length)" in done.stderr
