"""The asyncio client: requests, their errors and time limits."""

import asyncio
import json

import pytest

from paged_client import AsyncClient, Completion, Embedding, PagedError, PoolMap
from tests.support.client_calls import left, pool_of, run
from tests.support.fake_servers import WAIT


def test_generate(fake, protocol):
    async def scenario(client):
        return await client.generate("hé", request_id="r", say=["a", "é"])

    assert run(fake, protocol, scenario) == Completion("aé", "stop", 7, 4)
    assert fake.requests[0]["text_input"] == "hé"
    assert fake.requests[0]["request_id"] == "r"


def test_pool_map(fake, protocol):
    fake.maps += [json.dumps(pool_of("12c.")), "UNAVAILABLE: the engine has stopped"]

    async def scenario(client):
        assert await client.adapters(timeout=WAIT) == ()
        pool = await client.pool_map(timeout=WAIT)
        with pytest.raises(PagedError, match="the engine has stopped"):
            await client.pool_map()
        return pool

    assert run(fake, protocol, scenario) == PoolMap(**pool_of("12c."))


def test_cancel_by_request_id(fake, protocol):
    async def scenario(client):
        with pytest.raises(ValueError, match="request_id=''"):
            await client.cancel("")
        return await client.cancel("r", timeout=WAIT)

    assert run(fake, protocol, scenario) == 1


def test_embedding(fake, protocol):
    async def scenario(client):
        with pytest.raises(PagedError, match="INTERNAL: the server sent no embedding"):
            await client.embed([5], say=["null"])
        return await client.embed("hé", timeout=WAIT, say=["[0.6, 0.8]"])

    assert run(fake, protocol, scenario) == Embedding((0.6, 0.8), 7)


def test_long_prompt_and_output(fake, protocol):
    text = "é" * 3_000_000

    async def scenario(client):
        return (await client.generate(text, say=[text])).text

    assert run(fake, protocol, scenario) == text


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ({"say": [], "fail": "INVALID_ARGUMENT: no"}, "INVALID_ARGUMENT"),
        ({"say": ["a"], "fail": "INTERNAL: no"}, "INTERNAL"),
        ({"say": ["a"], "fail": "CANCELLED: by the server"}, "CANCELLED"),
        ({"say": ["a"], "cut": True}, "UNAVAILABLE"),
        ({"say": ["a"], "vanish": True}, "UNAVAILABLE"),
    ],
)
def test_errors(fake, protocol, script, code):
    async def scenario(client):
        with pytest.raises(PagedError) as raised:
            await client.generate("x", **script)
        return raised.value.code

    assert run(fake, protocol, scenario) == code


def test_unknown_model_and_no_server(fake, protocol):
    async def code(url, model):
        async with AsyncClient(url, model, protocol) as client:
            with pytest.raises(PagedError) as raised:
                await client.generate("x", say=["a"])
            return raised.value.code

    assert asyncio.run(code(fake.url, "nope")) == "NOT_FOUND"
    assert asyncio.run(code("localhost:1", "paged_llm")) == "UNAVAILABLE"


@pytest.mark.parametrize("said", [[], ["a"]])
def test_timeout_cancels_the_request(fake, protocol, said):
    async def scenario(client):
        with pytest.raises(PagedError) as raised:
            await client.generate("x", timeout=0.2, say=said, hold=True)
        await left(fake)
        return raised.value.code

    assert run(fake, protocol, scenario) == "DEADLINE_EXCEEDED"


def test_many_concurrent_requests(fake, protocol):
    async def scenario(client):
        return await asyncio.gather(*(client.generate("x", say=[f"{i}"]) for i in range(150)))

    answers = run(fake, protocol, scenario)
    assert [answer.text for answer in answers] == [f"{i}" for i in range(150)]
