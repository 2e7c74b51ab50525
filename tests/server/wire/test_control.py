"""Control requests: which request is one, and what may not come with it."""

import pytest

from paged_backend.api.errors import RequestError
from paged_backend.server.wire.control import CONTROL_REQUESTS, read_control_request
from tests.support.wire_requests import flag, text


def test_a_control_request_stands_alone():
    assert read_control_request({"pool_map": flag(True)}, {"x-tenant": "a", "sequence_id": 0}) == "pool_map"
    assert read_control_request({"stop_request": flag(True)}, {}) == "stop_request"
    assert read_control_request({"pool_map": flag(False), "text_input": text("x")}, {}) is None
    assert read_control_request({"text_input": text("x")}, {"max_tokens": 3}) is None


@pytest.mark.parametrize("asked", CONTROL_REQUESTS)
@pytest.mark.parametrize(
    ("tensors", "parameters", "others", "named"),
    [
        ({"text_input": text("x")}, {}, (), "text_input"),
        ({"messages": text("[]")}, {}, (), "messages"),
        ({"stream": flag(True)}, {}, (), "stream"),
        ({"image": text("")}, {}, (), "image"),
        ({}, {"max_tokens": 3}, (), "max_tokens"),
        ({}, {"timeout": 3}, (), "timeout"),
        ({}, {}, (3,), "timeout"),
        ({}, {}, (0, 7), "sequence_id"),
    ],
)
def test_inputs_beside_a_control_request_are_rejected_by_name(asked, tensors, parameters, others, named):
    with pytest.raises(RequestError, match=f"{named}: has no effect with {asked}; leave it out"):
        read_control_request({asked: flag(True)} | tensors, parameters, *others)
    with pytest.raises(RequestError, match="sequence_end=true: needs a sequence_id"):
        read_control_request({asked: flag(True)}, {"sequence_end": True})
