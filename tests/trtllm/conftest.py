"""Fixtures of the relay tests."""

from types import SimpleNamespace

import pytest

from paged_backend.trtllm.limits import RelayLimits
from paged_backend.trtllm.relay import Relay
from tests.support.local_engine import Engine, use_socket_directory
from tests.support.pb_utils import PB_UTILS


@pytest.fixture
def socket_directory(tmp_path, monkeypatch):
    return use_socket_directory(tmp_path, monkeypatch)


@pytest.fixture
def engine():
    made = Engine()
    yield made
    made.listener.close()


@pytest.fixture
def relay(request):
    """A relay; its limits are the fixture's parameter."""
    made = Relay(
        SimpleNamespace(**vars(PB_UTILS)), "ensemble", "engine", limits=RelayLimits(**getattr(request, "param", {}))
    )
    yield made
    made.stop()
