"""The engine's side of its local socket: requests that other models of the server send, as channels."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.limits import InputLimits
from paged_backend.server import local_socket
from paged_backend.server.channel import Channel, Received
from paged_backend.server.local_socket import Connection, FrameError, pack, read_tensors, write_tensors
from paged_backend.server.tensors import INPUTS

log = logging.getLogger("paged_llm")


class LocalChannel:
    """One request that came by the socket."""

    def __init__(self, peer: _Peer, own_id: int, received: Received):
        self._peer = peer
        self._id = own_id
        self._received = received
        self.cancelled = False  # this and the next are written by the thread that reads the connection
        self.stopped = False
        self.closed = False

    def received(self) -> Received:
        return self._received

    def send(self, outputs: Mapping[str, np.ndarray], *, final: bool) -> None:
        assert not self.closed, "a response after the final one"
        self._send({"outputs": write_tensors(outputs), "final": final}, final)

    def fail(self, error: RequestError, *, can_retry: bool = False) -> None:
        """not_begun: whether another instance may take the request."""
        if not self.closed:
            flags = {"not_begun": True} if can_retry else {}
            self._send({"error": {"code": error.code.value, "text": str(error)} | flags}, True)

    def is_cancelled(self) -> bool:
        return self.cancelled

    def _send(self, frame: dict[str, Any], final: bool) -> None:
        self._peer.send(pack({"id": self._id} | frame, self._peer.connection.max_frame_bytes))
        self.closed = final
        if final:
            self._peer.ended(self._id)


class Listener:
    """`take` gets each request, on a thread of its connection's. Raises OSError where there can be no socket."""

    def __init__(self, model: str, take: Callable[[Channel], None], input_limits: InputLimits = InputLimits()):
        self._take = take
        self._caps = input_limits
        self._socket, self._name = local_socket.listen(model)
        self._peers: set[_Peer] = set()  # guarded, like what is open in each of them
        self.changed = threading.Condition()
        self._leaving = False
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def drain(self, seconds: float) -> None:
        """Let nothing in, and wait until what is open has ended, or so many seconds."""
        self._leaving = True
        local_socket.remove(self._name)
        with self.changed:
            peers = list(self._peers)
        for peer in peers:  # beside, as one that does not read takes its time
            threading.Thread(target=peer.send, args=[pack({"leaving": True})], name="leaving", daemon=True).start()
        with self.changed:
            if not self.changed.wait_for(lambda: not any(peer.open for peer in self._peers), seconds):
                log.warning("requests of other models are open after %g s; they end now", seconds)

    def close(self) -> None:
        """End it, and what is open. To be called after `drain`."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        with self.changed:
            for peer in self._peers:
                peer.connection.close()

    def take(self, channel: LocalChannel) -> None:
        if self._leaving:
            channel.fail(RequestError(ErrorCode.UNAVAILABLE, "the engine's model is being unloaded"), can_retry=True)
        else:
            self._take(channel)

    def forget(self, peer: _Peer) -> None:
        with self.changed:
            self._peers.discard(peer)
            self.changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._socket.accept()
            except OSError:  # it was closed
                return
            if not local_socket.is_own(end):
                log.warning("a connection to %s was refused: it is another user's", self._name)
                end.close()
                continue
            peer = _Peer(self, Connection(end, self._caps.max_frame_bytes))
            with self.changed:
                full = len(self._peers) >= self._caps.max_local_connections
                if not full:
                    self._peers.add(peer)
            if full:
                reason = f"{self._caps.max_local_connections} connections are open, which is max_local_connections"
                log.warning("a connection to %s was refused: %s", self._name, reason)
                peer.send(pack({"refused": reason}))
                end.close()
            else:
                threading.Thread(target=peer.run, name="local requests", daemon=True).start()


class _Peer:
    """A connection of another model's. Its thread reads; whoever answers a request writes."""

    def __init__(self, listener: Listener, connection: Connection):
        self.connection = connection
        self.open: dict[int, LocalChannel] = {}  # guarded by the listener's condition
        self._listener = listener

    def run(self) -> None:
        try:
            for frame in self.connection.frames():
                self._read(frame)
        except (FrameError, OSError) as error:
            log.warning("a local connection was dropped: %s", error)
        finally:
            self.connection.close()
            with self._listener.changed:
                for channel in self.open.values():
                    channel.cancelled = True
            self._listener.forget(self)

    def send(self, frame: bytes) -> None:
        """Nothing happens where the other side is gone: its requests are cancelled as soon as that is noticed."""
        try:
            self.connection.send(frame)
        except OSError as error:
            log.debug("an answer had nobody to go to: %s", error)

    def ended(self, own_id: int) -> None:
        with self._listener.changed:
            del self.open[own_id]
            self._listener.changed.notify_all()

    def _read(self, frame: dict[str, Any]) -> None:
        own_id = frame.get("id")
        if not isinstance(own_id, int):
            raise FrameError("a frame without an id")
        cancel, stop = frame.get("cancel") is True, frame.get("stop") is True
        if cancel or stop:
            with self._listener.changed:
                if channel := self.open.get(own_id):
                    channel.cancelled, channel.stopped = channel.cancelled or cancel, channel.stopped or stop
            return
        if own_id in self.open:
            raise FrameError(f"{own_id}: the id of a request that is open")
        channel = LocalChannel(self, own_id, _received(frame.get("request")))
        with self._listener.changed:
            self.open[own_id] = channel
        self._listener.take(channel)


def _received(request: Any) -> Received:
    if not isinstance(request, dict) or not isinstance(request.get("parameters"), dict):
        raise FrameError("a frame that is no request")
    kinds = {"timeout_us": int, "sequence_id": int | str, "flags": int, "request_id": str}
    for name, kind in kinds.items():
        if not isinstance(request.get(name), kind):
            raise FrameError(f"{name}: missing, or of another type")
    tensors = read_tensors(request.get("tensors"), INPUTS)
    return tensors, request["parameters"], *(request[name] for name in kinds)
