"""How many requests each tenant has open. A tenant is a `cache_salt`; requests without one are one tenant's."""

from __future__ import annotations

import threading
from collections import Counter

from paged_backend.api.errors import TenantLimitReached


class Tenants:
    """Safe to use from any thread; who checks before entering must be one thread at a time. most: requests of one
    tenant that may be open; 0: as many as like."""

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def check(self, salt: str, leaving: int = 0) -> None:
        """Raises TenantFull where there is no place for one more. leaving: requests that have left, and still take
        memory."""
        if self._most and self._open.get(salt, 0) + leaving >= self._most:
            raise TenantLimitReached(self._most)

    def enter(self, salt: str) -> None:
        with self._lock:
            self._open[salt] += 1

    def leave(self, salt: str) -> None:
        with self._lock:
            self._open[salt] -= 1
            if not self._open[salt]:
                del self._open[salt]
