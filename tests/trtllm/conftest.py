"""Fixtures of the relay tests."""

from types import SimpleNamespace

import pytest

from paged_backend.trtllm.limits import RelayLimits
from paged_backend.trtllm.relay import Relay
from tests.support.local_engine import engine, socket_directory
from tests.support.pb_utils import PB_UTILS

__all__ = ["engine", "socket_directory"]


@pytest.fixture
def relay(request):
    """A relay; its limits are the fixture's parameter."""
    made = Relay(
        SimpleNamespace(**vars(PB_UTILS)), "ensemble", "engine", limits=RelayLimits(**getattr(request, "param", {}))
    )
    yield made
    made.stop()
