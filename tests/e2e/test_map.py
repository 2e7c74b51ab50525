"""Pool maps of a real server while requests run, wait and after they have ended."""

import json
from pathlib import Path

import pytest

from paged_client import Client, PagedError
from tests.support.triton import idle, metrics, post, raw_stream
from tests.support.waiting import until

PROMPT = "The ships that came into the old harbour carried " + "salt and iron, " * 12


@pytest.fixture(params=["grpc", "http"])
def client(request, server):
    url = {"grpc": server.grpc_url, "http": server.http_url}[request.param]
    with Client(url, protocol=request.param) as made:
        yield made


def begin(stream, max_tokens=4000, **sampling):
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | sampling
    stream.send(text_input=PROMPT, stream=True, sampling_parameters=sampling)
    assert stream.next().error is None


def finished(server):
    return {name: value for name, value in metrics(server).items() if name.startswith("paged_requests_finished")}


def counts(pool):
    """Return how many requests run and wait."""
    return pool.running, pool.waiting


def test_blocks_are_owned_while_running_and_cached_afterwards(server, client):
    idle(server)
    before = finished(server)
    with raw_stream(server) as stream:
        begin(stream)
        pool = client.pool_map()
        assert counts(pool) == (1, 0)
        assert pool.owned == pool.used > 0
        assert 0 < pool.tokens <= pool.used * pool.block_size < pool.tokens + pool.block_size
        assert finished(server) == before  # a pool map is not counted as a request
        stream.cancel()
    idle(server)
    pool, now = client.pool_map(), metrics(server)
    assert (pool.running, pool.tokens, pool.used, pool.utilisation) == (0, 0, 0, None)
    assert pool.cached > 0
    shown = {"total": pool.num_blocks, "used": pool.used, "free": pool.free, "cached": pool.cached}
    assert shown | {"shared": pool.shared} == {
        state: now[f"paged_kv_blocks{{{state}}}"] for state in ("total", "used", "free", "cached", "shared")
    }
    assert pool.cached_tokens_hit == now["paged_prefix_cache_hit_tokens_total"]


def test_samples_share_prompt_blocks(server, client):
    with raw_stream(server) as stream:
        begin(stream, n=2)
        pool = client.pool_map()
        assert pool.states.count("2") == pool.shared > 0
        assert pool.owned > 0  # generated tokens of each
        assert pool.tokens <= pool.used * pool.block_size  # a shared block counts once
        stream.cancel()
    idle(server)


# A prompt of 7,000 tokens and this take more than half of the pool, and as many seconds as the test needs.
LONG = {"max_tokens": 1000, "ignore_eos": True}


def test_a_pool_map_is_answered_while_the_pool_is_full(server, client):
    """The second prompt does not fit beside the first and waits; a pool map request does not wait."""
    with raw_stream(server) as first, raw_stream(server) as second:
        for stream in (first, second):
            stream.send(text_input="word " * 7000, stream=True, sampling_parameters=LONG)
        until(lambda: counts(client.pool_map()) == (1, 1), "one prompt running and one in the queue")
        first.cancel()
        second.cancel()
    idle(server)


def test_a_pool_map_over_http(server):
    status, text = post(server, {"pool_map": True})
    assert status == 200
    pool = json.loads(json.loads(text)["pool_map"])
    assert len(pool["states"]) == pool["num_blocks"] == 640
    assert "text_output" not in json.loads(text)


def test_inputs_beside_pool_map_are_rejected(server):
    for beside in ({"text_input": "x"}, {"max_tokens": 3}, {"stream": True}):
        status, text = post(server, {"pool_map": True} | beside)
        (name,) = beside
        assert status == 400
        assert f"INVALID_ARGUMENT: {name}: has no effect with pool_map" in text
    assert "give exactly one" in post(server, {"pool_map": False})[1]


def test_a_pool_map_of_an_unknown_model(server):
    with Client(server.grpc_url, model="nobody") as client, pytest.raises(PagedError, match="unknown model"):
        client.pool_map()


def test_model_info(client):
    info, pool = client.model_info(), client.pool_map()
    assert (Path(info.path) / "config.json").is_file()
    assert info.tasks == ("generate", "embed")
    assert "<|im_start|>" in info.chat_template
    assert (info.max_model_len, info.block_size, info.num_blocks) == (
        pool.max_model_len, pool.block_size, pool.num_blocks
    )  # fmt: skip
    assert info.max_num_batched_tokens >= info.max_num_seqs > 0
    assert (info.max_loras, info.kv_events, info.remote_cache) == (0, None, False)


def test_model_info_takes_no_other_input(server):
    with raw_stream(server) as stream:
        stream.send(model_info=True, text_input="a")
        assert stream.next().error.message() == (
            "Error generating stream: INVALID_ARGUMENT: text_input: has no effect with model_info; leave it out"
        )
