"""The load generator where a request fails."""

import pytest

from paged_client.load import closed_loop, open_loop
from paged_client.types import PagedError
from paged_client.wire import request_values
from tests.support.fake_servers import SERVERS

VALUES = [request_values("x", None, {"say": []}, stream=True)] * 9
LOADS = {
    "closed loop": lambda url, model: closed_loop(url, model, VALUES, 2),
    "open loop": lambda url, model: open_loop(url, model, VALUES, [0.0] * len(VALUES)),
}


@pytest.mark.parametrize("send", LOADS.values(), ids=LOADS)
def test_an_error_of_a_request_ends_the_load(send):
    with SERVERS["grpc"]() as seen, pytest.raises(PagedError, match="unknown model: 'nope'"):
        send(seen.url, "nope")


@pytest.mark.parametrize("send", LOADS.values(), ids=LOADS)
def test_a_refused_connection_ends_the_load(send):
    """The connection may be refused before the first request is sent."""
    with pytest.raises(PagedError, match=r"^UNAVAILABLE"):
        send("localhost:1", "paged_llm")
