"""Connections to the local sockets of the engine's model: one per instance."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.server.wire.channel import Received
from paged_backend.server.wire.tensors import OUTPUTS, read_tensors, write_tensors
from paged_backend.utils import local_socket
from paged_backend.utils.local_socket import Connection, FrameError, pack

log = logging.getLogger("paged_llm")

Outputs = dict[str, np.ndarray]
Receive = Callable[[int, Outputs | RequestError, bool], None]  # request id, response, whether it is the last


class RetryElsewhere(RequestError):
    """An instance that is being unloaded has rejected the request: another instance may run it."""


class Link:
    """A connection to one instance, with a thread that receives responses."""

    def __init__(
        self,
        name: str,
        connection: Connection,
        receive: Receive,
        on_ended: Callable[[Link], None],
    ):
        """name: name of the socket, which identifies the instance.
        receive: called for each response, on the link's thread.
        on_ended: called once the connection has ended, on the link's thread."""
        self.name = name
        self.num_open = 0  # number of open requests, counted by the relay
        self.accepts_requests = True
        self.unloading = False  # whether the instance has announced that it is being unloaded
        self.end_reason = "the engine's model was unloaded, or has ended"
        self._connection = connection
        self._receive = receive
        self._on_ended = on_ended
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        """Send a frame. Raises OSError if the link has ended, after all received responses have been handled."""
        try:
            self._connection.send(frame)
        except OSError:
            self.stop()
            raise

    def pack(self, request_id: int, received: Received) -> bytes:
        """Return the frame of a request. Raises RequestError if it is too large."""
        tensors, parameters, timeout_us, sequence_id, flags, client_id = received
        request = {
            "tensors": write_tensors(tensors),
            "parameters": parameters,
            "timeout_us": timeout_us,
            "sequence_id": sequence_id,
            "flags": flags,
            "request_id": client_id,
        }
        try:
            return pack({"id": request_id, "request": request}, self._connection.max_frame_bytes)
        except FrameError as error:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"the request is too large: {error}") from None

    def stop(self) -> None:
        """Close the connection and wait for the link's thread."""
        self._connection.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            for frame in self._connection.frames():
                self._handle(frame)
        except (FrameError, OSError) as error:
            log.warning("the connection to the engine's model ended: %s", error)
        finally:
            self.accepts_requests = False
            self._connection.close()
            self._on_ended(self)

    def _handle(self, frame: Mapping[str, Any]) -> None:
        if "unloading" in frame:
            self._mark_unloading()
        elif "refused" in frame:
            self.end_reason = f"the engine's model refused the connection: {frame['refused']}"
        elif "error" in frame:
            code, text = ErrorCode(frame["error"]["code"]), frame["error"]["text"]
            can_retry = frame["error"].get("can_retry") is True
            if can_retry:
                self._mark_unloading()
            self._receive(frame["id"], (RetryElsewhere if can_retry else RequestError)(code, text, verbatim=True), True)
        else:
            self._receive(frame["id"], read_tensors(frame["outputs"], OUTPUTS), frame["final"])

    def _mark_unloading(self) -> None:
        self.accepts_requests, self.unloading = False, True


class Links:
    """The links to the model `engine`, made when they are needed. Thread-safe."""

    def __init__(self, engine: str, receive: Receive, on_ended: Callable[[Link], None], max_frame_bytes: int):
        """receive, on_ended: arguments of each Link."""
        self._engine = engine
        self._max_frame_bytes = max_frame_bytes
        self._receive = receive
        self._on_ended = on_ended
        self._links: dict[str, Link] = {}  # links by socket name; guarded by the lock
        self._lock = threading.Lock()

    def pick(self, excluded: Collection[str] = ()) -> Link:
        """Return the link with the fewest open requests whose name is not excluded.

        Raises RequestError if there is none: the model is not loaded.
        """
        try:
            names = local_socket.find(self._engine)
        except OSError as error:
            raise RequestError(ErrorCode.UNAVAILABLE, f"the engine's model cannot be reached: {error}") from None
        with self._lock:
            self._links = {name: link for name, link in self._links.items() if link.accepts_requests}
            for name in names:
                if name not in self._links and name not in excluded:
                    with suppress(OSError):  # the instance has just ended
                        connection = Connection(local_socket.connect(name), self._max_frame_bytes)
                        self._links[name] = Link(name, connection, self._receive, self._on_ended)
            links = [link for name, link in self._links.items() if name not in excluded]
        if not links:
            raise RequestError(ErrorCode.UNAVAILABLE, f"the engine's model, {self._engine}, is not loaded")
        return min(links, key=lambda link: link.num_open)

    def stop(self) -> None:
        for link in self._links.values():
            link.stop()


def control_frame(request_id: int, action: str) -> bytes:
    """Return a frame that ends a request. action: "cancel", or "stop", which keeps the output so far."""
    return pack({"id": request_id, action: True})
