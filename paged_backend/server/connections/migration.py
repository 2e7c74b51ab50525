"""Live migration: moves the requests of an instance to the instance that replaces it.

Triton loads the model again      the new instance listens; this one finds it
requests of this process          continue in the new instance; their streams stay here
requests of an earlier instance   are given back to it, and it sends them to the newest one, which gets their blocks
                                  from here
a moved request is given back     continues in the newest instance, or here if there is none

Each instance describes itself over its local socket. The successor is the newest instance of the same server, model,
version and instance name that was started after this one and that has the same fingerprint: only then the tokens of a
request have the same meaning there.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from paged_backend.api.request import GenerateRequest
from paged_backend.engine.engine_service import EngineService
from paged_backend.engine.moved_blocks import BlockRun
from paged_backend.engine.remote_engine import RemoteEngine
from paged_backend.engine.router import Router
from paged_backend.server.streams.responder import Responder
from paged_backend.utils import local_socket
from paged_backend.utils.local_socket import Connection, FrameError, pack

log = logging.getLogger("paged_llm")

POLL_SECONDS = 0.25  # time between two searches for a successor, and between moves of requests that arrive late
BUSY_SECONDS = 0.02  # the interval between searches while blocks are sent
MAX_UNSENT_BYTES = 256 << 20  # bytes of blocks; further requests run here until fewer wait to be sent
RELEASE_SECONDS = 5.0  # time after the last move until the memory is released, as late requests may arrive until then
ANSWER_SECONDS = 5  # time for another instance to describe itself
MAX_ATTEMPTS = 3  # after which an instance that does not describe itself is not asked again


class Migration:
    """Moves the requests of one instance, on a thread of its own. Implements `RequestOwner`."""

    def __init__(
        self,
        successors: Successors,
        router: Router,
        service: EngineService,
        responder: Responder,
        max_frame_bytes: int,
    ):
        """service: the requests of other instances that it runs. responder: gets the outputs of
        moved requests."""
        self._successors = successors
        self._router = router
        self._service = service
        self._responder = responder
        self._max_frame_bytes = max_frame_bytes
        self._engines: dict[str, RemoteEngine] = {}  # by name; guarded by the lock
        self._lock = threading.Lock()
        self._unloading = False
        self._stopping = threading.Event()
        self._moved_at: float | None = None  # time.monotonic() of the last move, or when the successor was found
        self._thread = threading.Thread(target=self._run, name="migration", daemon=True)
        self._thread.start()

    def begin_unload(self) -> None:
        """Give requests of other instances back, even if this one has no successor."""
        self._unloading = True

    @property
    def has_successor(self) -> bool:
        """Whether requests are moved to another instance."""
        return self._successor() is not None

    def stop(self) -> None:
        """Stop moving requests, and close the connections to other instances."""
        self._stopping.set()
        self._thread.join()
        with self._lock:
            engines = list(self._engines.values())
        for engine in engines:
            engine.close()

    def on_started(self, key: int) -> None:
        self._responder.count("moved")

    def on_ended(self, key: int) -> None:
        self._router.remove(key)

    def on_returned(self, engine: RemoteEngine, request: GenerateRequest, rejected: str | None) -> None:
        """Continue a request that the successor does not run, or no longer runs."""
        if rejected is not None:
            log.warning("a request is not moved: %s", rejected)
            self._router.put_back(replace(request, stays=True))
            return
        self._successors.exclude(engine.name)
        self._router.put_back(request, self._successor())

    def _run(self) -> None:
        seconds = POLL_SECONDS
        while not self._stopping.wait(seconds):
            try:
                seconds = BUSY_SECONDS if self._move() else POLL_SECONDS
            except Exception:
                log.exception("could not move requests to another instance")

    def _move(self) -> bool:
        """Move all requests to the successor, if there is one: some at a time, as fast as it takes their blocks. Return
        whether blocks are on the way."""
        successor = self._successor()
        if successor is None and not (self._unloading and self._service.num_open):
            return False

        def is_wanted(request: GenerateRequest) -> bool:
            if successor is None:
                return self._service.serves(request.key)
            return successor.unsent_bytes < MAX_UNSENT_BYTES

        def take(request: GenerateRequest, blocks: Sequence[BlockRun]) -> RemoteEngine | None:
            if self._service.serves(request.key):
                give_back = partial(self._service.give_back, request.key)
                if successor:
                    successor.store(blocks, give_back)
                else:
                    give_back()
                return None
            self._moved_at = time.monotonic()
            return successor

        self._router.take_out(is_wanted, take)
        if successor:
            self._moved_at = self._moved_at or time.monotonic()
            if time.monotonic() - self._moved_at > RELEASE_SECONDS:
                self._router.release_memory(successor, take)
        return successor is not None and successor.unsent_bytes > 0

    def _successor(self) -> RemoteEngine | None:
        """Return a connection to the successor; None if there is none."""
        name = self._successors.find()
        if name is None:
            return None
        with self._lock:
            engine = self._engines.get(name)
            if engine is None:
                try:
                    connection = Connection(local_socket.connect(name), self._max_frame_bytes)
                except OSError:  # it has just ended
                    return None
                engine = self._engines[name] = RemoteEngine(name, connection, self._responder.emit, self)
        return engine if engine.alive else None


@dataclass(frozen=True)
class Description:
    """An instance of a model."""

    instance: str  # version and Triton's name of the instance, which its successor has too
    started: int  # time.monotonic_ns() of its start
    fingerprint: str  # digest of the model and of the options that its tokens depend on

    def write(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, value: Any) -> Description:
        """Return the description that another instance sent. Raises FrameError."""
        kinds = {"instance": str, "started": int, "fingerprint": str}
        if not isinstance(value, Mapping) or not all(type(value.get(name)) is kind for name, kind in kinds.items()):
            raise FrameError("invalid description of an instance")
        return cls(**{name: value[name] for name in kinds})


_NONE = Description("", 0, "")  # an instance that does not describe itself, such as one of an earlier version


class Successors:
    """Finds the successor of one instance. Thread-safe."""

    def __init__(self, model: str, own_name: str, own: Description):
        """own_name: name of the instance's socket."""
        self._model = model
        self._own = own
        self._known: dict[str, Description | None] = {own_name: None}  # by socket name; None: cannot be used
        self._attempts: Counter[str] = Counter()  # failed attempts to ask an instance, by socket name

    def exclude(self, name: str) -> None:
        """Never return this instance again."""
        self._known[name] = None

    def find(self) -> str | None:
        """Return the name of the successor's socket; None if there is none."""
        try:
            names = local_socket.find(self._model)
        except OSError as error:
            log.debug("other instances cannot be found: %s", error)
            return None
        successors = {name: description for name in names if (description := self._describe(name))}
        return max(successors, key=lambda name: successors[name].started, default=None)

    def _describe(self, name: str) -> Description | None:
        """Return the description of an instance, if it is a successor."""
        if name not in self._known:
            description = _ask(name)
            if description is None:
                self._attempts[name] += 1
                if self._attempts[name] < MAX_ATTEMPTS:
                    return None
                description = _NONE
            self._known[name] = description if self._succeeds(description) else None
        return self._known[name]

    def _succeeds(self, other: Description) -> bool:
        own = self._own
        if other.instance != own.instance or other.started <= own.started:
            return False
        if other.fingerprint != own.fingerprint:
            log.info("the model was loaded again with other weights or options; open requests end in this instance")
            return False
        return True


def _ask(name: str) -> Description | None:
    """Return how an instance describes itself; None if it does not."""
    try:
        end = local_socket.connect(name)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", ANSWER_SECONDS, 0))
        connection = Connection(end)
        connection.send(pack({"id": 1, "describe": True}))
        with closing(connection.frames()) as frames:
            return Description.read(next(frames, {}).get("describe"))
    except (FrameError, OSError) as error:
        log.debug("an instance of the model did not describe itself: %s", error)
    return None
