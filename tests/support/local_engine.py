"""An engine's side of the local socket, for tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from paged_backend.api.limits import InputLimits
from paged_backend.server.connections.listener import Listener
from paged_backend.server.wire.channel import Channel
from paged_backend.utils import local_socket
from paged_backend.utils.local_socket import Connection, pack
from tests.support.in_process import WAIT


class Engine:
    """A listener that queues the requests it receives."""

    def __init__(self, model: str = "engine", input_limits: InputLimits = InputLimits()):
        self.received: SimpleQueue[Channel] = SimpleQueue()
        self.listener = Listener(model, self.received.put, input_limits)

    def next(self) -> Channel:
        """Wait for the next request."""
        return self.received.get(timeout=WAIT)

    def stop(self, seconds: float = WAIT) -> None:
        self.listener.drain(seconds)
        self.listener.close()


def use_socket_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the sockets into a directory of their own, whose path is longer than a socket's may be."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    return long / f"paged-{os.getuid()}"


def connected(model: str = "engine") -> Connection:
    (name,) = local_socket.find(model)
    return Connection(local_socket.connect(name))


def ask(connection: Connection, request_id: int = 1, **tensors: Any) -> None:
    """Send a request."""
    request = {
        "tensors": {"text_input": ["x"]} | tensors, "parameters": {}, "timeout_us": 0, "sequence_id": 0, "flags": 0,
        "request_id": "",
    }  # fmt: skip
    connection.send(pack({"id": request_id, "request": request}))


@pytest.fixture
def socket_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_socket_directory(tmp_path, monkeypatch)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.listener.close()
