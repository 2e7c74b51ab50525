"""The background thread that runs calls in order."""

import subprocess
import sys
from queue import SimpleQueue
from threading import Event

import pytest

from paged_backend.utils.worker import BackgroundWorker, CallTimeout, call_with_timeout
from tests.support.in_process import WAIT


def test_calls_run_in_order_and_survive_a_failed_call():
    done, worker = SimpleQueue(), BackgroundWorker("background")
    for number in range(3):
        worker.submit(done.put, number)
        worker.submit(lambda: 1 / 0)
    assert [done.get(timeout=WAIT) for _ in range(3)] == [0, 1, 2]
    worker.stop(WAIT)


def test_stop_drops_queued_calls():
    started, proceed, done, worker = Event(), Event(), SimpleQueue(), BackgroundWorker("background")
    worker.submit(lambda: (started.set(), proceed.wait(WAIT)))
    worker.submit(done.put, 1)
    assert started.wait(WAIT)
    worker.stop(0)
    proceed.set()
    worker.stop(WAIT)
    assert done.empty()


def test_endless_call_does_not_keep_the_process_alive():
    code = """
from threading import Event

import pytest
from paged_backend.utils.worker import BackgroundWorker, CallTimeout, call_with_timeout
started, worker = Event(), BackgroundWorker("background")
worker.submit(lambda: (started.set(), Event().wait()))
started.wait()
worker.stop(0)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=WAIT, check=False).returncode == 0


def test_call_with_timeout_returns_the_result_or_raises_the_exception():
    assert call_with_timeout(lambda: 3, WAIT, "call") == 3
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(lambda: 1 / 0, WAIT, "call")


def test_call_that_takes_too_long_is_abandoned():
    proceed = Event()
    with pytest.raises(CallTimeout, match=r"takes more than 0\.01 s"):
        call_with_timeout(lambda: proceed.wait(WAIT), 0.01, "call")
    proceed.set()
