"""How a stream of the asyncio client ends: by an error, by the client, and by the server."""

import asyncio
import gc

import pytest

from paged_client import Completion, Delta
from tests.support.client_calls import arrived, left, run


async def async_texts(stream):
    return [delta.text async for delta in stream]


def test_stream(fake, protocol):
    async def scenario(client):
        async with client.stream(messages=[{"role": "user", "content": "x"}], say=["a", "b"]) as stream:
            assert stream.completion is None
            assert [delta async for delta in stream] == [Delta("a", 2, None), Delta("b", 2, "stop")]
            return stream.completion

    assert run(fake, protocol, scenario) == Completion("ab", "stop", 7, 4)


def test_leaving_the_with_block_cancels(fake, protocol):
    async def scenario(client):
        async with client.stream("x", say=["a"], hold=True) as stream:
            assert (await anext(stream)).text == "a"
        await left(fake)
        return stream.completion

    assert run(fake, protocol, scenario) == Completion("a", "cancelled", 7, 2)


def test_break_cancels(fake, protocol):
    async def scenario(client):
        async for _ in client.stream("x", say=["a"], hold=True):
            break
        gc.collect()
        await left(fake)

    run(fake, protocol, scenario)


@pytest.mark.parametrize("said", [[], ["a"]])
def test_cancelling_the_task_cancels_the_request(fake, protocol, said):
    async def scenario(client):
        task = asyncio.create_task(async_texts(client.stream("x", say=said, hold=True)))
        await arrived(fake)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await left(fake)

    run(fake, protocol, scenario)


@pytest.mark.parametrize("said", [[], ["a"]])
def test_cancel_from_another_task_wakes_the_reader(fake, protocol, said):
    async def scenario(client):
        stream = client.stream("x", say=said, hold=True)
        task = asyncio.create_task(async_texts(stream))
        await arrived(fake)
        stream.cancel()
        await task
        await left(fake)
        return stream.completion.finish_reason

    assert run(fake, protocol, scenario) == "cancelled"
