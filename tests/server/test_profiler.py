"""Profiles of a service that runs requests."""

import json
import threading
import time
from types import SimpleNamespace

import pytest

from paged_backend.api.errors import RequestError
from paged_backend.server.profiler import Profiler, StackSampler
from paged_backend.utils.local_socket import LONGEST_PROFILE
from tests.support.callers import Caller
from tests.support.in_process import WAIT

MICROSECOND = 1e-6  # rounding of times in a trace


def test_a_profile_has_steps_threads_and_functions(serve):
    service, found = serve(), []
    thread = threading.Thread(target=lambda: found.append(Profiler(service._responder).record(1.0)))
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
    assert Profiler(service._responder).record(0.01)["steps"] == {"count": 0}, "the next one starts empty"


@pytest.mark.parametrize("seconds", [0, -1, LONGEST_PROFILE + 1])
def test_an_invalid_length_is_rejected(seconds):
    with pytest.raises(RequestError, match=f"profile={seconds:g}: must be above 0 and at most 60 seconds"):
        Profiler(SimpleNamespace()).record(seconds)


def test_one_profile_at_a_time():
    profiler, started = Profiler(SimpleNamespace()), threading.Event()
    begin = profiler._record
    profiler._record = lambda *arguments: (started.set(), begin(*arguments))[1]
    thread = threading.Thread(target=profiler.record, args=(0.5,))
    thread.start()
    assert started.wait(WAIT)
    with pytest.raises(RequestError, match="another profile is being taken"):
        profiler.record(0.1)
    thread.join()
    assert profiler.record(0.01)["steps"] == {"count": 0}


def blocked_thread(release):
    """Start a thread that waits in `inner`, called by `outer`."""
    inside = threading.Event()

    def inner():
        inside.set()
        release.wait()

    def outer():
        inner()

    thread = threading.Thread(target=outer, name="blocked")
    thread.start()
    inside.wait()
    return thread


def test_a_call_found_in_several_samples_is_one_event():
    release = threading.Event()
    thread = blocked_thread(release)
    sampler = StackSampler(pid=7)
    for now in (100.0, 200.0, 300.0):
        sampler.sample(now)
    release.set()
    thread.join()
    sampler.sample(400.0)
    sampler.finish(500.0)
    calls = [event for event in sampler.events if event["ph"] == "X" and event["tid"] == thread.ident]
    (outer,) = [event for event in calls if ".outer (" in event["name"]]
    (inner,) = [event for event in calls if ".inner (" in event["name"]]
    for event in (outer, inner):
        assert (event["ts"], event["dur"], event["pid"]) == (100.0, 300.0, 7)
    names = {event["tid"]: event["args"]["name"] for event in sampler.events if event["ph"] == "M"}
    assert names[thread.ident] == "blocked"
    assert threading.get_ident() not in names  # the thread that samples
    assert sum(time for (name, _), time in sampler.self_time.items() if name == "blocked") == 200
