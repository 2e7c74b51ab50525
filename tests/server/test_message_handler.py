"""Messages of the engine and of other threads to the responder: their order, and a dead engine."""

import logging
from dataclasses import replace

from paged_backend.api.request import FinishReason
from paged_backend.engine.outputs import EngineDied
from paged_backend.server.cancellation_poller import PollResult
from paged_backend.server.messages import ClientsPolled
from tests.support.in_process import WAIT
from tests.support.pb_utils import Sent
from tests.support.streams import Client, step


def test_tokens_after_a_stop_string_in_one_step_are_not_counted(opened):
    responder, metrics, aborted = opened
    client = Client(1, stop=["cd"])
    responder.open(client.stream)
    responder.emit(step(1, "abcdef"))
    assert client.got.get(timeout=WAIT) == ("ab", None, True)
    assert metrics.generated_tokens._metrics[0].value() == client.stream.usage_receipt()["generated_tokens"] == 4
    assert aborted.get(timeout=WAIT) == 1


def blocked_client(responder, other):
    """Open a stream whose send blocks, beside `other`: messages until it is released are handled in one iteration."""
    busy = Client(0)
    busy.may_send.clear()
    for client in (busy, other):
        responder.open(client.stream)
    responder.emit(step(0, "a"))
    assert busy.sending.wait(WAIT)
    return busy


def test_a_finished_request_cannot_be_cancelled(opened):
    made, _, aborted = opened
    done, asked = Client(1), Sent()
    done.stream.call = replace(done.stream.call, request_id="done")
    busy = blocked_client(made, done)
    made.emit(step(1, "b", FinishReason.LENGTH))
    made.cancel(asked.channel(), "done")
    busy.may_send.set()
    assert done.got.get(timeout=WAIT) == ("b", None, True)
    tensors, error, final = asked.the_only()
    assert (tensors["num_stopped"].tolist(), error, final) == ([0], None, True)
    assert aborted.empty()


def test_a_result_that_was_already_finished_wins_over_a_cancellation(opened):
    made, _, aborted = opened
    done = Client(1)
    busy = blocked_client(made, done)
    made._inbox.put(ClientsPolled(PollResult([done.stream])))
    made.emit(step(1, "b", FinishReason.LENGTH))
    busy.may_send.set()
    assert done.got.get(timeout=WAIT) == ("b", None, True)
    made._inbox.put(ClientsPolled(PollResult([done.stream], [done.stream], [(done.stream, RuntimeError("gone"))])))
    made.emit(step(0, "c", FinishReason.LENGTH))
    while not busy.got.get(timeout=WAIT)[2]:
        pass
    assert aborted.empty() and done.got.empty()


def test_a_stream_reported_cancelled_twice_is_cancelled_once(opened, caplog):
    """It was scheduled while it was polled as a waiting request."""
    made, _, _ = opened
    gone = Client(1)
    busy = blocked_client(made, gone)
    for _ in range(2):
        made._inbox.put(ClientsPolled(PollResult([gone.stream])))
    busy.may_send.set()
    reason = "CANCELLED: the request was cancelled by its client"
    assert gone.got.get(timeout=WAIT) == (None, reason, True)
    assert not caplog.records


def test_requests_after_the_engine_died_fail(opened, caplog):
    """They were admitted before it died. The log has the line from which `paged serve` knows."""
    made, _, _ = opened
    made.emit(EngineDied("it did"))
    late = Client(1)
    made.open(late.stream)
    assert late.got.get(timeout=WAIT) == (None, "Error generating stream: INTERNAL: it did", True)
    assert caplog.record_tuples == [("paged_llm.failure", logging.ERROR, "it did")]


def test_inter_token_latency_is_counted_per_token_of_a_sample(opened):
    """The first token has none; tokens of one step share its time."""
    responder, metrics, _ = opened
    client, latencies = Client(1), []
    metrics.steps.add_latencies = lambda found: latencies.append(dict(found))
    responder.open(client.stream)
    for text, when, finish in (("a", 1.0, None), ("b", 1.5, None), ("cd", 2.5, FinishReason.LENGTH)):
        responder.emit(replace(step(1, text, finish), finished_at=when))
    while not client.got.get(timeout=WAIT)[2]:
        pass
    assert latencies == [{}, {0.5: 1}, {0.5: 2}]
