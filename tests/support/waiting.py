"""Wait for a condition in a test."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT = 120  # seconds after which a missing event or response fails the test


def until(condition: Callable[[], bool], what: str = "the condition", *, timeout: float = WAIT) -> None:
    """Poll until the condition holds, where there is no event to wait for; fail after the timeout in seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.002)
