"""The responder: batching of responses, cancellation, failures and their isolation, and metrics."""

import json
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import FinishReason, TokenDelta, TokenLogprob, Usage
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.outputs import EngineDied, StepOutput, UnknownRequests
from paged_backend.server import cancellation_poller
from paged_backend.server.cancellation_poller import PollResult
from paged_backend.server.messages import ClientsPolled
from paged_backend.server.metrics import Metrics
from paged_backend.server.responder import Responder
from paged_backend.server.sessions import SessionName, Sessions
from paged_backend.server.tenants import Tenants
from tests.support.gated_service import ask, finish
from tests.support.in_process import WAIT
from tests.support.pb_utils import PB_UTILS, Sent
from tests.support.streams import STATS, TOKENIZER, Client

NAME = SessionName("", 7)


@pytest.fixture
def tenants():
    return Tenants(0)


@pytest.fixture
def opened(tenants):
    """Return (responder, metrics, keys of aborted requests)."""
    metrics, aborted = Metrics(PB_UTILS, {}), SimpleQueue()
    engine = {"abort": aborted.put, "end": lambda key, index: aborted.put(key), "end_all": aborted.put}
    engine |= {"report_unknown": lambda keys: None, "busy_seconds": 0.0}
    made = Responder(SimpleNamespace(**engine), metrics, Sessions(60, 1, print), tenants)
    made.start()
    yield made, metrics, aborted
    made.stop()


def step(key, text, finish=None):
    tokens = tuple(TOKENIZER.encode(text, add_special_tokens=False))
    return StepOutput((TokenDelta(key, tokens, finish),), STATS, 1.0)


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


def test_metrics_are_flushed_before_the_final_response(opened):
    responder, metrics, _ = opened
    counted = SimpleQueue()
    client = Client(1)
    send = client.send

    def counting(response, flags):
        counted.put(metrics.generated_tokens._metrics[0].value)
        send(response, flags)

    client.send = counting
    responder.open(client.stream)
    responder.emit(step(1, "abc"))
    client.got.get(timeout=WAIT)
    responder.emit(step(1, "de", FinishReason.LENGTH))
    client.got.get(timeout=WAIT)
    counted.get(timeout=WAIT)
    assert counted.get(timeout=WAIT) == 5


def test_metrics_show_the_last_step_without_open_streams(opened, monkeypatch):
    """A stream is cancelled during its last step, so the engine emits nothing afterwards."""
    responder, metrics, aborted = opened
    shown, show = SimpleQueue(), metrics.update
    monkeypatch.setattr(metrics, "update", lambda stats: (show(stats), shown.put(stats.running)))
    client = Client(1)
    responder.open(client.stream)
    responder.emit(step(1, "a"))
    assert shown.get(timeout=WAIT) == 1
    client.cancelled = True
    assert aborted.get(timeout=WAIT) == 1
    done = step(1, "b", FinishReason.LENGTH)
    responder.emit(replace(done, stats=replace(done.stats, running=0)))
    while shown.get(timeout=WAIT):
        pass


def test_tokens_after_a_stop_string_in_one_step_are_not_counted(opened):
    responder, metrics, aborted = opened
    client = Client(1, stop=["cd"])
    responder.open(client.stream)
    responder.emit(step(1, "abcdef"))
    assert client.got.get(timeout=WAIT) == ("ab", None, True)
    assert metrics.generated_tokens._metrics[0].value == client.stream.usage_receipt()["generated_tokens"] == 4
    assert aborted.get(timeout=WAIT) == 1


class LogprobsClient(Client):
    """A client that asks for logprobs. `got` has (their tokens, cumulative logprob, whether it was final)."""

    def __init__(self, key, stop=()):
        super().__init__(key, stop=stop)
        asked = SamplingParams(max_tokens=99, logprobs=0)
        self.stream.request = replace(self.stream.request, sampling=asked)
        self.stream.call = replace(self.stream.call, return_logprobs=True, return_cumulative_logprob=True)

    def send(self, response, flags):
        self.sending.set()
        assert self.may_send.wait(WAIT)
        tensors = dict(response[0])
        tokens = [int(token) for entries in json.loads(tensors["logprobs"][0]) for token in entries]
        self.got.put((TOKENIZER.decode(tokens), tensors["cumulative_logprob"].tolist(), flags == 1))


def step_with_logprobs(key, text, finish=None):
    """Return a step whose tokens have a logprob of -0.5 each."""
    output = step(key, text, finish)
    (delta,) = output.deltas
    recorded = tuple((TokenLogprob(token, -0.5, 1),) for token in delta.token_ids)
    return replace(output, deltas=(delta._replace(logprobs=recorded),))


def test_responses_have_their_own_logprobs_and_the_cumulative_sum(opened):
    responder, _, _ = opened
    client = LogprobsClient(1)
    client.may_send.clear()
    responder.open(client.stream)
    responder.emit(step_with_logprobs(1, "a"))
    assert client.sending.wait(WAIT)
    for text in "bcd":
        responder.emit(step_with_logprobs(1, text))
    client.may_send.set()
    assert client.got.get(timeout=WAIT) == ("a", [-0.5], False)
    assert client.got.get(timeout=WAIT) == ("bcd", [-2.0], False)
    responder.emit(step_with_logprobs(1, "e", FinishReason.LENGTH))
    assert client.got.get(timeout=WAIT) == ("e", [-2.5], True)


def test_tokens_after_a_stop_string_have_no_logprobs(opened):
    """The tokens of the stop string itself count as output and have logprobs."""
    responder, _, _ = opened
    client = LogprobsClient(1, stop=["cd"])
    responder.open(client.stream)
    responder.emit(step_with_logprobs(1, "abcdef"))
    assert client.got.get(timeout=WAIT) == ("abcd", [-2.0], True)


class FailingClient(Client):
    """A client whose tokens cannot be decoded and whose sends fail; it begins its next turn during the first send."""

    def __init__(self, key, sessions):
        super().__init__(key, stop=["x"])
        self.sessions, self.next_turns = sessions, []
        sessions.begin(NAME, start=True, end=False).finish([1], "")
        self.stream.turn = sessions.begin(NAME, start=False, end=False)

    def decode(self, ids):
        raise ValueError("no text")

    def send(self, response, flags):
        if not self.next_turns:
            self.next_turns.append(self.sessions.begin(NAME, start=False, end=False))
        raise RuntimeError("no way back")


def test_a_session_is_released_once_when_sending_fails(opened):
    """Its next turn, which has begun by then, is not ended."""
    responder, _, aborted = opened
    sessions = Sessions(60, 1, print)
    broken, other = FailingClient(1, sessions), Client(2)
    for client in (broken, other):
        responder.open(client.stream)
    responder.emit(step(1, "a"))
    responder.emit(step(2, "b"))
    assert aborted.get(timeout=WAIT) == 1
    assert other.got.get(timeout=WAIT) == ("b", None, False)
    responder.emit(step(2, "c", FinishReason.LENGTH))
    assert other.got.get(timeout=WAIT) == ("c", None, True)
    assert len(broken.next_turns) == 1 and aborted.empty()
    with pytest.raises(RequestError, match="not answered yet"):
        sessions.begin(NAME, start=False, end=False)


def failing_once(client, name):
    """Make a method of the client raise when it is first called."""
    works = getattr(client, name)

    def fails(*_, **__):
        setattr(client, name, works)
        raise RuntimeError("the pipe broke")

    setattr(client, name, fails)


@pytest.mark.parametrize("call", ["send", "is_cancelled"])
def test_an_unreachable_client_fails_only_its_own_request(opened, call):
    """Its request is aborted; others are answered in the same turn and later."""
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


ENDS = {
    "answered": lambda responder, client: responder.emit(step(1, "a", FinishReason.LENGTH)),
    "rejected by the engine": lambda responder, client: responder.emit(
        replace(step(1, ""), deltas=(TokenDelta(1, error=RequestError(ErrorCode.INTERNAL, "no")),))
    ),
    "cancelled": lambda responder, client: setattr(client, "cancelled", True),
    "stop_request": lambda responder, client: responder.cancel(Sent().channel(), ""),
    "timeout": lambda responder, client: setattr(client.stream, "deadline", 0.0),
    "unknown to the engine": lambda responder, client: responder.emit(UnknownRequests((1,))),
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
def test_a_tenants_place_is_released_however_a_request_ends(opened, tenants, end):
    responder, _, _ = opened
    client = Client(1)
    responder.open(client.stream)
    assert len(tenants) == 1
    end(responder, client)
    while not client.got.get(timeout=WAIT)[2]:
        pass
    assert len(tenants) == 0


def test_a_receipt_excludes_preempted_time_from_every_phase():
    """Of 4 seconds between scheduling and the first token 2 were preempted, and 3 of the 5 after it."""
    stream = Client(1).stream
    stream.mark_scheduled(1.0)
    for when, waited in ((5.0, 2.0), (10.0, 5.0)):
        usage = Usage(*[0] * 6, preempted_seconds=waited)
        stream.take(step(1, "a").deltas[0]._replace(usage=usage), when)
    phases = {name: value for name, value in stream.usage_receipt().items() if name.endswith("_seconds")}
    assert phases == {"queued_seconds": 1, "prefill_seconds": 2, "decode_seconds": 2, "preempted_seconds": 5}


def blocked_client(responder, other):
    """Open a stream whose send blocks, beside `other`: messages until it is released are handled in one turn."""
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


def test_a_dead_engine_reports_no_requests(opened):
    made, metrics, _ = opened
    client = Client(1)
    made.open(client.stream)
    busy = step(1, "a")
    made.emit(replace(busy, stats=replace(busy.stats, running=1, waiting=2)))
    assert client.got.get(timeout=WAIT)[0] == "a"
    shown = []
    metrics.update = shown.append
    made.emit(EngineDied("it did"))
    assert client.got.get(timeout=WAIT)[2]
    made.stop()
    assert [(stats.running, stats.waiting, stats.blocks_used) for stats in shown[-1:]] == [(0, 0, 2)]


def test_an_internal_error_of_one_request_is_logged(opened, caplog):
    made, _, _ = opened
    for key, code in enumerate([ErrorCode.INTERNAL, ErrorCode.INVALID_ARGUMENT]):
        client = Client(key)
        made.open(client.stream)
        made.emit(replace(step(key, ""), deltas=(TokenDelta(key, error=RequestError(code, "no")),)))
        assert client.got.get(timeout=WAIT)[2]
    assert [record.getMessage() for record in caplog.records] == ["request 0: INTERNAL: no"]


def test_requests_after_the_engine_died_fail(opened):
    """They were admitted before it died."""
    made, _, _ = opened
    made.emit(EngineDied("it did"))
    late = Client(1)
    made.open(late.stream)
    assert late.got.get(timeout=WAIT) == (None, "Error generating stream: INTERNAL: it did", True)


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
