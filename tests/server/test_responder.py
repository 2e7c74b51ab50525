"""The responder: batching of responses, cancellation, failures and their isolation."""

from dataclasses import replace

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import FinishReason, TokenDelta
from paged_backend.server import cancellation_poller
from tests.support.in_process import WAIT
from tests.support.service_calls import ask, finish
from tests.support.streams import Client, failing_once, step


def test_queued_tokens_are_sent_as_one_response(opened):
    responder, _, _ = opened
    client = Client(1)
    client.may_send.clear()
    responder.open(client.stream)
    responder.emit(step(1, "a"))
    assert client.sending.wait(WAIT)
    for text in "bcdé":
        responder.emit(step(1, text))
    client.may_send.set()
    assert client.got.get(timeout=WAIT) == ("a", None, False)
    assert client.got.get(timeout=WAIT) == ("bcdé", None, False)
    responder.emit(step(1, "f", FinishReason.LENGTH))
    assert client.got.get(timeout=WAIT) == ("f", None, True)


def test_a_non_streaming_response_is_detokenized_once(opened):
    responder, _, _ = opened
    client = Client(1, stream=False)
    responder.open(client.stream)
    for text in "abcdefgh":
        responder.emit(step(1, text))
    responder.emit(step(1, "i", FinishReason.LENGTH))
    assert client.got.get(timeout=WAIT) == ("abcdefghi", None, True)
    assert len(client.decoded) == 2  # the end of the prompt, and the whole output


def test_a_cancellation_is_detected_among_many_streams(opened):
    responder, _, aborted = opened
    clients = [Client(key) for key in range(100)]
    for client in clients:
        responder.open(client.stream)
    for key in (0, 37, 99):
        clients[key].cancelled = True
    assert {aborted.get(timeout=WAIT) for _ in range(3)} == {0, 37, 99}
    for key in (0, 37, 99):
        text, error, final = clients[key].got.get(timeout=WAIT)
        assert (text, final) == (None, True) and error.startswith("CANCELLED")
    for client in clients:
        client.cancelled = True
    assert {aborted.get(timeout=WAIT) for _ in range(97)} == set(range(100)) - {0, 37, 99}


def test_after_a_cancellation_the_next_batch_is_polled_at_once(opened, monkeypatch):
    """Without a cancellation the next batch would be polled after an hour."""
    monkeypatch.setattr(cancellation_poller, "SECONDS", 3600)
    responder, _, aborted = opened
    clients = [Client(key) for key in range(100)]
    clients[0].may_send.clear()
    for client in clients:
        client.cancelled = True
        responder.open(client.stream)
    clients[0].may_send.set()
    assert {aborted.get(timeout=WAIT) for _ in clients} == set(range(100))


def test_simultaneous_cancellations_are_counted_together(opened):
    """An update of a metric is a round trip to the server, too."""
    responder, metrics, _ = opened
    recorded = []
    for outcome in metrics._finished.values():
        (metric,) = outcome._metrics
        metric.increment = recorded.append
    clients = [Client(key) for key in range(96)]
    clients[0].may_send.clear()
    for client in clients:
        client.cancelled = True
        responder.open(client.stream)
    clients[0].may_send.set()
    for client in clients:
        client.got.get(timeout=WAIT)
    assert sum(recorded) == 96
    assert len(recorded) <= 12


@pytest.mark.parametrize("call", ["send", "is_cancelled"])
def test_an_unreachable_client_fails_only_its_own_request(opened, call):
    """Its request is aborted; others are answered in the same iteration and later."""
    responder, _, aborted = opened
    broken, other = Client(1), Client(2)
    failing_once(broken, call)
    for client in (broken, other):
        responder.open(client.stream)
    if call == "send":
        both = step(1, "a").deltas + step(2, "b").deltas
        responder.emit(replace(step(1, ""), deltas=both))
        assert other.got.get(timeout=WAIT) == ("b", None, False)
    assert broken.got.get(timeout=WAIT) == (
        None,
        "Error generating stream: INTERNAL: RuntimeError: the pipe broke",
        True,
    )
    assert aborted.get(timeout=WAIT) == 1
    responder.emit(step(2, "c", FinishReason.LENGTH))
    assert other.got.get(timeout=WAIT) == ("c", None, True)
    assert responder.alive and aborted.empty()


def test_an_internal_error_of_one_request_is_logged(opened, caplog):
    made, _, _ = opened
    for key, code in enumerate([ErrorCode.INTERNAL, ErrorCode.INVALID_ARGUMENT]):
        client = Client(key)
        made.open(client.stream)
        made.emit(replace(step(key, ""), deltas=(TokenDelta(key, error=RequestError(code, "no")),)))
        assert client.got.get(timeout=WAIT)[2]
    assert [record.getMessage() for record in caplog.records] == ["request 0: INTERNAL: no"]


def test_an_unexpected_responder_error_fails_no_stream(serve, gate, monkeypatch):
    service = serve()
    gate.open()
    fails = iter([True])

    def show(self, stats):
        if next(fails, False):
            raise RuntimeError("metrics are gone")

    monkeypatch.setattr("paged_backend.server.metrics.Metrics.update", show)
    assert finish(ask(service)) == ("length", 9)
    assert finish(ask(service)) == ("length", 9)
    assert service.ready
