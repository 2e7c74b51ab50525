"""Requests that cannot be handed to the engine."""

import pytest

from tests.support.service_calls import (
    ask,
    finish,
)


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
