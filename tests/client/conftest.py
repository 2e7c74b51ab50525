"""Fake servers for both protocols, and clients of them."""

from types import SimpleNamespace

import pytest

from paged_client import Client
from tests.support.fake_servers import SERVERS
from tests.support.map_views import pool_of, sent


@pytest.fixture(params=SERVERS)
def protocol(request):
    return request.param


@pytest.fixture
def fake(protocol):
    with SERVERS[protocol]() as seen:
        yield seen


@pytest.fixture
def client(fake, protocol):
    with Client(fake.url, protocol=protocol) as made:
        yield made


@pytest.fixture(params=SERVERS)
def map_fake(request):
    """A server with a pool that fills; `.flags` lead to it."""
    with SERVERS[request.param]() as seen:
        seen.maps += [sent(pool_of("1" * used + "c" + "." * (15 - used), time=100.0 + used)) for used in range(4)]
        yield SimpleNamespace(seen=seen, flags=["--protocol", request.param, "--url", seen.url])


@pytest.fixture(params=SERVERS)
def command_fake(request):
    """A fake server; `.flags` select it."""
    with SERVERS[request.param]() as seen:
        yield SimpleNamespace(seen=seen, flags=["--protocol", request.param, "--url", seen.url])


@pytest.fixture
def grpc_fake():
    with SERVERS["grpc"]() as seen:
        yield SimpleNamespace(seen=seen, flags=["--url", seen.url])
