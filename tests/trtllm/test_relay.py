"""The relay: rows to the engine and back, cancellation, and engines that are unloaded, crash or are replaced."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.trtllm.relay import Relay
from paged_backend.utils import local_socket
from tests.support.in_process import WAIT
from tests.support.local_engine import Engine
from tests.support.relay_requests import response, submit
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("socket_directory")


@pytest.mark.parametrize("relay", [{"max_open_rows": 1}], indirect=True)
def test_rows_beyond_max_open_rows_are_rejected(engine, relay):
    first = submit(relay)
    channel = engine.next()
    rejection = "UNAVAILABLE: 1 rows are open and 1 are added; at most 1 may be open (max_open_rows)"
    assert submit(relay).next() == (rejection, True)
    channel.send(response("a", "stop"), final=True)
    assert first.next() == ([b"a"], True)
    until(lambda: not relay._rows)
    submit(relay)
    engine.next()


def test_an_unloading_engine_finishes_open_requests(relay):
    old_engine = Engine()
    request = submit(relay)
    channel = old_engine.next()
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(old_engine.stop)
        until(lambda: not local_socket.find("engine"))
        new = Engine()
        channel.send(response("a", "stop"), final=True)
        assert request.next() == ([b"a"], True)
        leaving.result(WAIT)
    request = submit(relay)
    new.next().send(response("b", "stop"), final=True)
    assert request.next() == ([b"b"], True)
    new.stop()


def test_open_requests_fail_once_when_the_drain_time_is_over(relay):
    engine = Engine()
    request = submit(relay)
    channel = engine.next()
    engine.stop(seconds=0)
    assert request.next() == ("UNAVAILABLE: the engine's model was unloaded, or has ended", True)
    until(channel.is_cancelled)


def test_a_cancelled_client_or_failed_row_cancels_the_other_rows(relay, engine):
    rows = {"text_input": [["x"], ["y"]], "max_tokens": [[4], [4]], "stream": [[True], [True]]}
    request = submit(relay, **rows)
    channels = [engine.next(), engine.next()]
    channels[0].fail(RequestError(ErrorCode.INTERNAL, "lost"))
    assert request.next() == ("INTERNAL: lost", True)
    until(channels[1].is_cancelled)
    request = submit(relay, **rows)
    channels = [engine.next(), engine.next()]
    request.cancelled = True
    assert request.next() == ("CANCELLED: the request was cancelled by its client", True)
    for channel in channels:
        until(channel.is_cancelled)


def test_a_row_stopped_before_it_was_sent_is_stopped_afterwards(relay, engine, monkeypatch):
    send = Relay._send

    def after(self, row, frame):
        if not row.submitted:
            stop = submit(relay, name="mine", stop=[[True]])
            assert stop.next()[1]
            until(lambda: not relay._wake.is_set())  # the row updater has run
        send(self, row, frame)

    monkeypatch.setattr(Relay, "_send", after)
    submit(relay, name="mine")
    channel = engine.next()
    until(lambda: channel.stopped)


# --- engines that are replaced ---------------------------------------------------------------------------------------

BEING_UNLOADED = ("UNAVAILABLE: the engine's model is being unloaded", True)
HAS_ENDED = ("UNAVAILABLE: the engine's model was unloaded, or has ended", True)
TWO_ROWS = {"text_input": [["x"], ["y"]], "max_tokens": [[4], [4]], "stream": [[True], [True]]}


@pytest.fixture
def old_engine(relay):
    """An engine that the relay has a link to; it is preferred when another one is equally busy."""
    made = Engine()
    check_answered(relay, submit(relay), made)
    yield made
    with suppress(OSError):  # it was closed
        made.listener.close()


@pytest.fixture
def make_engine():
    """Return a function that starts another engine."""
    engines = []

    def another():
        engines.append(Engine())
        return engines[-1]

    yield another
    for one in engines:
        with suppress(OSError):
            one.listener.close()


def check_answered(relay, request, engine, num_rows=1):
    """Check that this engine answers the request, and that nothing leaks."""
    for left in reversed(range(num_rows)):
        engine.next().send(response("a", "stop"), final=True)
        assert request.next() == ([b"a"], left == 0)
    check_nothing_leaked(relay, request)


def check_nothing_leaked(relay, request):
    until(lambda: not relay._rows)
    assert all(link.num_open == 0 for link in relay._links._links.values())
    assert request.got.empty()


def check_received_nothing(relay, engine):
    """Check that the engine has received no request before."""
    request = submit(relay, text_input=[["first"]])
    channel = engine.next()
    assert channel.received()[0]["text_input"].tolist() == [b"first"]
    channel.send(response("a", "stop"), final=True)
    assert request.next() == ([b"a"], True)


def start_rejecting(engine):
    """Make the engine reject requests, as when it starts to unload, before the relay knows of it."""
    engine.listener._unloading = True


@pytest.fixture
def held_retries(monkeypatch):
    """Hold retries: `come` is set when one waits, and `go` releases it."""
    gate = SimpleNamespace(come=threading.Event(), go=threading.Event())
    retry = Relay._retry

    def wait(self, row, error):
        gate.come.set()
        assert gate.go.wait(WAIT)
        retry(self, row, error)

    monkeypatch.setattr(Relay, "_retry", wait)
    yield gate
    gate.go.set()


@pytest.mark.parametrize("relay", [{"max_open_rows": 2}], indirect=True)
def test_a_row_refused_by_an_unloading_engine_moves_to_the_next(relay, old_engine, make_engine):
    start_rejecting(old_engine)
    new = make_engine()
    check_answered(relay, submit(relay), new)
    check_answered(relay, submit(relay, **TWO_ROWS), new, num_rows=2)


def test_a_row_is_retried_until_an_engine_accepts_it(relay, old_engine, make_engine):
    request, leaving = submit(relay), old_engine
    for _ in range(3):
        channel, following = leaving.next(), make_engine()
        channel.fail(RequestError(ErrorCode.UNAVAILABLE, "being unloaded"), can_retry=True)
        leaving = following
    check_answered(relay, request, leaving)


def test_a_row_rejected_for_another_reason_is_not_retried(relay, old_engine, make_engine):
    request = submit(relay)
    new = make_engine()
    old_engine.next().fail(RequestError(ErrorCode.UNAVAILABLE, "later"))
    assert request.next() == ("UNAVAILABLE: later", True)
    start_rejecting(old_engine)
    check_received_nothing(relay, new)


def test_unanswered_rows_of_a_dead_engine_move_to_the_next(relay, old_engine, make_engine):
    requests = [submit(relay), submit(relay, **TWO_ROWS)]
    for _ in range(3):
        old_engine.next()
    new = make_engine()
    old_engine.stop(seconds=0)
    channels = [new.next() for _ in range(3)]
    assert [one.received()[0]["text_input"].tolist() for one in channels] == [[b"x"], [b"x"], [b"y"]]
    for channel in channels:
        channel.send(response("a", "stop"), final=True)
    assert requests[0].next() == ([b"a"], True)
    assert [requests[1].next() for _ in range(2)] == [([b"a"], False), ([b"a"], True)]
    for request in requests:
        check_nothing_leaked(relay, request)


def test_an_answered_row_of_a_dead_engine_fails(relay, old_engine, make_engine):
    """Its rows that have not been answered are cancelled there."""
    request = submit(relay, **TWO_ROWS)
    old_engine.next().send(response("a"), final=False)
    old_engine.next()
    assert request.next() == ([b"a"], False)
    new = make_engine()
    old_engine.stop(seconds=0)
    assert request.next() == HAS_ENDED
    check_nothing_leaked(relay, request)
    check_received_nothing(relay, new)


def test_without_another_engine_the_first_error_is_reported(relay, old_engine):
    request = submit(relay)
    old_engine.next()
    start_rejecting(old_engine)
    refused = submit(relay)
    assert refused.next() == BEING_UNLOADED
    old_engine.stop(seconds=0)
    assert request.next() == HAS_ENDED
    check_nothing_leaked(relay, request)


def test_a_request_that_crashes_engines_is_retried_once(relay, old_engine, make_engine):
    request = submit(relay)
    old_engine.next()
    second = make_engine()
    old_engine.listener.close()
    second.next()
    third = make_engine()
    second.listener.close()
    assert request.next() == HAS_ENDED
    check_nothing_leaked(relay, request)
    check_received_nothing(relay, third)


def test_a_cancelled_row_is_not_retried(relay, old_engine, make_engine, held_retries):
    start_rejecting(old_engine)
    new = make_engine()
    request = submit(relay)
    assert held_retries.come.wait(WAIT)
    request.cancelled = True
    assert request.next() == ("CANCELLED: the request was cancelled by its client", True)
    held_retries.go.set()
    check_nothing_leaked(relay, request)
    check_received_nothing(relay, new)


def test_a_stopped_row_is_not_retried(relay, old_engine, make_engine, held_retries):
    start_rejecting(old_engine)
    new = make_engine()
    request = submit(relay, name="mine")
    assert held_retries.come.wait(WAIT)
    assert submit(relay, name="mine", stop=[[True]]).next()[1]
    held_retries.go.set()
    assert request.next() == BEING_UNLOADED
    check_nothing_leaked(relay, request)
    check_received_nothing(relay, new)


def test_a_failed_row_cancels_rows_on_other_engines(relay, old_engine, make_engine):
    request = submit(relay, **TWO_ROWS)
    channels = [old_engine.next(), old_engine.next()]
    new = make_engine()
    channels[0].fail(RequestError(ErrorCode.UNAVAILABLE, "being unloaded"), can_retry=True)
    moved = new.next()
    channels[1].fail(RequestError(ErrorCode.INTERNAL, "lost"))
    assert request.next() == ("INTERNAL: lost", True)
    until(moved.is_cancelled)


def test_rows_of_an_engine_that_dies_during_submission_move_once(relay, old_engine, make_engine, monkeypatch):
    new, send = make_engine(), Relay._send

    def end_between(self, row, frame):
        if row is row.job.rows[-1] and row.link.name == old_engine.listener.name:
            old_engine.stop(seconds=0)
            until(lambda: row.retry_error)
        send(self, row, frame)

    monkeypatch.setattr(Relay, "_send", end_between)
    check_answered(relay, submit(relay, **TWO_ROWS), new, num_rows=2)
    check_received_nothing(relay, new)


def test_a_row_that_cannot_be_retried_fails_and_others_continue(relay, old_engine, make_engine, monkeypatch):
    retry, fails = Relay._retry, iter([RuntimeError("broken"), None])

    def sometimes(self, row, error):
        if broken := next(fails):
            raise broken
        retry(self, row, error)

    monkeypatch.setattr(Relay, "_retry", sometimes)
    first = submit(relay)
    channel, new = old_engine.next(), make_engine()
    channel.fail(RequestError(ErrorCode.UNAVAILABLE, "being unloaded"), can_retry=True)
    assert first.next() == ("INTERNAL: RuntimeError: broken", True)
    start_rejecting(old_engine)
    check_answered(relay, submit(relay), new)
