"""Responses over gRPC with asyncio."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paged_client import grpc_wire
from paged_client.async_client import AsyncClient
from paged_client.async_grpc import GrpcTransport
from paged_client.types import PagedError
from paged_client.wire import request_values
from tests.support.fake_servers import SERVERS, WAIT

ROOT = Path(__file__).parents[2]
SERVER = """
import sys
from tests.support.fake_servers import grpc_server
with grpc_server() as seen:
    print(seen.url, flush=True)
    sys.stdin.read()
"""


def read(seen, **script):
    """Return the texts of a request's responses, and the error that ended them or None."""

    async def inside():
        transport = GrpcTransport(seen.url, "paged_llm", {})
        responses, found = transport.open(request_values("x", None, script, stream=True), "r", WAIT), []
        try:
            while fields := await responses.next():
                found += fields["text_output"]
                if "hold" in script:
                    responses.cancel()
        except PagedError as error:
            return found, error.code
        except asyncio.CancelledError:
            return found, "cancelled"
        finally:
            await transport.close()
        return found, None

    return asyncio.run(inside())


def test_responses_up_to_the_end_an_error_or_a_cancellation():
    with SERVERS["grpc"]() as seen:
        assert read(seen, say=["a", "b"]) == (["a", "b"], None)
        assert read(seen, say=["a"], fail="INTERNAL: no") == (["a"], "INTERNAL")
        assert read(seen, say=["a"], hold=True) == (["a"], "cancelled")
        assert seen.left.wait(WAIT)


def test_closing_the_client_ends_open_responses_with_an_error():
    """gRPC raises CancelledError in the task that reads, although nobody has cancelled it."""

    async def inside(seen):
        transport = GrpcTransport(seen.url, "paged_llm", {})
        responses = transport.open(request_values("x", None, {"say": ["a"], "hold": True}, stream=True), "r", WAIT)
        await responses.next()
        reading = asyncio.create_task(responses.next())
        await asyncio.sleep(0)
        await transport.close()
        return await reading

    with SERVERS["grpc"]() as seen, pytest.raises(PagedError, match="the client was closed"):
        asyncio.run(inside(seen))


def test_nothing_is_sent_before_the_first_read():
    """A transport is made before its event loop runs."""
    with SERVERS["grpc"]() as seen:
        transport = GrpcTransport(seen.url, "paged_llm", {})
        transport.open(request_values("x", None, {}, stream=True), "r", WAIT).cancel()
        asyncio.run(transport.close())
        assert seen.requests == []


def test_an_address_with_a_scheme_is_rejected():
    with pytest.raises(ValueError, match="url='http://x:1'"):
        GrpcTransport("http://x:1", "m", {})


def test_calls_of_a_frozen_server_end(monkeypatch):
    """As soon as a ping is not answered; here the times are shorter."""
    shorter = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    options = [(name, shorter.get(name, value)) for name, value in grpc_wire.CHANNEL_OPTIONS]
    monkeypatch.setattr(grpc_wire, "CHANNEL_OPTIONS", options)

    async def ask(url, pid):
        async with AsyncClient(url) as client:
            assert (await client.generate("x", say=["a"])).text == "a"
            asked = asyncio.ensure_future(client.generate("x", say=[], hold=True))
            await asyncio.sleep(0.5)  # longer than a request needs to arrive
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(PagedError) as caught:
                await asyncio.wait_for(asked, WAIT)
            assert caught.value.code == "UNAVAILABLE"

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/kernels:{ROOT}/client"}
    with subprocess.Popen([sys.executable, "-c", SERVER], cwd=ROOT, env=environment, text=True, **pipes) as server:
        try:
            asyncio.run(ask(server.stdout.readline().strip(), server.pid))
        finally:
            server.kill()


def test_pings_are_not_more_frequent_than_triton_permits():
    """Its default is one every 300 s without data; it closes the connection after more."""
    assert dict(grpc_wire.CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] > 300_000
