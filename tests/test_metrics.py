"""Metrics, on a server that has trouble with them."""

from unittest.mock import Mock

from paged_backend.metrics import Metrics
from tests.test_memory import scheduler


def test_a_metric_that_cannot_be_updated_stops_nobody(caplog):
    """Updates are made where answers are sent: an error there would leave every client without one."""
    failing = Mock(side_effect=RuntimeError("no such metric"))
    pb_utils = Mock()
    pb_utils.MetricFamily.return_value.Metric.return_value = Mock(set=failing, increment=failing, observe=failing)
    metrics = Metrics(pb_utils, {})
    metrics.show(scheduler().stats)
    metrics.show_sessions(1)
    metrics.ended("stop")
    metrics.prompt_tokens.increment(1)
    metrics.latency.observe(1.0)
    assert failing.call_count > 4
    assert "a metric could not be updated" in caplog.text
