"""When the metrics are brought up to date."""

from dataclasses import replace
from queue import SimpleQueue

from paged_backend.api.request import FinishReason
from paged_backend.engine.outputs import EngineDied
from paged_backend.server import step_metrics
from tests.support.in_process import WAIT
from tests.support.streams import Client, step


def test_metrics_are_flushed_before_the_final_response(opened):
    responder, metrics, _ = opened
    counted = SimpleQueue()
    client = Client(1)
    send = client.send

    def counting(response, flags):
        counted.put(metrics.generated_tokens._metrics[0].value())
        send(response, flags)

    client.send = counting
    responder.open(client.stream)
    responder.emit(step(1, "abc"))
    client.got.get(timeout=WAIT)
    responder.emit(step(1, "de", FinishReason.LENGTH))
    client.got.get(timeout=WAIT)
    counted.get(timeout=WAIT)
    assert counted.get(timeout=WAIT) == 5


def test_token_times_are_complete_before_the_last_response(opened, monkeypatch):
    """Although they were reported a moment ago, and are reported once a second while requests run."""
    responder, metrics, _ = opened
    reported, last = SimpleQueue(), metrics.steps._latencies[-1]
    monkeypatch.setattr(step_metrics, "IDLE_FLUSH_SECONDS", 0.0)
    first, second = Client(1), Client(2)
    send = second.send
    second.send = lambda response, flags: (reported.put(sum(last._pending)), send(response, flags))
    for client, text in ((first, "ab"), (second, "cde")):
        responder.open(client.stream)
        responder.emit(step(client.stream.request.key, text[0]))
        client.got.get(timeout=WAIT)
        responder.emit(step(client.stream.request.key, text[1:], FinishReason.LENGTH))
        client.got.get(timeout=WAIT)
    reported.get(timeout=WAIT)
    assert reported.get(timeout=WAIT) == 0


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
