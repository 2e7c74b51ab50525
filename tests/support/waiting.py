"""Wait for a condition in a test."""

import time

WAIT = 60  # seconds


def until(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0)
