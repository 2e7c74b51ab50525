"""The index of what each server has cached, fed with events of real publishers."""

import asyncio
import time

import pytest

from paged_backend.api.config import KvEventsConfig
from paged_backend.api.request import Origin
from paged_backend.engine.cache_event_publisher import CacheEventPublisher
from paged_backend.kv.content import DEVICE, HOST, CacheEvent, Entry
from paged_client.openai import kv_index
from paged_client.openai.kv_index import KvIndex
from paged_client.serving.ports import choose_ports
from paged_client.types import PagedError
from tests.support.in_process import WAIT
from tests.support.map_views import pool_of

SIZE = 4  # tokens per block


class Server:
    """The part of a server that publishes events."""

    def __init__(self, events, replay):
        self._config = KvEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"tcp://127.0.0.1:{events}",
            replay_endpoint=f"tcp://127.0.0.1:{replay}",
        )
        self.endpoints = f"{self._config.endpoint},{self._config.replay_endpoint}"
        self.start()

    def start(self):
        self._publisher = CacheEventPublisher(self._config, SIZE)

    def close(self):
        self._publisher.close()

    def cache(self, tokens, medium=DEVICE, adapter=b""):
        parent = Origin("", adapter)
        for start in range(0, len(tokens), SIZE):
            parent = Entry(parent, tuple(tokens[start : start + SIZE]))
            self._publisher.events.append(CacheEvent(True, parent, medium))
        self._publisher.publish()
        return parent

    def evict(self, entry):
        self._publisher.events.append(CacheEvent(False, entry, DEVICE))
        self._publisher.publish()


@pytest.fixture
def servers():
    ports = choose_ports(a=0, b=0, c=0, d=0)
    made = [Server(*ports[:2]), Server(*ports[2:])]
    yield made
    for server in made:
        server.close()


def tokenize(text, special_tokens):
    return [1] * special_tokens + [ord(char) for char in text]


def run(servers, test):
    """Run `test` with an index of the servers. The second of them cannot be reached at first."""

    async def work():
        index, attempts = KvIndex([server.endpoints for server in servers], tokenize), []

        async def pool(server):
            attempts.append(server)
            if attempts == [0, 1]:
                raise PagedError("UNAVAILABLE", "not ready")
            return pool_of(".", block_size=SIZE)

        following = asyncio.ensure_future(index.run(pool))
        try:
            await test(index)
        finally:
            following.cancel()
            index.close()

    asyncio.run(work())


async def shares(index, servers, prompt, expected, special_tokens=False):
    """Wait until the shares of the prompt are the expected ones, while all servers have further events."""
    deadline = time.monotonic() + WAIT
    while (found := await index.cached(prompt, special_tokens=special_tokens)) != expected:
        assert time.monotonic() < deadline, found
        for server in servers:
            server.cache([0] * SIZE)
        await asyncio.sleep(0.05)


def test_shares_of_each_server(servers):
    async def test(index):
        assert await index.cached([1] * SIZE, special_tokens=False) == [0.0, 0.0], "no server has been reached"
        servers[0].cache([5, 6, 7, 8])  # before the index subscribes
        servers[1].cache(tokenize("xabcdefg", False))
        servers[1].cache(tokenize("xabcdefg", False), medium=HOST)
        servers[1].cache([1, 97, 98, 99], adapter=b"1234")
        await shares(index, servers, [5, 6, 7, 8, 9], [0.8, 0.0])
        await shares(index, servers, "xabcdefghi", [0.0, 0.8])
        last = servers[0].cache([1, *tokenize("abc", False), *tokenize("defg", False)])
        await shares(index, servers, "abcdefgh", [8 / 9, 0.0], special_tokens=True)
        servers[0].evict(last)
        await shares(index, servers, "abcdefgh", [4 / 9, 0.0], special_tokens=True)
        assert await index.cached([5, 6, 7], special_tokens=False) == [0.0, 0.0], "less than a block"

    run(servers, test)


def test_a_restarted_server_has_nothing_cached(servers):
    """Its first event shows that it has been restarted."""

    async def test(index):
        servers[0].cache([5, 6, 7, 8])
        await shares(index, servers, [5, 6, 7, 8], [1.0, 0.0])
        servers[0].close()
        servers[0].start()
        await shares(index, servers, [5, 6, 7, 8], [0.0, 0.0])
        servers[0].cache([5, 6, 7, 8])
        await shares(index, servers, [5, 6, 7, 8], [1.0, 0.0])

    run(servers, test)


def test_a_server_with_another_block_size_is_left_out(servers, caplog):
    async def test():
        index = KvIndex([server.endpoints for server in servers], tokenize)

        async def pool(server):
            return pool_of(".", block_size=SIZE << server)

        following = asyncio.ensure_future(index.run(pool))
        servers[1].cache([5, 6, 7, 8])
        servers[0].cache([5, 6, 7, 8])
        await shares(index, servers, [5, 6, 7, 8], [1.0, 0.0])
        await following
        index.close()

    asyncio.run(test())
    assert "server 1 has block_size=8, others have 4" in caplog.text


def test_a_server_that_sends_no_events_is_named(servers, caplog, monkeypatch):
    monkeypatch.setattr(kv_index, "SILENT_SECONDS", 2.0)
    servers[1].close()

    async def test():
        index, asked = KvIndex([server.endpoints for server in servers], tokenize), []

        async def pool(server):
            asked.append(server)
            return pool_of("c" * 16 if len(asked) > 4 else ".", block_size=SIZE)  # at first too little

        following = asyncio.ensure_future(index.run(pool))
        deadline = time.monotonic() + WAIT
        while not following.done():
            assert time.monotonic() < deadline
            servers[0].cache([5, 6, 7, 8])
            await asyncio.sleep(0.05)
        index.close()

    asyncio.run(test())
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "server 1 has cached 16 blocks, but no events arrive from " + servers[1].endpoints.split(",")[0] in warning
