"""The record of a traced request."""

import time

from paged_backend.api.trace import Phase, RequestTrace, recorded


def test_phases_are_recorded_in_order():
    trace = RequestTrace(None, epoch=5)
    trace.add("queue", 1.0, 2.0, blocks=3)
    before = time.monotonic()
    with recorded(trace, "tokenize"):
        pass
    assert trace.phases[0] == Phase("queue", 1.0, 2.0, {"blocks": 3})
    assert trace.phases[1].name == "tokenize"
    assert before <= trace.phases[1].began <= trace.phases[1].ended
    assert trace.nanoseconds(2.0) == 2 * 10**9 + 5


def test_nothing_is_recorded_without_a_trace():
    with recorded(None, "tokenize"):
        pass
