"""Requests through the local socket: responses, cancellation, slow readers, limits and shutdown."""

import threading

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.limits import InputLimits
from paged_backend.engine.model_memory import ReleasedMemory
from paged_backend.engine.sleep_mode import NOTHING, Transition
from paged_backend.server.connections.listener import Listener
from paged_backend.server.wire.responses import write_json, write_num_stopped
from paged_backend.utils import local_socket
from paged_backend.utils.local_socket import FrameError, pack
from tests.support.in_process import WAIT
from tests.support.local_engine import Engine, ask, connected
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("socket_directory")


def test_a_response_an_error_and_a_cancellation(engine):
    connection = connected()
    frames = connection.frames()
    for own_id in (1, 2, 3):
        ask(connection, own_id)
    first, second, third = (engine.next() for _ in range(3))
    assert first.received()[0]["text_input"].tolist() == [b"x"]
    second.fail(RequestError(ErrorCode.UNAVAILABLE, "later"))
    first.send(write_num_stopped(3), final=True)
    assert next(frames) == {"id": 2, "error": {"code": "UNAVAILABLE", "text": "UNAVAILABLE: later"}}
    assert next(frames) == {"id": 1, "outputs": {"num_stopped": [3]}, "final": True}
    connection.send(pack({"id": 3, "cancel": True}))
    connection.send(pack({"id": 2, "cancel": True}))  # the connection has ended
    ask(connection, 4)
    engine.next()
    assert third.is_cancelled() and not third.closed


@pytest.mark.parametrize(
    "frame",
    [
        (InputLimits.max_frame_bytes + 1).to_bytes(4, "big"),
        b"\0\0\0\x04{no}",
        b"\0\0\0\x02[]",
        pack({"id": 1}),
        pack({"request": {}}),
        pack({"id": 1, "request": {"tensors": {}, "parameters": {}, "timeout_us": "1"}}),
    ],
)
def test_an_invalid_frame_closes_only_its_connection(engine, frame):
    good, bad = connected(), connected()
    ask(good)
    ask(bad, 5)
    channels = [engine.next() for _ in range(2)]
    bad.send(frame)
    assert list(bad.frames()) == []
    until(lambda: any(one.is_cancelled() for one in channels))
    (left,) = [one for one in channels if not one.is_cancelled()]
    left.send(write_num_stopped(1), final=True)
    assert next(good.frames())["outputs"] == {"num_stopped": [1]}


def test_a_slow_reader_does_not_block_others(engine, monkeypatch):
    monkeypatch.setattr(local_socket, "SEND_SECONDS", 0.05)
    slow, good = connected(), connected()
    ask(slow)
    channel = engine.next()
    ask(good)
    other = engine.next()
    outputs = write_json("adapters", [{"name": "x" * 65536}])
    while not channel.is_cancelled():
        channel.send(outputs, final=False)
    other.send(write_num_stopped(1), final=True)
    assert next(good.frames())["outputs"] == {"num_stopped": [1]}
    slow.close()


def test_a_slow_reader_does_not_delay_shutdown(monkeypatch):
    """Several slow readers do not either, although sending to each of them blocks."""
    monkeypatch.setattr(local_socket, "SEND_SECONDS", 4 * WAIT)
    engine, outputs = Engine(), write_json("adapters", [{"name": "x" * 65536}] * 64)
    connections = [connected() for _ in range(3)]
    for connection in connections:
        ask(connection)
        channel = engine.next()  # larger than the socket's buffer
        threading.Thread(target=channel.send, args=[outputs], kwargs={"final": False}, daemon=True).start()
        until(channel._peer.connection._lock.locked)
    leaving = threading.Thread(target=engine.stop, args=[0], daemon=True)
    leaving.start()
    leaving.join(WAIT)
    assert not leaving.is_alive()


def test_an_oversized_response_is_not_sent():
    engine = Engine(input_limits=InputLimits(max_frame_bytes=200))
    connection = connected()
    ask(connection)
    with pytest.raises(FrameError, match="at most 200 can be sent"):
        engine.next().send(write_json("adapters", [{"name": "x" * 200}]), final=True)
    connection.close()
    engine.listener.close()


def test_connections_beyond_the_limit_are_rejected_with_a_reason():
    engine = Engine(input_limits=InputLimits(max_local_connections=1))
    first = connected()
    ask(first)
    engine.next()
    assert list(connected().frames()) == [{"refused": "too many connections: 1 are open (max_local_connections)"}]
    first.close()
    until(lambda: not engine.listener._peers)
    ask(connected())
    engine.next()
    engine.listener.close()


class Mode:
    """A sleep mode that reports an open request until the report fails."""

    def __init__(self):
        self.calls, self.failed = [], threading.Event()

    def sleep(self, timeout, report):
        self.calls.append(timeout)
        try:
            while timeout:
                report(1)
        except OSError:
            self.failed.set()
            raise
        return Transition(True, ReleasedMemory(5, 4, 3), 2.0)

    def wake(self):
        return NOTHING


@pytest.fixture
def sleeper():
    """(sleep mode, connection to its engine)"""
    mode = Mode()
    listener = Listener("sleeper", print, sleep_mode=mode)
    yield mode, connected("sleeper")
    listener.drain(WAIT)
    listener.close()


def test_an_engine_sleeps_and_wakes(sleeper):
    mode, connection = sleeper
    frames = connection.frames()
    connection.send(pack({"id": 1, "sleep": 0}))
    slept = {"changed": True, "seconds": 2.0, "bytes": {"pool": 5, "weights": 4, "graphs": 3}}
    assert next(frames) == {"id": 1, "sleep": slept}
    connection.send(pack({"id": 2, "wake": True}))
    nothing = {"changed": False, "seconds": 0.0, "bytes": {"pool": 0, "weights": 0, "graphs": 0}}
    assert next(frames) == {"id": 2, "wake": nothing}
    assert mode.calls == [0]


def test_the_wait_ends_with_the_command(sleeper):
    mode, connection = sleeper
    connection.send(pack({"id": 1, "sleep": 60}))
    assert next(connection.frames()) == {"id": 1, "open": 1}
    connection.close()
    assert mode.failed.wait(WAIT)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ({"sleep": -1}, "sleep=-1: must be a number of seconds"),
        ({"sleep": "x"}, "sleep='x': must be a number of seconds"),
        ({"sleep": True}, "sleep=True: must be a number of seconds"),
        ({"wake": 1}, "wake=1: must be true"),
    ],
)
def test_an_invalid_command_is_rejected(sleeper, command, reason):
    connection = sleeper[1]
    connection.send(pack({"id": 1} | command))
    text = f"INVALID_ARGUMENT: {reason}"
    assert next(connection.frames()) == {"id": 1, "error": {"code": "INVALID_ARGUMENT", "text": text}}
