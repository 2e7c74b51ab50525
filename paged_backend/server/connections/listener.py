"""Accepts requests that other models of the server send through the engine's local socket (utils/local_socket.py)."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, internal_error
from paged_backend.api.limits import InputLimits
from paged_backend.engine.engine_service import EngineService, RemoteClient
from paged_backend.engine.sleep_mode import SleepMode, Transition
from paged_backend.server.wire.channel import Channel, Received
from paged_backend.server.wire.tensors import INPUTS, read_tensors, write_tensors
from paged_backend.utils import local_socket
from paged_backend.utils.accepting import connections
from paged_backend.utils.local_socket import Connection, FrameError, pack

log = logging.getLogger("paged_llm")

NO_SLEEP_MODE = "sleep mode is not supported with data_parallel_size above 1"
DRAIN_POLL_SECONDS = 0.2  # time between two checks whether requests of other processes are open


class LocalChannel:
    """A request that came through the socket, from one of the models of trtllm/."""

    has_own_defaults = True

    def __init__(self, peer: _Peer, request_id: int, received: Received):
        self._peer = peer
        self._id = request_id
        self._received = received
        self.cancelled = False  # written, like `stopped`, by the thread that reads the connection
        self.stopped = False
        self.closed = False

    def received(self) -> Received:
        return self._received

    def send(self, outputs: Mapping[str, np.ndarray], *, final: bool) -> None:
        assert not self.closed, "a response after the final one"
        self._send({"outputs": write_tensors(outputs), "final": final}, final)

    def fail(self, error: RequestError, *, can_retry: bool = False) -> None:
        """Send an error. can_retry: whether another instance of the model may run the request."""
        if not self.closed:
            flags = {"can_retry": True} if can_retry else {}
            self._send({"error": {"code": error.code.value, "text": str(error)} | flags}, True)

    def is_cancelled(self) -> bool:
        return self.cancelled

    def _send(self, frame: dict[str, Any], final: bool) -> None:
        self._peer.send(pack({"id": self._id} | frame, self._peer.connection.max_frame_bytes))
        self.closed = final
        if final:
            self._peer.close_request(self._id)


class Listener:
    """Accepts connections, and reads the requests of each on a thread of its own."""

    def __init__(
        self,
        model: str,
        handle: Callable[[Channel], None],
        input_limits: InputLimits = InputLimits(),
        *,
        record_profile: Callable[[float], dict[str, Any]] | None = None,
        sleep_mode: SleepMode | None = None,
        engine_service: EngineService | None = None,
        description: Mapping[str, Any] | None = None,
    ):
        """Open the socket. Raises OSError.

        handle: called for each request, on its connection's thread.
        record_profile: returns a profile of these seconds; called on the connection's thread.
        sleep_mode: puts the engine to sleep and wakes it; called on the connection's thread. None: not supported.
        engine_service: runs requests of other instances of the model.
        description: describes this instance to others; see `Successors`.
        """
        self._handle = handle
        self.record_profile = record_profile
        self.sleep_mode = sleep_mode
        self.engine_service = engine_service
        self.description = description
        self._input_limits = input_limits
        self._socket, self.name = local_socket.listen(model)
        self._peers: set[_Peer] = set()  # guarded by `changed`, like the open requests of each peer
        self.changed = threading.Condition()
        self._unloading = False
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def drain(self, seconds: float, must_wait: Callable[[], bool] = lambda: False) -> None:
        """Reject new requests, and wait until the open ones have ended: as long as `must_wait` returns true, and then
        at most this many seconds."""
        self._unloading = True
        local_socket.remove(self.name)
        with self.changed:
            peers = list(self._peers)
        for peer in peers:  # one thread each, because sending blocks while a peer does not read
            threading.Thread(target=peer.send, args=[pack({"unloading": True})], name="unloading", daemon=True).start()
        deadline = time.monotonic() + seconds
        while not self._wait_until_idle(DRAIN_POLL_SECONDS):
            if must_wait():
                deadline = time.monotonic() + seconds
            elif time.monotonic() >= deadline:
                log.warning("requests of other models are still open after %g s and end now", seconds)
                break

    def _wait_until_idle(self, seconds: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: not any(peer.num_open for peer in self._peers), seconds)

    def close(self) -> None:
        """Close the socket and all connections. Call `drain` first."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._socket.close()
        with self.changed:
            peers = list(self._peers)
        for peer in peers:
            peer.close()

    def handle(self, channel: LocalChannel) -> None:
        """Pass a request on, or reject it while the model is being unloaded."""
        if self._unloading:
            channel.fail(RequestError(ErrorCode.UNAVAILABLE, "the engine's model is being unloaded"), can_retry=True)
        else:
            self._handle(channel)

    def remove(self, peer: _Peer) -> None:
        with self.changed:
            self._peers.discard(peer)
            self.changed.notify_all()

    def _accept(self) -> None:
        limits = self._input_limits
        for end, _ in connections(self._socket):
            if not local_socket.is_own(end):
                log.warning("refused a connection to %s: it belongs to another user", self.name)
                end.close()
                continue
            peer = _Peer(self, Connection(end, limits.max_frame_bytes))
            with self.changed:
                full = len(self._peers) >= limits.max_local_connections
                if not full:
                    self._peers.add(peer)
            if full:
                reason = f"too many connections: {limits.max_local_connections} are open (max_local_connections)"
                log.warning("refused a connection to %s: %s", self.name, reason)
                peer.send(pack({"refused": reason}))
                end.close()
            else:
                threading.Thread(target=peer.run, name="local requests", daemon=True).start()


class _Peer:
    """A connection of another model. One thread reads its requests. Any thread may write responses."""

    def __init__(self, listener: Listener, connection: Connection):
        self.connection = connection
        self.open: dict[int, LocalChannel] = {}  # guarded by the listener's condition
        self._listener = listener
        self._client: RemoteClient | None = None  # requests of another instance of the model
        if service := listener.engine_service:
            self._client = service.connect(self.send, connection.close, connection.max_frame_bytes)

    @property
    def num_open(self) -> int:
        """The number of open requests."""
        return len(self.open) + (self._client.num_open if self._client else 0)

    def close(self) -> None:
        """Send the outputs so far, and end the connection."""
        if self._client:
            self._client.flush()
        self.connection.close()

    def run(self) -> None:
        """Read requests until the connection ends; then mark the open ones as cancelled."""
        try:
            for frame in self.connection.frames():
                self._read(frame)
        except (FrameError, OSError) as error:
            log.warning("closed a local connection: %s", error)
        finally:
            self.connection.close()
            with self._listener.changed:
                for channel in self.open.values():
                    channel.cancelled = True
            if self._client:
                self._client.close()
            self._listener.remove(self)

    def send(self, frame: bytes) -> None:
        """Send a frame. Does nothing if the connection has ended: its requests are about to be cancelled."""
        try:
            self.connection.send(frame)
        except OSError as error:
            log.debug("a response was dropped, its connection has ended: %s", error)

    def close_request(self, request_id: int) -> None:
        with self._listener.changed:
            del self.open[request_id]
            self._listener.changed.notify_all()

    def _read(self, frame: dict[str, Any]) -> None:
        request_id = frame.get("id")
        if not isinstance(request_id, int):
            raise FrameError("a frame without an id")
        answers = {
            "profile": self._record_profile,
            "sleep": self._sleep,
            "wake": self._wake,
            "describe": self._describe,
        }
        if command := next((name for name in answers if frame.get(name) is not None), None):
            self._answer(request_id, command, lambda: answers[command](request_id, frame[command]))
            return
        if self._client and self._client.handle(request_id, frame):
            return
        cancel, stop = frame.get("cancel") is True, frame.get("stop") is True
        if cancel or stop:
            with self._listener.changed:
                if channel := self.open.get(request_id):
                    channel.cancelled, channel.stopped = channel.cancelled or cancel, channel.stopped or stop
            return
        if request_id in self.open:
            raise FrameError(f"{request_id}: the id of a request that is open")
        channel = LocalChannel(self, request_id, _received(frame.get("request")))
        with self._listener.changed:
            self.open[request_id] = channel
        self._listener.handle(channel)

    def _answer(self, request_id: int, command: str, run: Callable[[], dict[str, Any]]) -> None:
        """Run a command and send its result. The connection reads no other request meanwhile."""
        try:
            self.send(pack({"id": request_id, command: run()}, self.connection.max_frame_bytes))
        except Exception as error:
            failure = error if isinstance(error, RequestError) else internal_error(error)
            self.send(pack({"id": request_id, "error": {"code": failure.code.value, "text": str(failure)}}))

    def _record_profile(self, request_id: int, seconds: Any) -> dict[str, Any]:
        record = self._listener.record_profile
        if record is None or isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"profile={seconds!r}: must be a number of seconds")
        return record(seconds)

    def _describe(self, request_id: int, value: Any) -> dict[str, Any]:
        if value is not True:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"describe={value!r}: must be true")
        if self._listener.description is None:
            raise RequestError(ErrorCode.UNAVAILABLE, "describe: the instance runs no requests of other instances")
        return dict(self._listener.description)

    def _sleep(self, request_id: int, seconds: Any) -> dict[str, Any]:
        mode = self._listener.sleep_mode
        if mode is None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, NO_SLEEP_MODE)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"sleep={seconds!r}: must be a number of seconds")

        def report(open_requests: int) -> None:  # raises OSError, which ends the wait, if the command has ended
            self.connection.send(pack({"id": request_id, "open": open_requests}))

        return _write_transition(mode.sleep(seconds, report))

    def _wake(self, request_id: int, value: Any) -> dict[str, Any]:
        mode = self._listener.sleep_mode
        if mode is None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, NO_SLEEP_MODE)
        if value is not True:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"wake={value!r}: must be true")
        return _write_transition(mode.wake())


def _write_transition(transition: Transition) -> dict[str, Any]:
    return {"changed": transition.changed, "seconds": transition.seconds, "bytes": asdict(transition.memory)}


def _received(request: Any) -> Received:
    """Check the types of a request frame. Raises FrameError."""
    if not isinstance(request, dict) or not isinstance(request.get("parameters"), dict):
        raise FrameError("not a request")
    kinds = {"timeout_us": int, "sequence_id": int | str, "flags": int, "request_id": str}
    for name, kind in kinds.items():
        if not isinstance(request.get(name), kind):
            raise FrameError(f"{name}: missing, or of another type")
    tensors = read_tensors(request.get("tensors"), INPUTS)
    return Received(tensors, request["parameters"], *(request[name] for name in kinds))
