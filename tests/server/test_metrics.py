"""Metrics with failing updates, on a server without metrics, and disabled."""

from unittest.mock import Mock

from paged_backend.server.metrics import Metrics
from tests.support.scheduler_stress import scheduler


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
