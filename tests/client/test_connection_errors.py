"""Errors of servers that cannot be reached: what the message says for each cause."""

import asyncio

import pytest

from paged_client.async_client import AsyncClient
from paged_client.connection_errors import UnreachableError, unreachable
from paged_client.sync_client import Client
from tests.support.fake_servers import SERVERS

OTHER = {"grpc": "http", "http": "grpc"}


def sync_error(url, protocol):
    with pytest.raises(UnreachableError) as caught, Client(url, protocol=protocol) as client:
        client.generate("x", timeout=30)
    return caught.value


def async_error(url, protocol):
    async def ask():
        async with AsyncClient(url, protocol=protocol) as client:
            await client.generate("x", timeout=30)

    with pytest.raises(UnreachableError) as caught:
        asyncio.run(ask())
    return caught.value


@pytest.fixture(params=[sync_error, async_error])
def error_of(request):
    return request.param


@pytest.mark.parametrize("protocol", SERVERS)
def test_a_closed_port_says_how_to_start_a_server(error_of, protocol):
    error = error_of("localhost:9", protocol)
    assert error.message == "nothing listens at localhost:9: connection refused"
    assert "paged serve" in error.hint and "--url" in error.hint


@pytest.mark.parametrize("protocol", SERVERS)
def test_a_port_of_the_other_protocol_is_named(error_of, protocol):
    with SERVERS[OTHER[protocol]]() as seen:
        error = error_of(seen.url, protocol)
    assert f"{seen.url} does not speak {protocol.replace('grpc', 'gRPC').replace('http', 'HTTP')}" in error.message
    assert "--protocol" in error.hint


@pytest.mark.parametrize("protocol", SERVERS)
def test_an_unknown_host_is_named(error_of, protocol):
    error = error_of("no-such-host.invalid:8001", protocol)
    assert error.message == "the host name of no-such-host.invalid:8001 is not known"


def test_another_reason_is_passed_on():
    assert str(unreachable("h:1", "grpc", "TLS handshake failed")) == "UNAVAILABLE: h:1: TLS handshake failed"
