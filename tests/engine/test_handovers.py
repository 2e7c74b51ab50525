"""Requests with `prefill_only`: another engine continues from the blocks that they write to the store."""

import random
import threading

import pytest
from transformers import Gemma3TextConfig

from paged_backend.api.errors import RequestError
from paged_backend.kv.stores.remote import RedisClient
from tests.support.in_process import EngineHarness, generate_with_transformers, running, save_tiny, tiny_assembly
from tests.support.redis_server import needs_redis, running_redis
from tests.support.waiting import until

pytestmark = needs_redis
PROMPT = list(range(40, 89))  # 12 full blocks and one token
MAX_TOKENS = 4


@pytest.fixture(scope="module")
def alone(tiny):
    return generate_with_transformers(tiny[1], PROMPT, MAX_TOKENS)


@pytest.fixture
def server(tmp_path):
    with running_redis(tmp_path) as made:
        yield made


@pytest.fixture
def assembly(tiny, server):
    def make(**options):
        defaults = {"swap_space": 0.01, "remote_cache_url": server.url, "remote_cache_timeout_ms": 60_000}
        return tiny_assembly(tiny[0], **defaults | options)

    return make


def prefill(engine: EngineHarness, *prompts, **sampling):
    """Compute prompts and return the tokens that are stored of each."""
    keys = [engine.submit(prompt, prefill_only=True, returns_usage=True, **sampling) for prompt in prompts]
    outputs = engine.wait(*keys)
    assert all(output.tokens == [] and output.error is None for output in outputs)
    return [output.usage.stored_tokens for output in outputs]


@pytest.mark.usefixtures("async_scheduling")
def test_blocks_are_stored_when_the_request_ends(assembly, server, alone):
    with running(assembly()) as first, running(assembly()) as second:
        assert prefill(first, PROMPT) == [48]
        assert len(server.keys) == 12
        assert second.generate([PROMPT], max_tokens=MAX_TOKENS) == [alone]
        assert second.history[-1].stats.cached_tokens == 48
        assert prefill(second, PROMPT, PROMPT[:30], PROMPT[:3]) == [48, 28, 0]


@pytest.mark.usefixtures("async_scheduling")
def test_blocks_are_stored_while_other_requests_run(assembly, server):
    """The engine is never idle, and pools and write queue are smaller than the prompts."""
    draw = random.Random(0)
    prompts = [draw.choices(range(256), k=draw.randrange(20, 100)) for _ in range(40)]
    with running(assembly(num_gpu_blocks_override=64, swap_space=0.002)) as engine:
        long = engine.submit(PROMPT, max_tokens=200)
        assert prefill(engine, *prompts) == [len(prompt) // 4 * 4 for prompt in prompts]
        engine.wait(long)
    with running(assembly()) as other:
        found = []
        for prompt in prompts:
            before = other.history[-1].stats.cached_tokens if other.history else 0
            other.generate([prompt], max_tokens=1)
            found.append(other.history[-1].stats.cached_tokens - before)
        assert found == [(len(prompt) - 1) // 4 * 4 for prompt in prompts]


def test_host_pool_that_is_smaller_than_the_prompt(assembly):
    made = assembly(swap_space=0.00002)
    assert made.scheduler.blocks.host.num_pages < 12
    with running(made) as engine:
        assert prefill(engine, PROMPT, PROMPT[::-1]) == [48, 48]


def test_blocks_that_the_store_has_lost_are_written_again(assembly, server):
    with running(assembly()) as engine:
        assert prefill(engine, PROMPT) == [48]
        server.client.delete(*server.keys[:5])
        assert prefill(engine, PROMPT) == [48]
        assert len(server.keys) == 12


def test_failed_store_ends_the_request_without_an_error(assembly, server, alone):
    with running(assembly()) as engine:
        server.kill()
        assert prefill(engine, PROMPT) == [0]
        assert engine.generate([PROMPT], max_tokens=MAX_TOKENS) == [alone]


def test_store_that_fails_during_the_transfer(assembly, monkeypatch, server):
    reached, goes_on = threading.Event(), threading.Event()
    write, writes = RedisClient.set, []

    def fail_later(self, key, value, ttl):
        writes.append(key)
        if len(writes) == 5:
            reached.set()
            goes_on.wait(60)
        write(self, key, value, ttl)

    with running(assembly()) as engine:
        monkeypatch.setattr(RedisClient, "set", fail_later)
        key = engine.submit(PROMPT, prefill_only=True)
        assert reached.wait(60)
        server.kill()
        goes_on.set()
        assert engine.wait(key)[0].error is None


@pytest.mark.parametrize("end", ["abort", "end_all"])
def test_cancelled_while_its_blocks_are_written(assembly, monkeypatch, alone, end):
    """The engine knows the request until it is cancelled, and goes on without it."""
    reached, goes_on, write = threading.Event(), threading.Event(), RedisClient.set

    def wait(self, key, value, ttl):
        reached.set()
        goes_on.wait(60)
        write(self, key, value, ttl)

    with running(assembly()) as engine:
        monkeypatch.setattr(RedisClient, "set", wait)
        key = engine.submit(PROMPT, prefill_only=True)
        assert reached.wait(60)
        until(lambda: not engine.assembly.scheduler.has_work)
        assert engine.engine.num_open == 1
        getattr(engine.engine, end)(key)
        until(lambda: not engine.engine.num_open)
        goes_on.set()
        assert engine.generate([PROMPT], max_tokens=MAX_TOKENS) == [alone]
        assert engine.outputs[key].finish is None


def test_tenants_are_isolated(assembly):
    with running(assembly()) as first, running(assembly()) as second:
        assert prefill(first, PROMPT, cache_salt="one") == [48]
        for salt, cached in (("two", 0), ("", 0), ("one", 48)):
            second.generate([PROMPT], max_tokens=1, cache_salt=salt)
            assert second.history[-1].stats.cached_tokens == cached


def test_parameters_with_an_output_are_rejected(assembly):
    with running(assembly()) as engine:
        for sampling in ({"max_tokens": 1}, {"n": 2}, {"beam_width": 2}):
            with pytest.raises(RequestError, match="prefill_only=true: generates nothing; leave out max_tokens, n,"):
                engine.submit(PROMPT, prefill_only=True, **sampling)


def test_windowed_blocks_are_stored(assembly, tmp_path):
    """The blocks are stored with their window pages, although the prompt is longer than the window."""
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=8, layer_types=layers,
        eos_token_id=256,
    )  # fmt: skip
    expected = generate_with_transformers(save_tiny(config, tmp_path / "model"), PROMPT, MAX_TOKENS)
    with running(assembly(model=str(tmp_path / "model"))) as first:
        assert prefill(first, PROMPT) == [48]
        with running(assembly(model=str(tmp_path / "model"))) as second:
            assert second.generate([PROMPT], max_tokens=MAX_TOKENS) == [expected]
            assert second.history[-1].stats.cached_tokens == 48
