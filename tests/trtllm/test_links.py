"""Connections of the relay to the engine's model: one per instance."""

import pytest

from paged_backend.api.limits import InputLimits
from paged_backend.utils import local_socket
from tests.support.local_engine import Engine, ask, connected
from tests.support.relay_requests import response, submit

pytestmark = pytest.mark.usefixtures("socket_directory")


def test_an_unloaded_engine_is_reported(relay):
    assert submit(relay).next() == ("UNAVAILABLE: the engine's model, engine, is not loaded", True)


@pytest.mark.parametrize("relay", [{"max_frame_bytes": 100}], indirect=True)
def test_an_oversized_row_is_rejected(engine, relay):
    text, last = submit(relay).next()
    assert last and text.startswith("INVALID_ARGUMENT: the request is too large: a frame of ")
    assert text.endswith("; at most 100 can be sent (max_frame_bytes)")


def test_a_refused_connection_reports_the_reason(relay):
    engine = Engine(input_limits=InputLimits(max_local_connections=1))
    first = connected()
    ask(first)
    engine.next()
    for _ in range(3):  # either the request or the rejection may come first
        assert submit(relay).next() == (
            "UNAVAILABLE: the engine's model refused the connection: too many connections: 1 are open"
            " (max_local_connections)",
            True,
        )
    first.close()
    engine.listener.close()


def test_an_engine_can_be_unloaded_and_reloaded(relay):
    first = Engine()
    request = submit(relay)
    first.next().send(response("a"), final=False)
    assert request.next() == ([b"a"], False)
    first.listener.close()
    assert request.next() == ("UNAVAILABLE: the engine's model was unloaded, or has ended", True)
    local_socket.remove(first.listener.name)
    assert submit(relay).next()[0].endswith("is not loaded")
    second = Engine()
    request = submit(relay)
    second.next().send(response("b", "stop"), final=True)
    assert request.next() == ([b"b"], True)
    second.stop()


def test_requests_are_balanced_over_instances(relay):
    engines = [Engine(), Engine()]
    requests = [submit(relay) for _ in range(4)]
    for engine in engines:
        for _ in range(2):
            engine.next().send(response("a", "stop"), final=True)
    assert [one.next() for one in requests] == [([b"a"], True)] * 4
    for engine in engines:
        engine.stop()
