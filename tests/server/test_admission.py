"""Admission: queue and tenant limits, and sessions that end while the queue is full. The engine is real; a gate
holds its steps."""

import json

import pytest

from paged_backend.server.wire.call import SEQUENCE_END, SEQUENCE_START
from tests.support.service_calls import (
    HOUR,
    SingleCaller,
    ask,
    finish,
    outcomes,
    stop,
)

STARTED = {"correlation_id": 7, "flags": SEQUENCE_START}


def test_a_full_queue_rejects_requests_until_a_place_is_free(serve, gate, clock, monkeypatch):
    ended = outcomes(monkeypatch)
    service = serve(max_num_seqs=1, max_queue_size=2)
    running = ask(service)
    gate.wait()
    waiting = [ask(service), ask(service, timeout_ms=HOUR)]
    rejected = ask(service).answer()
    assert rejected == (
        "Error generating stream: UNAVAILABLE: the waiting queue is full: 2 requests wait (max_queue_size); retry later"
    )
    clock.ahead += HOUR / 1e3
    assert finish(waiting[1]) == ("timeout", 0)
    later = ask(service)  # during the same step
    assert "2 requests wait" in ask(service).answer()
    gate.open()
    assert [finish(one) for one in (running, waiting[0], later)] == [("length", 9)] * 3
    assert sorted(ended) == ["length"] * 3 + ["queue_full"] * 2 + ["timeout"]


def test_the_open_request_limit_applies_per_tenant(serve, gate, monkeypatch):
    """Running and waiting requests count, however they end. Requests without a salt belong to one tenant."""
    ended = outcomes(monkeypatch)
    service = serve(max_num_seqs=1, max_tenant_requests=2)
    running = ask(service, cache_salt="one", own={"request_id": "x"})
    gate.wait()
    waiting = ask(service, cache_salt="one")
    assert ask(service, cache_salt="one").answer() == (
        "Error generating stream: UNAVAILABLE: 2 requests of this cache_salt are open (max_tenant_requests);"
        " retry when one has ended"
    )
    others = [ask(service, **salt) for salt in ({"cache_salt": "two"}, {}, {})]
    assert "max_tenant_requests" in ask(service).answer()
    bad = ask(service, cache_salt="two", max_tokens=10**6).answer()
    assert "INVALID_ARGUMENT: max_tokens" in bad
    assert stop(service, "x").answer() == {"num_stopped": [1]}
    assert "CANCELLED" in running.answer()
    others += [ask(service, cache_salt="one"), ask(service, cache_salt="two")]
    gate.open()
    assert [finish(one)[0] for one in (waiting, *others)] == ["length"] * 6
    assert not service._responder.streams
    assert sorted(ended) == ["cancelled"] + ["length"] * 6 + ["refused"] + ["tenant_full"] * 2


@pytest.mark.parametrize(("fair_tenants", "before"), [(True, 1), (False, 10)])
def test_fair_scheduling_admits_a_tenant_past_another_tenants_queue(serve, gate, fair_tenants, before):
    service = serve(max_num_seqs=1, fair_tenants=fair_tenants)
    running = ask(service, cache_salt="many", max_tokens=2)
    gate.wait()
    waiting = [ask(service, cache_salt="many", max_tokens=1) for _ in range(9)]
    one = ask(service, cache_salt="one", max_tokens=1)
    assert (
        "max_tokens" in ask(service, max_tokens=10**6).answer()
    )  # answered once the earlier requests have reached the engine
    gate.step(1 + before)
    gate.release()
    assert finish(running) == ("length", 2)
    assert [finish(ended) for ended in (*waiting[: before - 1], one)] == [("length", 1)] * before
    assert all(other.empty() for other in waiting)
    gate.open()
    assert [finish(other) for other in waiting[before - 1 :]] == [("length", 1)] * (10 - before)


def test_a_preempted_request_does_not_count_against_the_queue_limit(serve, gate):
    service = serve(num_gpu_blocks_override=8, max_queue_size=1)
    lower = ask(service, "a" * 16, priority=1)
    gate.wait()
    gate.step(3)
    higher = ask(service, "b" * 20)
    gate.step()
    third = ask(service)
    assert "1 requests wait" in ask(service).answer()
    gate.open()
    assert [finish(one)[0] for one in (lower, higher, third)] == ["length"] * 3


def test_the_queue_limit_holds_and_no_request_is_lost_while_steps_run(serve, monkeypatch):
    """The engine admits requests while others arrive."""
    service, most = serve(max_queue_size=3, max_num_seqs=2), []
    admit = service._assembly.scheduler.add
    monkeypatch.setattr(
        service._assembly.scheduler,
        "add",
        lambda request: (admit(request), most.append(service._assembly.scheduler.stats.waiting)),
    )
    answers = [one.answer() for one in [ask(service, max_tokens=1) for _ in range(300)]]
    taken = [one for one in answers if isinstance(one, dict)]
    assert len(most) == len(taken) >= 3
    assert max(most) <= 3
    assert all("max_queue_size" in one for one in answers if isinstance(one, str))


def test_a_session_can_be_ended_while_the_queue_is_full(serve, gate):
    service = serve(max_num_seqs=1, max_queue_size=1)
    first = ask(service, own={"correlation_id": 7, "flags": SEQUENCE_START})
    gate.wait()
    gate.step(8)
    gate.release()
    assert finish(first) == ("length", 9)
    running = ask(service)
    gate.wait()
    waiting = ask(service)
    assert "max_queue_size" in ask(service, own={"correlation_id": 7}).answer()
    assert finish(ask(service, "", own={"correlation_id": 7, "flags": SEQUENCE_END})) == ("stop", 0)
    gate.open()
    assert [finish(one)[0] for one in (running, waiting)] == ["length"] * 2


@pytest.mark.parametrize(
    ("own", "sampling", "reason"),
    [
        ({}, {"prefill_only": True}, r"prefill_only=true: needs a remote cache, which is off (remote_cache_url)"),
        (STARTED, {"prefill_only": True}, "prefill_only=true: must be false in a session, whose turns have outputs"),
        (STARTED, {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens=2: a session keeps all of its prompt; leave"),
    ],
)
def test_requests_that_the_engine_or_a_session_cannot_have_are_rejected(serve, own, sampling, reason):
    asked = SingleCaller(serve(), own, text_input="abcd", sampling_parameters=json.dumps(sampling))
    assert reason in asked.answer()


def test_a_proxy_sets_the_salt_as_a_parameter(serve, gate):
    """What a client writes into sampling_parameters does not override it. Other models relay it there."""
    gate.open()
    service = serve(cache_salt_from="parameter")

    def given(salt, **sampling):
        own = {"parameters": json.dumps({"cache_salt": salt} if salt else {}), "correlation_id": 7}
        return SingleCaller(service, own | {"flags": sampling.pop("flags", 0)}, text_input="abcd",
                            sampling_parameters=json.dumps({"max_tokens": 1} | sampling)).answer()  # fmt: skip

    assert given("mine", flags=SEQUENCE_START)["text_output"]
    assert "no such session" in given("other")
    assert given("mine", flags=SEQUENCE_END)["text_output"]
    assert "cache_salt_from=parameter" in given("other", cache_salt="mine")
    assert "cache_salt_from=parameter" in given(None, cache_salt="mine")


@pytest.mark.parametrize("sampling", [{}, {"regex": "a+", "ignore_eos": False}], ids=str)
def test_a_request_that_cannot_be_queued_fails_and_leaks_nothing(serve, gate, monkeypatch, sampling):
    service = serve(max_tenant_requests=1)
    gate.open()
    with monkeypatch.context() as patch:
        patch.setattr(service._grammars if sampling else service._engine, "compile" if sampling else "deliver", broken)
        assert "INTERNAL: RuntimeError: broken" in ask(service, **sampling).answer()
    assert finish(ask(service)) == ("length", 9)


def broken(*args, **kwargs):
    raise RuntimeError("broken")


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
