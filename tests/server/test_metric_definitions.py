"""The declarations of metrics."""

from unittest.mock import Mock

from paged_backend.server.metric_definitions import FAMILIES, token_buckets
from paged_backend.server.metrics import Metrics


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
