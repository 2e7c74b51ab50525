"""The relay: rows to the engine and back, cancellation, and engines that are unloaded, crash or are replaced."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.limits import InputLimits
from paged_backend.server import local_socket
from paged_backend.server.wire.call import Call
from paged_backend.server.wire.write import SampleOutput, write_response
from paged_backend.trtllm.limits import RelayLimits
from paged_backend.trtllm.relay import Relay
from tests.support.in_process import WAIT
from tests.support.local_engine import Engine, ask, connected, use_socket_directory
from tests.support.pb_utils import PB_UTILS
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def socket_directory(tmp_path, monkeypatch):
    return use_socket_directory(tmp_path, monkeypatch)


@pytest.fixture
def engine():
    made = Engine()
    yield made
    made.listener.close()


TYPES = {"text_input": np.object_, "max_tokens": np.int32, "stream": np.bool_, "stop": np.bool_}


class Tensor:
    def __init__(self, name, value):
        self.name, self.as_numpy = lambda: name, lambda: value


class Request:
    """One of a client's of `ensemble`, from the server's side."""

    def __init__(self, name="", **tensors):
        self.got = SimpleQueue()
        made = {"text_input": [["x"]], "max_tokens": [[4]], "stream": [[True]]} | tensors
        self.tensors = [Tensor(key, np.array(value, TYPES[key])) for key, value in made.items()]
        self.cancelled = False
        self.timeout = self.correlation_id = self.flags = lambda: 0
        self.request_id, self.parameters = lambda: name, lambda: ""

    def inputs(self):
        return self.tensors

    def get_response_sender(self):
        return SimpleNamespace(send=self.send, is_cancelled=lambda: self.cancelled)

    def send(self, response, flags):
        tensors, error = response
        self.got.put((error.text if error else dict(tensors)["text_output"].tolist(), flags == 1))

    def next(self):
        return self.got.get(timeout=WAIT)


@pytest.fixture
def relay(request):
    """With the limits that a test gives it."""
    made = Relay(
        SimpleNamespace(**vars(PB_UTILS)), "ensemble", "engine", limits=RelayLimits(**getattr(request, "param", {}))
    )
    yield made
    made.stop()


def answer(text, reason=None):
    call = Call("x", None, {}, True, False, True, False, False, False, timeout_us=0)
    return write_response(call, [SampleOutput(text, reason, ())], prompt_token_ids=())


def asked(relay, **tensors):
    made = Request(**tensors)
    relay.submit(made)
    return made


def test_an_unloaded_engine_is_reported(relay):
    assert asked(relay).next() == ("UNAVAILABLE: the engine's model, engine, is not loaded", True)


@pytest.mark.parametrize("relay", [{"max_open_rows": 1}], indirect=True)
def test_rows_beyond_max_open_rows_are_rejected(engine, relay):
    first = asked(relay)
    channel = engine.next()
    refusal = "UNAVAILABLE: 1 rows are open and 1 are added; at most 1 may be open (max_open_rows)"
    assert asked(relay).next() == (refusal, True)
    channel.send(answer("a", "stop"), final=True)
    assert first.next() == ([b"a"], True)
    until(lambda: not relay._rows)
    asked(relay)
    engine.next()


@pytest.mark.parametrize("relay", [{"max_frame_bytes": 100}], indirect=True)
def test_an_oversized_row_is_rejected(engine, relay):
    text, last = asked(relay).next()
    assert last and text.startswith("INVALID_ARGUMENT: the request is too large: a frame of ")
    assert text.endswith("; at most 100 can be sent (max_frame_bytes)")


def test_a_refused_connection_reports_the_reason(relay):
    engine = Engine(input_limits=InputLimits(max_local_connections=1))
    first = connected()
    ask(first)
    engine.next()
    for _ in range(3):  # whatever comes first, the request or the refusal
        assert asked(relay).next() == (
            "UNAVAILABLE: the engine's model refused the connection: 1 connections are open, which is"
            " max_local_connections",
            True,
        )
    first.close()
    engine.listener.close()


def test_an_engine_can_be_unloaded_and_reloaded(relay):
    first = Engine()
    request = asked(relay)
    first.next().send(answer("a"), final=False)
    assert request.next() == ([b"a"], False)
    first.listener.close()
    assert request.next() == ("UNAVAILABLE: the engine's model was unloaded, or has ended", True)
    local_socket.remove(first.listener._name)
    assert asked(relay).next()[0].endswith("is not loaded")
    second = Engine()
    request = asked(relay)
    second.next().send(answer("b", "stop"), final=True)
    assert request.next() == ([b"b"], True)
    second.stop()


def test_an_unloading_engine_finishes_open_requests(relay):
    old = Engine()
    request = asked(relay)
    channel = old.next()
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(old.stop)
        until(lambda: not local_socket.find("engine"))
        new = Engine()
        channel.send(answer("a", "stop"), final=True)
        assert request.next() == ([b"a"], True)
        leaving.result(WAIT)
    request = asked(relay)
    new.next().send(answer("b", "stop"), final=True)
    assert request.next() == ([b"b"], True)
    new.stop()


def test_open_requests_fail_once_when_the_drain_time_is_over(relay):
    engine = Engine()
    request = asked(relay)
    channel = engine.next()
    engine.stop(seconds=0)
    assert request.next() == ("UNAVAILABLE: the engine's model was unloaded, or has ended", True)
    until(channel.is_cancelled)


def test_requests_are_balanced_over_instances(relay):
    engines = [Engine(), Engine()]
    requests = [asked(relay) for _ in range(4)]
    for engine in engines:
        for _ in range(2):
            engine.next().send(answer("a", "stop"), final=True)
    assert [one.next() for one in requests] == [([b"a"], True)] * 4
    for engine in engines:
        engine.stop()


def test_a_cancelled_client_or_failed_row_cancels_the_other_rows(relay, engine):
    rows = {"text_input": [["x"], ["y"]], "max_tokens": [[4], [4]], "stream": [[True], [True]]}
    request = asked(relay, **rows)
    channels = [engine.next(), engine.next()]
    channels[0].fail(RequestError(ErrorCode.INTERNAL, "lost"))
    assert request.next() == ("INTERNAL: lost", True)
    until(channels[1].is_cancelled)
    request = asked(relay, **rows)
    channels = [engine.next(), engine.next()]
    request.cancelled = True
    assert request.next() == ("CANCELLED: the request was cancelled by its client", True)
    for channel in channels:
        until(channel.is_cancelled)


def test_a_row_stopped_before_it_was_sent_is_stopped_afterwards(relay, engine, monkeypatch):
    send = Relay._send

    def after(self, row, frame):
        if not row.submitted:
            stop = asked(relay, name="mine", stop=[[True]])
            assert stop.next()[1]
            until(lambda: not relay._wake.is_set())  # the row updater has run
        send(self, row, frame)

    monkeypatch.setattr(Relay, "_send", after)
    asked(relay, name="mine")
    channel = engine.next()
    until(lambda: channel.stopped)


# --- a relay whose engine is replaced --------------------------------------------------------------------------------

BEING_UNLOADED = ("UNAVAILABLE: the engine's model is being unloaded", True)
HAS_ENDED = ("UNAVAILABLE: the engine's model was unloaded, or has ended", True)
TWO_ROWS = {"text_input": [["x"], ["y"]], "max_tokens": [[4], [4]], "stream": [[True], [True]]}


@pytest.fixture
def old(relay):
    """An engine that the relay has a link to, which comes first where another has no more to do."""
    made = Engine()
    answered(relay, asked(relay), made)
    yield made
    with suppress(OSError):  # it has been closed
        made.listener.close()


@pytest.fixture
def make():
    """An engine that comes after it."""
    engines = []

    def another():
        engines.append(Engine())
        return engines[-1]

    yield another
    for one in engines:
        with suppress(OSError):
            one.listener.close()


def answered(relay, request, engine, num_rows=1):
    """By this engine, with nothing left behind."""
    for left in reversed(range(num_rows)):
        engine.next().send(answer("a", "stop"), final=True)
        assert request.next() == ([b"a"], left == 0)
    nothing_is_left(relay, request)


def nothing_is_left(relay, request):
    until(lambda: not relay._rows)
    assert all(link.num_open == 0 for link in relay._links._links.values())
    assert request.got.empty()


def got_nothing(relay, engine):
    """The first that it is asked comes now."""
    request = asked(relay, text_input=[["first"]])
    channel = engine.next()
    assert channel.received()[0]["text_input"].tolist() == [b"first"]
    channel.send(answer("a", "stop"), final=True)
    assert request.next() == ([b"a"], True)


def refuse(engine):
    """What comes, as between the beginning of its end and the time when others hear of it."""
    engine.listener._unloading = True


@pytest.fixture
def held(monkeypatch):
    """What is to be asked again waits: `come` tells that it does, and `go` ends that."""
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
def test_a_row_refused_by_an_unloading_engine_moves_to_the_next(relay, old, make):
    refuse(old)
    new = make()
    answered(relay, asked(relay), new)
    answered(relay, asked(relay, **TWO_ROWS), new, num_rows=2)


def test_a_row_is_retried_until_an_engine_accepts_it(relay, old, make):
    request, leaving = asked(relay), old
    for _ in range(3):
        channel, following = leaving.next(), make()
        channel.fail(RequestError(ErrorCode.UNAVAILABLE, "being unloaded"), can_retry=True)
        leaving = following
    answered(relay, request, leaving)


def test_a_row_rejected_for_another_reason_is_not_retried(relay, old, make):
    request = asked(relay)
    new = make()
    old.next().fail(RequestError(ErrorCode.UNAVAILABLE, "later"))
    assert request.next() == ("UNAVAILABLE: later", True)
    refuse(old)
    got_nothing(relay, new)


def test_unanswered_rows_of_a_dead_engine_move_to_the_next(relay, old, make):
    requests = [asked(relay), asked(relay, **TWO_ROWS)]
    for _ in range(3):
        old.next()
    new = make()
    old.stop(seconds=0)
    channels = [new.next() for _ in range(3)]
    assert [one.received()[0]["text_input"].tolist() for one in channels] == [[b"x"], [b"x"], [b"y"]]
    for channel in channels:
        channel.send(answer("a", "stop"), final=True)
    assert requests[0].next() == ([b"a"], True)
    assert [requests[1].next() for _ in range(2)] == [([b"a"], False), ([b"a"], True)]
    for request in requests:
        nothing_is_left(relay, request)


def test_an_answered_row_of_a_dead_engine_fails(relay, old, make):
    """With those rows of it that have no answer yet."""
    request = asked(relay, **TWO_ROWS)
    old.next().send(answer("a"), final=False)
    old.next()
    assert request.next() == ([b"a"], False)
    new = make()
    old.stop(seconds=0)
    assert request.next() == HAS_ENDED
    nothing_is_left(relay, request)
    got_nothing(relay, new)


def test_without_another_engine_the_first_error_is_reported(relay, old):
    request = asked(relay)
    old.next()
    refuse(old)
    refused = asked(relay)
    assert refused.next() == BEING_UNLOADED
    old.stop(seconds=0)
    assert request.next() == HAS_ENDED
    nothing_is_left(relay, request)


def test_a_request_that_crashes_engines_is_retried_once(relay, old, make):
    request = asked(relay)
    old.next()
    second = make()
    old.listener.close()
    second.next()
    third = make()
    second.listener.close()
    assert request.next() == HAS_ENDED
    nothing_is_left(relay, request)
    got_nothing(relay, third)


def test_a_cancelled_row_is_not_retried(relay, old, make, held):
    refuse(old)
    new = make()
    request = asked(relay)
    assert held.come.wait(WAIT)
    request.cancelled = True
    assert request.next() == ("CANCELLED: the request was cancelled by its client", True)
    held.go.set()
    nothing_is_left(relay, request)
    got_nothing(relay, new)


def test_a_stopped_row_is_not_retried(relay, old, make, held):
    refuse(old)
    new = make()
    request = asked(relay, name="mine")
    assert held.come.wait(WAIT)
    assert asked(relay, name="mine", stop=[[True]]).next()[1]
    held.go.set()
    assert request.next() == BEING_UNLOADED
    nothing_is_left(relay, request)
    got_nothing(relay, new)


def test_a_failed_row_cancels_rows_on_other_engines(relay, old, make):
    request = asked(relay, **TWO_ROWS)
    channels = [old.next(), old.next()]
    new = make()
    channels[0].fail(RequestError(ErrorCode.UNAVAILABLE, "being unloaded"), can_retry=True)
    moved = new.next()
    channels[1].fail(RequestError(ErrorCode.INTERNAL, "lost"))
    assert request.next() == ("INTERNAL: lost", True)
    until(moved.is_cancelled)


def test_rows_of_an_engine_that_dies_during_submission_move_once(relay, old, make, monkeypatch):
    new, send = make(), Relay._send

    def end_between(self, row, frame):
        if row is row.job.rows[-1] and row.link.name == old.listener._name:
            old.stop(seconds=0)
            until(lambda: row.retry_error)
        send(self, row, frame)

    monkeypatch.setattr(Relay, "_send", end_between)
    answered(relay, asked(relay, **TWO_ROWS), new, num_rows=2)
    got_nothing(relay, new)


def test_a_row_that_cannot_be_retried_fails_and_others_continue(relay, old, make, monkeypatch):
    retry, fails = Relay._retry, iter([RuntimeError("broken"), None])

    def sometimes(self, row, error):
        if broken := next(fails):
            raise broken
        retry(self, row, error)

    monkeypatch.setattr(Relay, "_retry", sometimes)
    first = asked(relay)
    channel, new = old.next(), make()
    channel.fail(RequestError(ErrorCode.UNAVAILABLE, "being unloaded"), can_retry=True)
    assert first.next() == ("INTERNAL: RuntimeError: broken", True)
    refuse(old)
    answered(relay, asked(relay), new)
