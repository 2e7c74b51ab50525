"""Control requests: ending requests by id."""

from tests.support.service_calls import (
    ask,
    finish,
    stop,
)


def test_stop_request_needs_an_id_and_no_other_inputs(serve):
    service = serve()
    assert "INVALID_ARGUMENT: stop_request: has no request id" in stop(service, "").answer()
    assert "text_input: has no effect with stop_request" in stop(service, "one", text_input="x").answer()


def test_stop_request_ends_a_request_by_id(serve, gate):
    """All requests with that id end, running or waiting, and no others."""
    service = serve(max_num_seqs=1)
    running, waiting, other = (ask(service, own={"request_id": name}) for name in ("one", "one", "other"))
    gate.wait()
    gate.step(2)

    assert stop(service, "one").answer() == {"num_stopped": [2]}
    for one in (running, waiting):
        assert one.answer() == "CANCELLED: the request was ended by a stop_request"
    assert stop(service, "one").answer() == stop(service, "unknown").answer() == {"num_stopped": [0]}
    gate.open()
    assert finish(other) == ("length", 9)
    assert stop(service, "other").answer() == {"num_stopped": [0]}
