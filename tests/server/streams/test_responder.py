"""The responder: batching of responses, cancellation, failures and their isolation."""

import json
import logging
from dataclasses import replace

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import FinishReason, TokenDelta
from paged_backend.engine.outputs import EngineDied
from paged_backend.server.streams import polling
from paged_backend.server.streams.polling import PollResult
from paged_backend.server.streams.stream import Stream
from tests.support.callers import Caller
from tests.support.in_process import WAIT
from tests.support.pb_utils import Sent
from tests.support.service_calls import (
    RETURNED,
    ask,
    finish,
    outcomes,
)
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
    monkeypatch.setattr(polling, "SECONDS", 3600)
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
    responder, families, _ = opened
    clients = [Client(key) for key in range(96)]
    clients[0].may_send.clear()
    for client in clients:
        client.cancelled = True
        responder.open(client.stream)
    clients[0].may_send.set()
    for client in clients:
        client.got.get(timeout=WAIT)
    recorded = [count for name, count in families.updates if name == "paged_requests_finished_total"]
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

    def show(self, *, idle):
        if next(fails, False):
            raise RuntimeError("metrics are gone")

    monkeypatch.setattr("paged_backend.server.metrics.metrics.Metrics.update", show)
    assert finish(ask(service)) == ("length", 9)
    assert finish(ask(service)) == ("length", 9)
    assert service.ready


def test_tokens_after_a_stop_string_in_one_step_are_not_counted(opened):
    responder, families, aborted = opened
    client = Client(1, stop=["cd"])
    responder.open(client.stream)
    responder.emit(step(1, "abcdef"))
    assert client.got.get(timeout=WAIT) == ("ab", None, True)
    generated = families.values["paged_generation_tokens_total"][()]
    assert generated == client.stream.usage_receipt()["generated_tokens"] == 4
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
    made._poller._report(PollResult([done.stream]))
    made.emit(step(1, "b", FinishReason.LENGTH))
    busy.may_send.set()
    assert done.got.get(timeout=WAIT) == ("b", None, True)
    made._poller._report(PollResult([done.stream], [done.stream], [(done.stream, RuntimeError("gone"))]))
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
        made._poller._report(PollResult([gone.stream]))
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
    responder, families, _ = opened
    client = Client(1)
    responder.open(client.stream)
    for text, when, ended in (("a", 1.0, None), ("b", 1.5, None), ("cd", 2.5, FinishReason.LENGTH)):
        responder.emit(replace(step(1, text, ended), finished_at=when))
    while not client.got.get(timeout=WAIT)[2]:
        pass
    responder.stop()
    name = "paged_inter_token_latency_seconds"
    assert families.values[f"{name}_sum"] == {(): 1.5} and families.values[f"{name}_count"] == {(): 3}
    assert families.values[f"{name}_bucket"]["0.5",] == 3


@pytest.mark.parametrize("streams", [True, False])
def test_a_response_larger_than_max_response_mib_fails(serve, gate, streams, monkeypatch):
    """Triton buffers what a client does not read. 1,680 tokens with 20 logprobs each are 2 MB."""
    ended = outcomes(monkeypatch)
    service = serve(max_response_mib=1, num_gpu_blocks_override=512)
    gate.open()
    big = {"max_tokens": 240, "logprobs": 20, "n": 7, "temperature": 1, "ignore_eos": True}
    inputs = {"text_input": "abcd", "stream": streams, "return_logprobs": True, **RETURNED}
    caller = Caller(**inputs, sampling_parameters=json.dumps(big))
    service.submit(caller)
    error = None
    while error is None:
        _, error, last = caller.get(timeout=WAIT)
    assert last
    assert "UNAVAILABLE: its answer is larger than max_response_mib=1" in error
    assert finish(ask(service)) == ("length", 9)
    assert ended == ["refused", "length"]


def test_a_request_rejected_by_the_engine_is_not_logged_as_an_internal_error(serve, gate, monkeypatch):
    """An example is an invalid grammar. The outcome `error` is for internal errors."""
    ended = outcomes(monkeypatch)
    service = serve()
    gate.open()
    bad = Caller(text_input="abcd", sampling_parameters='{"regex": "("}')
    service.submit(bad)
    assert "INVALID_ARGUMENT: regex" in bad.rejection()
    monkeypatch.setattr(Stream, "take", lambda self, delta, when: 1 / 0)
    assert "INTERNAL: ZeroDivisionError" in ask(service).answer()
    assert ended == ["refused", "error"]


def test_a_request_that_the_scheduler_has_lost_fails(serve, gate):
    """Simulates a bug by removing the request from the scheduler."""
    service = serve()
    scheduler = service._assembly.scheduler
    lost, kept = ask(service), ask(service, "efgh")
    gate.wait()
    scheduler.abort(0)
    gate.open()
    assert "INTERNAL: the engine has lost the request" in lost.answer()
    assert finish(kept) == ("length", 9)


def test_a_waiting_stream_gets_an_empty_first_response(serve, gate, clock):
    service = serve(first_response_ms=5000)
    parameters = {"max_tokens": 2, "prompt_logprobs": 1}
    caller = Caller(text_input="abcd", stream=True, sampling_parameters=json.dumps(parameters), **RETURNED)
    service.submit(caller)
    gate.wait()
    assert caller.empty()
    clock.ahead += 6
    outputs, error, last = caller.get(timeout=WAIT)
    assert (outputs["text_output"], outputs["num_output_tokens"], error, last) == ([b""], [0], None, False)
    assert "prompt_logprobs" not in outputs
    gate.open()
    rest = caller.all()
    assert ["prompt_logprobs" in part for part in rest] == [True] + [False] * (len(rest) - 1)
    assert sum(part["num_output_tokens"][0] for part in rest) == 2


def test_a_stream_with_an_early_token_gets_no_empty_response(serve, gate, clock):
    service = serve(first_response_ms=5000)
    gate.open()
    caller = Caller(text_input="abcd", stream=True, sampling_parameters='{"max_tokens": 2}', **RETURNED)
    service.submit(caller)
    assert all(part["num_output_tokens"][0] for part in caller.all())


ENDS = {
    "answered": lambda responder, client: responder.emit(step(1, "a", FinishReason.LENGTH)),
    "rejected by the engine": lambda responder, client: responder.emit(
        replace(step(1, ""), deltas=(TokenDelta(1, error=RequestError(ErrorCode.INTERNAL, "no")),))
    ),
    "cancelled": lambda responder, client: setattr(client, "cancelled", True),
    "stop_request": lambda responder, client: responder.cancel(Sent().channel(), ""),
    "timeout": lambda responder, client: setattr(client.stream, "deadline", 0.0),
    "engine died": lambda responder, client: responder.emit(EngineDied("it did")),
    "polling fails": lambda responder, client: failing_once(client, "is_cancelled"),
    "sending fails": lambda responder, client: (failing_once(client, "send"), responder.emit(step(1, "a"))),
    "sending the final response fails": lambda responder, client: (
        failing_once(client, "send"),
        responder.emit(step(1, "a", FinishReason.LENGTH)),
    ),
    "booking fails": lambda responder, client: (
        failing_once(client.stream, "take"),
        responder.emit(step(1, "a")),
    ),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_tenants_place_is_released_however_a_request_ends(opened, end):
    responder, _, _ = opened
    client = Client(1)
    responder.open(client.stream)
    assert responder.num_open(client.stream.tenant) == 1
    end(responder, client)
    while not client.got.get(timeout=WAIT)[2]:
        pass
    assert responder.num_open(client.stream.tenant) == 0
