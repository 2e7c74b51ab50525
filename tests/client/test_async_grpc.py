"""Responses over gRPC with asyncio."""

import asyncio

import pytest

from paged_client.async_grpc import GrpcTransport
from paged_client.types import PagedError
from paged_client.wire import request_values
from tests.support.fake_servers import SERVERS, WAIT


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
