"""A service answers each request on its own, and reports whether it can."""

import json
import time
from contextlib import contextmanager
from threading import Event

from paged_backend.api.errors import ASLEEP
from paged_backend.engine import core
from tests.support.callers import Caller
from tests.support.in_process import WAIT
from tests.support.service_calls import ask, finish, outcomes
from tests.support.waiting import until


def test_an_internal_error_while_reading_fails_only_that_request(serve, monkeypatch):
    """Triton's `execute` submits one request after the other, so `submit` must never raise."""
    ended, service = outcomes(monkeypatch), serve()
    before, broken, after = (Caller(text_input="abcd", sampling_parameters='{"max_tokens": 2}') for _ in range(3))
    broken.inputs = lambda: 1 / 0
    for caller in (before, broken, after):
        service.submit(caller)
    assert broken.rejection() == "Error generating stream: INTERNAL: ZeroDivisionError: division by zero"
    assert broken.empty()
    assert before.all() and after.all()
    assert sorted(ended)[0] == "error" and len(ended) == 3


def test_a_sleeping_model_is_not_ready_and_rejects_requests(serve, monkeypatch):
    ended, service = outcomes(monkeypatch), serve()
    mode = service._engine.sleep_mode
    assert finish(ask(service)) == ("length", 9)
    assert service.ready
    mode.sleep(WAIT)
    assert not service.ready
    assert ask(service).answer() == f"Error generating stream: UNAVAILABLE: {ASLEEP}"
    assert "must be" in ask(service, max_tokens=-1).answer(), "an invalid request needs no model"
    embedding = Caller(embedding_request='{"input": "x"}')
    service.submit(embedding)
    assert "`paged wake`" in embedding.rejection()
    until(lambda: len(ended) == 4)
    assert sorted(ended) == ["length", "refused", "refused", "refused"]
    mode.wake()
    assert service.ready
    assert finish(ask(service)) == ("length", 9)


def test_a_sleeping_model_answers_control_requests_and_ends_sessions(serve):
    """A session that began before continues after waking."""
    service = serve()
    mode = service._engine.sleep_mode
    own = {"correlation_id": 7, "flags": 1}
    assert finish(ask(service, own=own)) == ("length", 9)
    mode.sleep(WAIT)
    pool = Caller(pool_map=True)
    service.submit(pool)
    (found,) = pool.all()
    assert json.loads(found["pool_map"][0])["sleeping"] is True
    assert "`paged wake`" in ask(service, own=own | {"flags": 0}).answer()
    mode.wake()
    assert finish(ask(service, own=own | {"flags": 0})) == ("length", 9)
    mode.sleep(WAIT)
    end = Caller()
    end.correlation_id, end.flags = lambda: 7, lambda: 2
    service.submit(end)
    assert end.all()
    mode.wake()


def test_a_service_with_a_stopped_responder_is_not_ready_and_rejects(serve):
    service = serve()
    assert service.ready
    service._responder.stop()
    assert not service.ready
    assert "UNAVAILABLE: the engine has stopped" in ask(service).answer()


@contextmanager
def two_seconds_later(monkeypatch):
    """Stop the clock two seconds from now."""
    now = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(core.time, "monotonic", lambda: now + 2)
        yield


def test_a_stalled_step_makes_the_service_not_ready(serve, gate, monkeypatch):
    service = serve(stall_timeout=1)
    assert service.ready
    stuck = ask(service)
    gate.wait()
    with two_seconds_later(monkeypatch):
        assert not service.ready
        result = "UNAVAILABLE: a step has taken 2 s, more than stall_timeout=1"
        assert result in ask(service).answer()
        assert result in stuck.answer()
    assert service.ready
    gate.open()
    assert finish(ask(service)) == ("length", 9)


def test_a_blocked_response_makes_the_service_not_ready(serve, gate, monkeypatch):
    service = serve(stall_timeout=1)
    gate.open()
    may_send, stuck = Event(), Caller(text_input="abcd", sampling_parameters='{"max_tokens": 1}')
    sending, send = Event(), stuck.send

    def wait(response, flags):
        sending.set()
        assert may_send.wait(WAIT)
        send(response, flags)

    stuck.send = wait
    service.submit(stuck)
    assert sending.wait(WAIT)
    until(lambda: not service._engine.busy_seconds)
    with two_seconds_later(monkeypatch):
        assert not service.ready
        reason = "sending responses has taken 2 s, more than stall_timeout=1"
        assert reason in ask(service).answer()
    may_send.set()
    stuck.all()
    assert service.ready
