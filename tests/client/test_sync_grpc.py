"""Responses over gRPC."""

import pytest

from paged_client.sync_grpc import GrpcTransport
from paged_client.types import PagedError
from paged_client.wire import request_values
from tests.support.fake_servers import SERVERS, WAIT


@pytest.fixture
def open_call():
    """Return a function that sends a request with a script for the fake server."""
    with SERVERS["grpc"]() as seen:
        transport = GrpcTransport(seen.url, "paged_llm", {})
        yield lambda **script: transport.open(request_values("x", None, script, stream=True), "r", WAIT)
        transport.close()


def test_responses_and_then_the_end(open_call):
    responses = open_call(say=["a", "b"])
    assert [responses.next()["text_output"] for _ in range(2)] == [["a"], ["b"]]
    assert responses.next() is None


def test_the_call_is_over_after_an_error_message(open_call):
    responses = open_call(say=[], fail="UNAVAILABLE: full")
    with pytest.raises(PagedError, match="UNAVAILABLE: full"):
        responses.next()
    assert responses.next() is None


def test_a_cancelled_call_ends_with_an_error(open_call):
    responses = open_call(say=["a"], hold=True)
    assert responses.next()["text_output"] == ["a"]
    responses.cancel()
    with pytest.raises(PagedError, match=r"^CANCELLED"):
        responses.next()
