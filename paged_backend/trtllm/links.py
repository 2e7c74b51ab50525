"""Connections to the engine's model: one to each of its instances."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.server import local_socket
from paged_backend.server.channel import Received
from paged_backend.server.local_socket import Connection, FrameError, pack, read_tensors, write_tensors
from paged_backend.server.tensors import OUTPUTS

log = logging.getLogger("paged_llm")

Outputs = dict[str, np.ndarray]


class RetryElsewhere(RequestError):
    """From an engine that leaves: another instance may take the request."""


class Link:
    """To one instance. Its thread hands on what comes: `hear` gets a request's id, its outputs or its error, and
    whether that is its last; `lose` gets the link when it has ended."""

    def __init__(
        self,
        name: str,
        connection: Connection,
        hear: Callable[[int, Outputs | RequestError, bool], None],
        lose: Callable[[Link], None],
    ):
        self.name = name  # of the socket, which no other instance has
        self.num_open = 0  # requests; whoever makes them counts
        self.takes = True  # whether it lets new ones in
        self.leaving = False  # whether the engine has said that it will end
        self.end = "the engine's model was unloaded, or has ended"  # why there are no more answers, once there are none
        self._connection = connection
        self._hear = hear
        self._lose = lose
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        """Raises OSError where the link has ended, once all that came on it has been handed on."""
        try:
            self._connection.send(frame)
        except OSError:
            self.stop()
            raise

    def pack(self, own_id: int, received: Received) -> bytes:
        """The frame of a request. Raises RequestError for one that is too large."""
        tensors, parameters, timeout_us, sequence_id, flags, request_id = received
        request = {
            "tensors": write_tensors(tensors),
            "parameters": parameters,
            "timeout_us": timeout_us,
            "sequence_id": sequence_id,
            "flags": flags,
            "request_id": request_id,
        }
        try:
            return pack({"id": own_id, "request": request}, self._connection.max_frame_bytes)
        except FrameError as error:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"the request is too large: {error}") from None

    def stop(self) -> None:
        self._connection.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            for frame in self._connection.frames():
                self._read(frame)
        except (FrameError, OSError) as error:
            log.warning("the connection to the engine's model ended: %s", error)
        finally:
            self.takes = False
            self._connection.close()
            self._lose(self)

    def _read(self, frame: Mapping[str, Any]) -> None:
        if "leaving" in frame:
            self._leave()
        elif "refused" in frame:
            self.end = f"the engine's model lets no connection in: {frame['refused']}"
        elif "error" in frame:
            code, text = ErrorCode(frame["error"]["code"]), frame["error"]["text"]
            if not_begun := frame["error"].get("not_begun") is True:
                self._leave()
            self._hear(frame["id"], (RetryElsewhere if not_begun else RequestError)(code, text, verbatim=True), True)
        else:
            self._hear(frame["id"], read_tensors(frame["outputs"], OUTPUTS), frame["final"])

    def _leave(self) -> None:
        self.takes, self.leaving = False, True


class Links:
    """To the model `engine`. Made when first needed, and anew when it was loaded again. Many threads may pick."""

    def __init__(
        self,
        engine: str,
        hear: Callable[[int, Outputs | RequestError, bool], None],
        lose: Callable[[Link], None],
        max_frame_bytes: int,
    ):
        self._engine = engine
        self._max_frame_bytes = max_frame_bytes
        self._hear = hear
        self._lose = lose
        self._links: dict[str, Link] = {}  # by the names of their sockets; guarded by the lock
        self._lock = threading.Lock()

    def pick(self, tried: Collection[str] = ()) -> Link:
        """The one with the fewest open requests, of those whose names are not in `tried`. Raises RequestError where
        there is none: the model is not loaded."""
        try:
            names = local_socket.find(self._engine)
        except OSError as error:
            raise RequestError(ErrorCode.UNAVAILABLE, f"the engine's model cannot be reached: {error}") from None
        with self._lock:
            self._links = {name: link for name, link in self._links.items() if link.takes}
            for name in names:
                if name not in self._links and name not in tried:
                    with suppress(OSError):  # of an instance that has just gone
                        connection = Connection(local_socket.connect(name), self._max_frame_bytes)
                        self._links[name] = Link(name, connection, self._hear, self._lose)
            links = [link for name, link in self._links.items() if name not in tried]
        if not links:
            raise RequestError(ErrorCode.UNAVAILABLE, f"the engine's model, {self._engine}, is not loaded")
        return min(links, key=lambda link: link.num_open)

    def stop(self) -> None:
        for link in self._links.values():
            link.stop()


def control_frame(own_id: int, wish: str) -> bytes:
    """wish: "cancel", or "stop", which ends the request with what there is."""
    return pack({"id": own_id, wish: True})
