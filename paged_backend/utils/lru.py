"""An index of things that are kept within a budget of bytes."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruIndex(Generic[Key, Value]):
    """Values with a size each, the least recently used first. Iterates over the keys in this order. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[Value, int]] = {}  # value and size
        self.nbytes = 0  # bytes of all entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key) -> Value | None:
        """Return a value, which does not count as a use; None if the key is unknown."""
        entry = self._entries.get(key)
        return entry[0] if entry else None

    def size(self, key: Key) -> int:
        """Return the bytes of an entry; 0 if the key is unknown."""
        entry = self._entries.get(key)
        return entry[1] if entry else 0

    def put(self, key: Key, value: Value, nbytes: int) -> None:
        """Add or replace an entry, as the most recently used."""
        self.remove(key)
        self._entries[key] = value, nbytes
        self.nbytes += nbytes

    def touch(self, key: Key) -> bool:
        """Make an entry the most recently used. Return whether the key is known."""
        if key not in self._entries:
            return False
        self._entries[key] = self._entries.pop(key)
        return True

    def remove(self, key: Key) -> bool:
        """Remove an entry. Return whether the key was known."""
        if key not in self._entries:
            return False
        self.nbytes -= self._entries.pop(key)[1]
        return True

    def excess(self, max_bytes: int, max_entries: int = sys.maxsize) -> list[Key]:
        """Return the least recently used keys that must be removed to keep the limits."""
        keys: list[Key] = []
        nbytes, count = self.nbytes, len(self._entries)
        for key, (_, size) in self._entries.items():
            if nbytes <= max_bytes and count <= max_entries:
                break
            keys.append(key)
            nbytes, count = nbytes - size, count - 1
        return keys
