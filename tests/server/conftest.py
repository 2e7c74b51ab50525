"""Fixtures of the service tests: a gate for engine steps, services, and the responder's clock."""

from contextlib import ExitStack
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from paged_backend.execution.runner import Runner
from paged_backend.server.metrics.metrics import Metrics
from paged_backend.server.prompts.sessions import Sessions
from paged_backend.server.streams import responder
from paged_backend.server.streams.responder import Responder
from tests.support.callers import serving
from tests.support.local_engine import engine, socket_directory
from tests.support.metric_families import RecordedFamilies
from tests.support.service_calls import UNHELD, Clock, Gate

__all__ = ["engine", "socket_directory"]


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


@pytest.fixture
def opened():
    """Return (responder, its metrics as recorded, keys of aborted requests)."""
    families, aborted = RecordedFamilies(), SimpleQueue()
    engine = {"abort": aborted.put, "end": lambda key, index: aborted.put(key), "end_all": aborted.put}
    engine |= {"busy_seconds": 0.0}
    made = Responder(SimpleNamespace(**engine), Metrics(families, {}), Sessions(60, 1, print))
    made.start()
    yield made, families, aborted
    made.stop()
