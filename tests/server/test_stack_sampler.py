"""Sampled stacks as events of a Chrome trace."""

import threading

from paged_backend.server.stack_sampler import StackSampler


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
