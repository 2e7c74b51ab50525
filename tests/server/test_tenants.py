"""Open requests by tenant."""

from dataclasses import replace

import pytest

from paged_backend.api.errors import ErrorCode, RequestError, TenantLimitReached
from paged_backend.api.request import FinishReason, TokenDelta
from paged_backend.engine.outputs import EngineDied, UnknownRequests
from paged_backend.server.tenants import Tenants
from tests.support.in_process import WAIT
from tests.support.pb_utils import Sent
from tests.support.streams import Client, failing_once, step

ENDS = {
    "answered": lambda responder, client: responder.emit(step(1, "a", FinishReason.LENGTH)),
    "rejected by the engine": lambda responder, client: responder.emit(
        replace(step(1, ""), deltas=(TokenDelta(1, error=RequestError(ErrorCode.INTERNAL, "no")),))
    ),
    "cancelled": lambda responder, client: setattr(client, "cancelled", True),
    "stop_request": lambda responder, client: responder.cancel(Sent().channel(), ""),
    "timeout": lambda responder, client: setattr(client.stream, "deadline", 0.0),
    "unknown to the engine": lambda responder, client: responder.emit(UnknownRequests((1,))),
    "engine died": lambda responder, client: responder.emit(EngineDied("it did")),
    "polling fails": lambda responder, client: failing_once(client, "is_cancelled"),
    "sending fails": lambda responder, client: (failing_once(client, "send"), responder.emit(step(1, "a"))),
    "sending the final response fails": lambda responder, client: (
        failing_once(client, "send"),
        responder.emit(step(1, "a", FinishReason.LENGTH)),
    ),
    "booking fails": lambda responder, client: (
        failing_once(client.stream, "take"),
        responder.emit(step(1, "a")),
    ),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_tenants_place_is_released_however_a_request_ends(opened, tenants, end):
    responder, _, _ = opened
    client = Client(1)
    responder.open(client.stream)
    assert len(tenants) == 1
    end(responder, client)
    while not client.got.get(timeout=WAIT)[2]:
        pass
    assert len(tenants) == 0


def test_requests_that_are_leaving_count_for_the_limit():
    tenants = Tenants(2)
    tenants.enter("a")
    tenants.check("a")
    tenants.check("b", leaving=1)
    with pytest.raises(TenantLimitReached, match="2 requests of this cache_salt are open"):
        tenants.check("a", leaving=1)
    tenants.leave("a")
    tenants.check("a", leaving=1)
    assert len(tenants) == 0


def test_zero_is_no_limit():
    tenants = Tenants(0)
    for _ in range(3):
        tenants.check("a", leaving=9)
        tenants.enter("a")
    assert len(tenants) == 1
