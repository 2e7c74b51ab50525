"""Readiness: a stopped, stalled or blocked service."""

import time
from contextlib import contextmanager
from threading import Event

from paged_backend.engine import step_loop
from tests.support.callers import Caller
from tests.support.in_process import WAIT
from tests.support.service_calls import ask, finish
from tests.support.waiting import until


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
        patch.setattr(step_loop.time, "monotonic", lambda: now + 2)
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
