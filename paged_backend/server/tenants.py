"""Counts the open requests of each tenant. A tenant is a `cache_salt`; requests without one belong to one tenant."""

from __future__ import annotations

import threading
from collections import Counter

from paged_backend.api.errors import TenantLimitReached


class Tenants:
    """Open requests by tenant. Thread-safe, but `check` and the following `enter` must be one thread at a time."""

    def __init__(self, max_requests: int):
        """max_requests: maximum number of open requests per tenant; 0: unlimited."""
        self._max_requests = max_requests
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def check(self, salt: str, leaving: int = 0) -> None:
        """Raise TenantLimitReached if the tenant can have no further request.

        leaving: requests that have left but whose text is still in memory.
        """
        if self._max_requests and self._open.get(salt, 0) + leaving >= self._max_requests:
            raise TenantLimitReached(self._max_requests)

    def enter(self, salt: str) -> None:
        """Count a request as open."""
        with self._lock:
            self._open[salt] += 1

    def leave(self, salt: str) -> None:
        """Count a request as ended."""
        with self._lock:
            self._open[salt] -= 1
            if not self._open[salt]:
                del self._open[salt]
