"""Fixtures of the service tests: a gate for engine steps, services, and the responder's clock."""

from contextlib import ExitStack

import pytest

from paged_backend.execution.runner import Runner
from paged_backend.server import responder
from tests.support.callers import serving
from tests.support.gated_service import UNHELD, Clock, Gate


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


@pytest.fixture
def serve(tiny, monkeypatch):
    """Return a function that creates a service; at the end, check that no service leaked anything."""
    with ExitStack() as stack:
        made = []

        def make(**options):
            with monkeypatch.context() as patch:
                patch.setattr(Runner, "launch", UNHELD)  # do not hold steps while the model loads
                made.append(stack.enter_context(serving(tiny[0], **options)).service)
            return made[-1]

        yield make
    for service in made:
        scheduler = service._assembly.scheduler
        scheduler.check()
        assert not scheduler.has_work
        assert scheduler.blocks.num_used == 0
        assert service._engine.waiting == 0


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(responder, "time", made)
    return made
