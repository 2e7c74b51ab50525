"""Finds the instance that replaces this one when Triton loads the model again.

Each instance describes itself over its local socket. The successor is the newest instance of the same server, model,
version and instance name that was started after this one and that has the same fingerprint: only then the tokens of a
request have the same meaning there.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from paged_backend.utils import local_socket
from paged_backend.utils.local_socket import Connection, FrameError, pack

log = logging.getLogger("paged_llm")

ANSWER_SECONDS = 5  # time for another instance to describe itself
MAX_ATTEMPTS = 3  # after which an instance that does not describe itself is not asked again


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
        """Raises FrameError."""
        kinds = {"instance": str, "started": int, "fingerprint": str}
        if not isinstance(value, Mapping) or not all(type(value.get(name)) is kind for name, kind in kinds.items()):
            raise FrameError("invalid description of an instance")
        return cls(**{name: value[name] for name in kinds})


_NONE = Description("", 0, "")  # of an instance that does not describe itself, such as one of an earlier version


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
        found = {name: one for name in names if (one := self._describe(name))}
        return max(found, key=lambda name: found[name].started, default=None)

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
