"""Histograms that are reported as counters."""

import math

from paged_backend.server.bulk_histogram import BulkHistogram
from paged_backend.server.metric_definitions import FAMILIES
from tests.support.metric_families import RecordedFamilies, factory

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
