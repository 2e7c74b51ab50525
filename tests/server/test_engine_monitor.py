"""Requests that the engine has lost."""

from paged_backend.server import engine_monitor
from tests.support.service_calls import ask, finish


def test_a_request_that_the_engine_no_longer_tracks_fails(serve, gate, clock, monkeypatch):
    """Simulates a bug by removing the request from the scheduler."""
    service = serve()
    scheduler = service._assembly.scheduler
    lost, kept = ask(service), ask(service, "efgh")
    gate.wait()
    scheduler.abort(0)
    clock.ahead += engine_monitor.AUDIT_SECONDS + 1
    gate.open()
    assert "INTERNAL: the engine has lost the request" in lost.answer()
    assert finish(kept) == ("length", 9)
