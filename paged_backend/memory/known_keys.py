"""The keys that a remote store has as far as this server knows, and the size of the values that it has written."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import NamedTuple

# Maximum number of keys. Values of this server above it are deleted like those above the budget.
MAX_KNOWN_KEYS = 1 << 17


class _Known(NamedTuple):
    nbytes: int  # size of the value; 0 if another server has written it
    expires: float  # time.monotonic() at which the store may have deleted it


class KnownKeys:
    """Known keys, least recently used first. Safe to use from any thread."""

    def __init__(self, budget: int, ttl: float):
        """budget: maximum bytes of the values that this server has written. ttl: seconds after which the store deletes
        a value that was not used."""
        self._budget = budget
        self._ttl = ttl
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, _Known] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the values that this server has written and not deleted. The store may have less."""
        return self._nbytes

    def __contains__(self, key: bytes) -> bool:
        """Return whether the store has a key, unless somebody has deleted it."""
        with self._lock:
            known = self._keys.get(key)
        return known is not None and known.expires > time.monotonic()

    def evictable(self, nbytes: int) -> list[bytes]:
        """Return the keys whose values have to be deleted before one of `nbytes` is written, least recently used first.
        They stay known until they are removed, so that they count if the store does not delete them. Keys of other
        servers that were not used for as long are forgotten."""
        found: list[bytes] = []
        foreign: list[bytes] = []
        with self._lock:
            left, count = self._nbytes + nbytes, len(self._keys)
            for key, known in self._keys.items():
                if left <= self._budget and count < MAX_KNOWN_KEYS:
                    break
                (found if known.nbytes else foreign).append(key)
                left -= known.nbytes
                count -= 1
            for key in foreign:
                del self._keys[key]
        return found

    def add(self, key: bytes, nbytes: int = 0) -> None:
        """Add a key as the most recently used. nbytes: size of the value if this server writes it; by default it has
        been read, and is not added if there are MAX_KNOWN_KEYS."""
        with self._lock:
            before = self._keys.pop(key, None)
            if not (nbytes or before) and len(self._keys) >= MAX_KNOWN_KEYS:
                return
            held = before.nbytes if before else 0
            self._keys[key] = _Known(nbytes or held, time.monotonic() + self._ttl)
            self._nbytes += (nbytes or held) - held

    def remove(self, *keys: bytes) -> None:
        """Remove keys that the store does not have, if they are known."""
        with self._lock:
            for key in keys:
                if known := self._keys.pop(key, None):
                    self._nbytes -= known.nbytes

    def expire(self) -> None:
        """Assume nothing about the store any more, for example because it was restarted. The sizes still count."""
        with self._lock:
            for key, known in self._keys.items():
                self._keys[key] = known._replace(expires=0.0)
