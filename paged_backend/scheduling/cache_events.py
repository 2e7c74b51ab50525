"""Changes of the prefix cache: which contents were stored in a pool and removed from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paged_backend.scheduling.content import Entry, IndexListener

DEVICE, HOST = "GPU", "CPU"  # names of the pools in vLLM's events; the device may be a CPU


class CacheEvent(NamedTuple):
    """A change of the contents of one pool."""

    stored: bool  # False: removed
    entry: Entry
    medium: str  # DEVICE or HOST


class CacheEvents:
    """Collects the changes of all pools, in order. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def listener(self, medium: str) -> IndexListener:
        """Return the listener for one pool."""
        return _Listener(self._events.append, medium)

    def take(self) -> list[CacheEvent]:
        """Return the changes since the last call."""
        events = self._events[:]
        self._events.clear()
        return events


class _Listener:
    def __init__(self, add: Callable[[CacheEvent], None], medium: str):
        self._add = add
        self._medium = medium

    def stored(self, entry: Entry) -> None:
        self._add(CacheEvent(True, entry, self._medium))

    def removed(self, entry: Entry) -> None:
        self._add(CacheEvent(False, entry, self._medium))
