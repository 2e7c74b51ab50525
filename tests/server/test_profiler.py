"""Profiles of a service that runs requests."""

import json
import threading
import time

import pytest

from paged_backend.api.errors import RequestError
from paged_backend.server.profiler import Profiler
from paged_backend.utils.local_socket import LONGEST_PROFILE
from tests.support.callers import Caller
from tests.support.in_process import WAIT

MICROSECOND = 1e-6  # rounding of times in a trace


def test_a_profile_has_steps_threads_and_functions(serve):
    service, found = serve(), []
    thread = threading.Thread(target=lambda: found.append(service._profiler.record(1.0)))
    began, tokens = time.monotonic(), 0
    thread.start()
    while thread.is_alive():
        caller = Caller(text_input="abc", sampling_parameters='{"max_tokens": 20, "ignore_eos": true}')
        service.submit(caller)
        caller.all()
        tokens += 20
    (profile,), ended = found, time.monotonic()
    steps = profile["steps"]
    assert 0 < steps["count"] <= tokens
    assert steps["sequences"] == 1.0
    assert set(steps["phases"]) == {"schedule", "launch", "wait", "commit"}
    assert 0 < sum(phase["share"] for phase in steps["phases"].values()) <= 1
    events = profile["trace"]["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"steps", "engine", "responder"} <= rows
    launches = [event for event in events if event["name"] == "launch" and event["ph"] == "X"]
    assert len(launches) == steps["count"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(began <= span["ts"] * 1e-6 + MICROSECOND for span in spans), "not on the clock of time.monotonic()"
    assert all((span["ts"] + span["dur"]) * 1e-6 - MICROSECOND <= ended for span in spans)
    for phase, figures in steps["phases"].items():
        lengths = [span["dur"] for span in spans if span["name"] == phase and span["tid"] == launches[0]["tid"]]
        assert figures["seconds"] == pytest.approx(sum(lengths) * 1e-6 / steps["count"])
    assert {one["thread"] for one in profile["functions"]} >= {"engine"}
    json.dumps(profile)
    service._profiler.record(0.01)  # the next one starts empty
    assert service._profiler._steps is None


@pytest.mark.parametrize("seconds", [0, -1, LONGEST_PROFILE + 1])
def test_an_invalid_length_is_rejected(seconds):
    with pytest.raises(RequestError, match=f"profile={seconds:g}: must be above 0 and at most 60 seconds"):
        Profiler(print).record(seconds)


def test_one_profile_at_a_time():
    profiler, started = Profiler(print), threading.Event()
    begin = profiler._record
    profiler._record = lambda *arguments: (started.set(), begin(*arguments))[1]
    thread = threading.Thread(target=profiler.record, args=(0.5,))
    thread.start()
    assert started.wait(WAIT)
    with pytest.raises(RequestError, match="another profile is being taken"):
        profiler.record(0.1)
    thread.join()
    assert profiler.record(0.01)["steps"] == {"count": 0}
