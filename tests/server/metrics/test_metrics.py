"""Metrics: their declarations, when they are reported, and failing updates."""

import math
from dataclasses import replace
from queue import SimpleQueue
from unittest.mock import Mock

from paged_backend.api.request import FinishReason
from paged_backend.engine.outputs import EngineDied, StepReport
from paged_backend.server.metrics import metrics as metrics_module
from paged_backend.server.metrics.families import COUNTERS, FAMILIES, GAUGES, token_buckets
from paged_backend.server.metrics.metrics import FLUSH_SECONDS, IDLE_FLUSH_SECONDS, BulkHistogram, Metrics, StepMetrics
from tests.support.in_process import WAIT
from tests.support.metric_families import RecordedFamilies, factory
from tests.support.scheduler_stress import scheduler
from tests.support.streams import STATS, Client, step


def update_all(metrics):
    metrics.update(scheduler().stats)
    metrics.set_session_count(1)
    metrics.count_finished("stop")
    metrics.count_prompt_tokens(prompt_tokens=1)
    metrics.flush()
    metrics.observe_request(prompt=1, generated=1, n=1, seconds=1.0)


def test_a_failing_metric_update_is_contained(caplog):
    """The responder's thread makes the updates; an error there would leave every client without an answer."""
    failing = Mock(side_effect=RuntimeError("no such metric"))
    pb_utils = Mock()
    pb_utils.MetricFamily.return_value.Metric.return_value = Mock(set=failing, increment=failing, observe=failing)
    update_all(Metrics(pb_utils, {}))
    assert failing.call_count > 4
    update_all(Metrics(Mock(), {}, memory=failing))
    assert "a metric could not be updated" in caplog.text


def test_no_metrics_on_a_server_without_metrics():
    """tritonserver --allow-metrics=false fails the first MetricFamily."""
    pb_utils = Mock()
    pb_utils.MetricFamily.side_effect = RuntimeError("metrics not supported")
    update_all(Metrics(pb_utils, {}))
    assert pb_utils.MetricFamily.call_count == 1


def test_disabled_metrics_are_not_created():
    pb_utils = Mock()
    update_all(Metrics(pb_utils, {}, enabled=False))
    assert not pb_utils.MetricFamily.called


def test_token_buckets_reach_max_model_len():
    assert token_buckets(256) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert token_buckets(5) == (1, 2, 5)


def test_every_declared_family_is_reported():
    """Those in bulk as three counters with the suffixes of a Prometheus histogram."""
    pb_utils = Mock()
    Metrics(pb_utils, {})
    created = {call.kwargs["name"] for call in pb_utils.MetricFamily.call_args_list}
    bulk = {name.removesuffix("_bucket") for name in created if name.endswith("_bucket")}
    assert (
        created - {f"{name}_{suffix}" for name in bulk for suffix in ("bucket", "sum", "count")} == set(FAMILIES) - bulk
    )
    assert bulk < set(FAMILIES)


def test_series_belong_to_families_of_their_kind():
    for kind, series in (("GAUGE", GAUGES), ("COUNTER", COUNTERS)):
        assert {FAMILIES[one.family].kind for one in series} == {kind}


def test_state_slots():
    stats = replace(
        STATS,
        state_slots_total=9,
        state_slots_used=3,
        state_checkpoints=4,
        host_state_slots_total=5,
        host_state_slots_used=1,
    )
    values = {(one.family, one.labels.get("state")): one.value(stats) for one in GAUGES}
    assert [values["paged_state_slots", state] for state in ("total", "used", "checkpoint", "free")] == [9, 3, 4, 2]
    assert [values["paged_host_state_slots", state] for state in ("total", "used")] == [5, 1]


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
    monkeypatch.setattr(metrics_module, "IDLE_FLUSH_SECONDS", 0.0)
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


REPORT = StepReport(3, 40, replayed=True, schedule=0.5, launch=1.0, wait=2.0, commit=0.25)


def test_phases_sizes_and_graphs_are_added_up():
    families = RecordedFamilies()
    metrics = StepMetrics(factory(families))
    metrics.add_step(REPORT)
    metrics.add_step(StepReport(1, 2, replayed=False, schedule=0.5, launch=0.5, wait=0.0, commit=0.5))
    metrics.flush(1e9)
    values = families.values
    assert values["paged_step_seconds_total"] == {
        ("schedule",): 1.0,
        ("launch",): 1.5,
        ("wait",): 2.0,
        ("commit",): 0.75,
    }
    assert values["paged_steps_total"] == {("yes",): 1, ("no",): 1}
    assert values["paged_batch_size_sum"] == {(): 4}
    assert values["paged_step_tokens_sum"] == values["vllm:iteration_tokens_total_sum"] == {(): 42}


def test_latencies_count_tokens():
    families = RecordedFamilies()
    metrics = StepMetrics(factory(families))
    metrics.add_latencies({0.01: 30, 0.2: 1})
    metrics.flush(1e9)
    for name in ("paged_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"):
        assert families.values[f"{name}_count"] == {(): 31}
        assert families.values[f"{name}_bucket"][("0.01",)] == 30


def test_reports_have_a_minimum_distance():
    families = RecordedFamilies()
    metrics = StepMetrics(factory(families))
    metrics.add_step(REPORT)
    metrics.flush(100.0)
    metrics.add_step(REPORT)
    metrics.flush(100.0 + FLUSH_SECONDS / 2)
    assert metrics.has_pending
    assert families.values["paged_steps_total"] == {("yes",): 1}
    metrics.flush(100.0 + FLUSH_SECONDS)
    assert not metrics.has_pending
    assert families.values["paged_steps_total"] == {("yes",): 2}


def test_reports_of_an_idle_server_have_a_shorter_distance():
    families = RecordedFamilies()
    metrics = StepMetrics(factory(families))
    for now in (100.0, 100.0 + 2 * IDLE_FLUSH_SECONDS, 100.0 + 2.5 * IDLE_FLUSH_SECONDS):
        metrics.add_step(REPORT)
        metrics.flush(now, idle=True)
    assert families.values["paged_steps_total"] == {("yes",): 2}


def test_nothing_is_kept_without_metrics():
    families = RecordedFamilies()
    disabled = factory(families)
    disabled.enabled = False
    metrics = StepMetrics(disabled)
    metrics.add_step(REPORT)
    metrics.add_latencies({0.01: 1})
    assert not metrics.has_pending


NAME = "paged_batch_size"


def test_buckets_sum_and_count_are_those_of_a_prometheus_histogram():
    families = RecordedFamilies()
    histogram = BulkHistogram(factory(families), NAME)
    values = [1, 1, 2, 3, 1024, 5000]
    for value in values[:3]:
        histogram.observe(value)
    histogram.flush()
    histogram.observe(3)
    histogram.observe(1024)
    histogram.observe(5000)
    histogram.flush()
    bounds = [*FAMILIES[NAME].buckets, math.inf]
    buckets = families.values[f"{NAME}_bucket"]
    assert {float(le): value for (le,), value in buckets.items()} == {
        bound: sum(value <= bound for value in values) for bound in bounds
    }
    assert families.values[f"{NAME}_sum"] == {(): sum(values)}
    assert families.values[f"{NAME}_count"] == {(): len(values)}


def test_many_observations_of_a_value_are_one_update():
    families = RecordedFamilies()
    histogram = BulkHistogram(factory(families), NAME)
    histogram.observe(2048, 1000)
    histogram.flush()
    assert families.values[f"{NAME}_bucket"][("+Inf",)] == families.values[f"{NAME}_count"][()] == 1000
    assert families.updates == 3  # the last bucket, the sum and the count
    histogram.flush()
    assert families.updates == 3
