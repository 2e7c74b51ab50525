"""What steps report to the metrics."""

from paged_backend.engine.outputs import StepReport
from paged_backend.server.step_metrics import FLUSH_SECONDS, IDLE_FLUSH_SECONDS, StepMetrics
from tests.support.metric_families import RecordedFamilies, factory

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
