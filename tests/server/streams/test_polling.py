"""Polling for cancellation: which requests, how often, and at what cost."""

from collections import Counter
from queue import SimpleQueue
from threading import Barrier, Event
from types import SimpleNamespace

import pytest

from paged_backend.server.streams import polling
from paged_backend.server.streams.polling import CancellationPoller, RoundTrips
from tests.support.in_process import WAIT
from tests.support.streams import Client
from tests.support.waiting import until


class LoggingClient(Client):
    """A client that logs each poll."""

    def __init__(self, key, log):
        super().__init__(key)
        self.log = log

    def is_cancelled(self):
        self.log(self.stream.request.key)
        return self.cancelled


def poller_of(clients, report=lambda found: None):
    made = CancellationPoller(lambda stream: not stream.channel.closed, report)
    for client in clients:
        made.add(client.stream)
    return made


def test_running_requests_are_polled_more_often_than_waiting_ones(monkeypatch):
    monkeypatch.setattr(polling, "BATCH", 2)
    monkeypatch.setattr(polling, "SECONDS", 0)
    asked, seen = Counter(), SimpleQueue()

    def log(key):
        asked[key] += 1
        if asked[0] == 30:
            seen.put(dict(asked))

    clients = [LoggingClient(key, log) for key in range(21)]
    made = poller_of(clients)
    clients[0].stream.scheduled_at = 1.0
    made.mark_running(clients[0].stream)
    made.start()
    others = seen.get(timeout=WAIT)
    made.stop()
    assert all(2 <= others[key] <= 4 for key in range(1, 21))  # in 30 rounds, two of the twenty in each


@pytest.mark.parametrize(("took", "rest"), [(0.0, 0.05), (0.02, 0.03), (0.2, 0.2)])
def test_the_poller_sleeps_at_least_as_long_as_it_polls(monkeypatch, took, rest):
    clock, rests, end = iter([0.0, took, 10.0, 10.0]), SimpleQueue(), Event()
    monkeypatch.setattr(polling, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    made = poller_of([Client(key) for key in range(3)])

    def wait(seconds):
        rests.put(seconds)
        end.wait(WAIT)

    made._stopping = SimpleNamespace(set=end.set, is_set=end.is_set, wait=wait)
    made.start()
    assert rests.get(timeout=WAIT) == pytest.approx(rest)
    made.stop()


def test_an_ended_request_is_not_polled():
    asked, found = Counter(), SimpleQueue()
    clients = [LoggingClient(key, lambda key: asked.update([key])) for key in range(2)]
    made = poller_of(clients, found.put)
    clients[0].stream.channel.closed = True
    clients[1].cancelled = True
    made.start()
    assert found.get(timeout=WAIT).cancelled == [clients[1].stream]
    made.stop()
    assert asked == {1: 1}


def test_a_request_that_starts_running_during_a_round_is_still_polled():
    """It has left the waiting queue but is not in the running queue yet."""
    found = SimpleQueue()
    client = Client(1)
    client.cancelled = True
    client.stream.scheduled_at = 1.0
    made = poller_of([client], found.put)
    made.start()
    until(lambda: not (made._waiting or made._added.is_set()))
    made.mark_running(client.stream)
    assert found.get(timeout=WAIT).cancelled == [client.stream]
    made.stop()


def test_a_failed_round_does_not_stop_the_poller(caplog):
    reported, clients = SimpleQueue(), [Client(key) for key in range(2)]

    def report(found):
        reported.put(found.cancelled)
        if found.cancelled == [clients[0].stream]:
            raise RuntimeError("it went wrong")

    made = poller_of(clients, report)
    made.start()
    for client in clients:
        client.cancelled = True
        assert reported.get(timeout=WAIT) == [client.stream]
    made.stop()
    assert "it went wrong" in caplog.text


def test_a_request_is_in_only_one_queue(monkeypatch):
    monkeypatch.setattr(polling, "SECONDS", 0)
    asked, enough = Counter(), Event()

    def log(key):
        asked[key] += 1
        if sum(asked.values()) == 40:
            enough.set()

    clients = [LoggingClient(key, log) for key in range(2)]
    made = poller_of(clients)
    clients[0].stream.scheduled_at = 1.0
    made.mark_running(clients[0].stream)
    made.start()
    assert enough.wait(WAIT)
    made.stop()
    assert abs(asked[0] - asked[1]) <= 1


@pytest.fixture
def round_trips():
    made = RoundTrips(threads=3, batch=4)
    yield made
    made.stop()


@pytest.mark.parametrize("count", [0, 1, 4, 5, 9, 100])
def test_each_item_is_handled_once_and_errors_stay_separate(round_trips, count):
    asked = Counter()

    def ask(item):
        asked[item] += 1
        if item % 3 == 0:
            raise ValueError(item)
        return item * 10

    answers = dict(round_trips.each(ask, range(count)))
    assert asked == Counter(range(count))
    assert answers.keys() == asked.keys()
    for item, answer in answers.items():
        assert isinstance(answer, ValueError) if item % 3 == 0 else answer == item * 10


def test_round_trips_run_concurrently(round_trips):
    """A single thread would wait forever for the others."""
    together = Barrier(4)
    answers = round_trips.each(lambda _: together.wait(WAIT), range(16))
    assert not any(isinstance(answer, Exception) for _, answer in answers)
