"""Metrics: their declarations, when they are reported, and failing updates."""

import math
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from paged_backend.api.request import FinishReason
from paged_backend.engine.outputs import EngineDied, StepReport
from paged_backend.kv.stores.disk import DiskStore
from paged_backend.kv.stores.remote import RemoteStore, StoreError
from paged_backend.scheduling.stats import Stats
from paged_backend.server.metrics import metrics as metrics_module
from paged_backend.server.metrics.families import FAMILIES, token_buckets
from paged_backend.server.metrics.metrics import FLUSH_SECONDS, IDLE_FLUSH_SECONDS, Metrics
from tests.support.disk_blocks import FORMAT
from tests.support.in_process import WAIT
from tests.support.metric_families import RecordedFamilies
from tests.support.streams import STATS, Client, step
from tests.support.waiting import until

REPORT = StepReport(3, 40, replayed=True, schedule=0.5, launch=1.0, wait=2.0, commit=0.25)
EVENTS = {shows for family in FAMILIES.values() for shows in family.series.values() if isinstance(shows, str)}


@pytest.fixture
def families():
    return RecordedFamilies()


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        metrics_module, "time", SimpleNamespace(monotonic=lambda: made.now, time=lambda: 1e9 + made.now)
    )
    return made


def update_all(metrics):
    metrics.record(STATS)
    metrics.set("sessions", 1)
    metrics.count("finished", label="stop")
    metrics.count("prompt_tokens", 3)
    metrics.observe("request_n", 1)
    metrics.observe("inter_token_latency", 0.01, 30)
    metrics.add_step(REPORT)
    metrics.update()


def test_token_buckets_reach_max_model_len():
    assert token_buckets(256) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert token_buckets(5) == (1, 2, 5)


def test_every_declared_family_is_reported(families):
    """Those in bulk as three counters with the suffixes of a Prometheus histogram."""
    Metrics(families, {})
    bulk = {name for name, family in FAMILIES.items() if family.bulk}
    parts = {f"{name}_{suffix}" for name in bulk for suffix in ("bucket", "sum", "count")}
    assert bulk
    assert families.values.keys() == set(FAMILIES) - bulk | parts


def test_histograms_show_events_and_only_they_have_buckets():
    for family in FAMILIES.values():
        is_histogram = family.kind == "HISTOGRAM"
        assert not is_histogram or (set(family.series) == {""} <= {*family.series} and family.series[""] in EVENTS)
        assert is_histogram or not (family.buckets or family.bulk)
        assert bool(family.label) == (set(family.series) != {""})


def test_an_event_is_shown_by_all_of_its_families(families):
    metrics = Metrics(families, {})
    metrics.observe("queue_time", 0.25)
    metrics.count("generated_tokens", 7)
    metrics.flush()
    for name in ("paged_queue_time_seconds", "vllm:request_queue_time_seconds"):
        assert families.values[name] == {(): [0.25]}
    for name in ("paged_generation_tokens_total", "vllm:generation_tokens_total"):
        assert families.values[name] == {(): 7}


def test_statistics_are_reported_when_they_change(families, clock):
    metrics = Metrics(families, {})
    metrics.record(STATS.having(states_used=3, states_cached=4))
    metrics.update()
    assert families.values["paged_recurrent_states"] == {("used",): 3, ("cached",): 4}
    assert families.values["vllm:prefix_cache_hits_total"] == {(): STATS.cached_tokens}
    before = len(families.updates)
    metrics.record(STATS.having(states_used=4, states_cached=4, cached_tokens=7))
    metrics.update()
    assert families.values["vllm:prefix_cache_hits_total"] == {(): 7}
    assert {name for name, _ in families.updates[before:]} == {
        "paged_recurrent_states",
        "paged_prefix_cache_hit_tokens_total",
        "vllm:prefix_cache_hits_total",
    }


def test_stores_report_what_families_show_of_them(tmp_path):
    """An engine may lack a store, so that a wrong name would show 0."""
    shown = set()

    class Asked(Stats):
        def get(self, name):
            shown.add(name)
            return 0

    for family in FAMILIES.values():
        for read in family.series.values():
            if callable(read):
                read(Asked(**vars(STATS)))
    disk = DiskStore(tmp_path, "ab12", 10**6, FORMAT)
    remote = RemoteStore(Mock(connect=Mock(side_effect=StoreError("down"))), "ab12", FORMAT, budget=1, ttl=1)
    assert shown == disk.stats.keys() | remote.stats.keys()
    for store in (disk, remote):
        store.close()


def test_a_failing_metric_update_is_contained(caplog):
    """The responder's thread makes the updates; an error there would leave every client without an answer."""
    failing = Mock(side_effect=RuntimeError("no such metric"))
    pb_utils = Mock()
    pb_utils.MetricFamily.return_value.Metric.return_value = Mock(set=failing, increment=failing, observe=failing)
    update_all(Metrics(pb_utils, {}))
    assert failing.call_count > 4
    update_all(Metrics(Mock(), {}, memory=failing))
    assert "a metric could not be updated" in caplog.text
    assert "the memory in use could not be measured" in caplog.text


def test_no_metrics_on_a_server_without_metrics():
    """tritonserver --allow-metrics=false fails the first MetricFamily."""
    pb_utils = Mock()
    pb_utils.MetricFamily.side_effect = RuntimeError("metrics not supported")
    metrics = Metrics(pb_utils, {})
    update_all(metrics)
    assert pb_utils.MetricFamily.call_count == 1
    assert not metrics.is_pending


def test_disabled_metrics_are_not_created():
    pb_utils = Mock()
    metrics = Metrics(pb_utils, {}, enabled=False)
    update_all(metrics)
    assert not pb_utils.MetricFamily.called
    assert not metrics.is_pending


def test_metrics_are_flushed_before_the_final_response(opened):
    responder, families, _ = opened
    counted = SimpleQueue()
    client = Client(1)
    send = client.send

    def counting(response, flags):
        counted.put(families.values["paged_generation_tokens_total"].get(()))
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
    responder, families, _ = opened
    reported = SimpleQueue()
    monkeypatch.setattr(metrics_module, "IDLE_FLUSH_SECONDS", 0.0)
    first, second = Client(1), Client(2)
    send, counted = second.send, families.values["paged_inter_token_latency_seconds_count"]
    second.send = lambda response, flags: (reported.put(counted.get(())), send(response, flags))
    for client, text in ((first, "ab"), (second, "cde")):
        responder.open(client.stream)
        responder.emit(step(client.stream.request.key, text[0]))
        client.got.get(timeout=WAIT)
        responder.emit(step(client.stream.request.key, text[1:], FinishReason.LENGTH))
        client.got.get(timeout=WAIT)
    reported.get(timeout=WAIT)
    assert reported.get(timeout=WAIT) == 3


def test_metrics_show_the_last_step_without_open_streams(opened):
    """A stream is cancelled during its last step, so the engine emits nothing afterwards."""
    responder, families, aborted = opened
    running = families.values["vllm:num_requests_running"]
    client = Client(1)
    responder.open(client.stream)
    responder.emit(step(1, "a"))
    until(lambda: running == {(): 1})
    client.cancelled = True
    assert aborted.get(timeout=WAIT) == 1
    done = step(1, "b", FinishReason.LENGTH)
    responder.emit(replace(done, stats=done.stats.having(running=0)))
    until(lambda: running == {(): 0})


def test_a_dead_engine_reports_no_requests(opened):
    made, families, _ = opened
    client = Client(1)
    made.open(client.stream)
    busy = step(1, "a")
    made.emit(replace(busy, stats=busy.stats.having(running=1, waiting=2)))
    assert client.got.get(timeout=WAIT)[0] == "a"
    made.emit(EngineDied("it did"))
    assert client.got.get(timeout=WAIT)[2]
    made.stop()
    assert families.values["paged_requests"] == {("running",): 0, ("waiting",): 0}
    assert families.values["paged_kv_blocks"]["used",] == 2


def test_phases_sizes_and_graphs_of_steps_are_added_up(families):
    metrics = Metrics(families, {})
    metrics.add_step(REPORT)
    metrics.add_step(StepReport(1, 2, replayed=False, schedule=0.5, launch=0.5, wait=0.0, commit=0.5))
    metrics.flush()
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


def test_latencies_count_tokens(families):
    metrics = Metrics(families, {})
    metrics.observe("inter_token_latency", 0.01, 30)
    metrics.observe("inter_token_latency", 0.2)
    metrics.flush()
    for name in ("paged_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"):
        assert families.values[f"{name}_count"] == {(): 31}
        assert families.values[f"{name}_bucket"][("0.01",)] == 30


def test_reports_of_steps_have_a_minimum_distance(families, clock):
    metrics = Metrics(families, {})
    metrics.add_step(REPORT)
    metrics.flush()
    metrics.add_step(REPORT)
    clock.now += FLUSH_SECONDS / 2
    metrics.flush()
    assert metrics.is_pending
    assert families.values["paged_steps_total"] == {("yes",): 1}
    clock.now += FLUSH_SECONDS / 2
    metrics.flush()
    assert not metrics.is_pending
    assert families.values["paged_steps_total"] == {("yes",): 2}


def test_reports_of_an_idle_server_have_a_shorter_distance(families, clock):
    metrics = Metrics(families, {})
    for later in (0.0, 2 * IDLE_FLUSH_SECONDS, 0.5 * IDLE_FLUSH_SECONDS):
        clock.now += later
        metrics.add_step(REPORT)
        metrics.flush(idle=True)
    assert families.values["paged_steps_total"] == {("yes",): 2}


def test_buckets_sum_and_count_of_a_bulk_histogram_are_those_of_prometheus(families, clock):
    name, values = "paged_batch_size", [1, 1, 2, 3, 1024, 5000]
    metrics = Metrics(families, {})
    for part in (values[:3], values[3:]):
        for value in part:
            metrics.observe("batch_size", value)
        metrics.flush()
        clock.now += FLUSH_SECONDS
    bounds = [*FAMILIES[name].buckets, math.inf]
    buckets = families.values[f"{name}_bucket"]
    assert {float(le): value for (le,), value in buckets.items()} == {
        bound: sum(value <= bound for value in values) for bound in bounds
    }
    assert families.values[f"{name}_sum"] == {(): sum(values)}
    assert families.values[f"{name}_count"] == {(): len(values)}


def test_many_observations_of_a_value_are_one_update(families, clock):
    name, metrics = "paged_batch_size", Metrics(families, {})
    metrics.observe("batch_size", 2048, 1000)
    metrics.flush()
    assert families.values[f"{name}_bucket"][("+Inf",)] == families.values[f"{name}_count"][()] == 1000
    assert len(families.updates) == 3  # the last bucket, the sum and the count
    clock.now += FLUSH_SECONDS
    metrics.flush()
    assert len(families.updates) == 3
