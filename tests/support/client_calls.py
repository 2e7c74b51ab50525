"""Calls of the client library to a fake server."""

import asyncio
import io
import json
import sys

from paged_client import AsyncClient
from tests.support.fake_servers import WAIT

SAY = 'say=["Hello", " there"]'  # the parameter that scripts the fake server's output


def run(fake, protocol, scenario):
    async def inside():
        async with AsyncClient(fake.url, protocol=protocol) as client:
            return await asyncio.wait_for(scenario(client), WAIT)

    return asyncio.run(inside())


async def arrived(fake):
    """Wait without blocking the event loop, which the client needs."""
    assert await asyncio.to_thread(fake.asked.wait, WAIT)


async def left(fake):
    assert await asyncio.to_thread(fake.left.wait, WAIT)


def pool_of(states, **others):
    """Return a pool map as a server sends it."""
    values = {"time": 12.5, "block_size": 16, "running": 1, "waiting": 2, "tokens": 20, "preemptions": 4}
    return values | {"num_blocks": len(states), "states": states, "cached_tokens_hit": 3} | others


def texts(stream):
    return [delta.text for delta in stream]


def sampling(fake, number=0):
    """Return the sampling parameters of a request, without those that control the fake server."""
    sent = json.loads(fake.seen.requests[number]["sampling_parameters"])
    return {key: value for key, value in sent.items() if key not in ("say", "hold", "fail")}


def standard_input(monkeypatch, text, *, terminal=False):
    stream = io.StringIO(text)
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stream)
