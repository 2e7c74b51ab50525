"""A stand-in for Triton's metric families that records values."""

from collections import defaultdict

from paged_backend.server.metrics.metrics import MetricFactory


class RecordedFamilies:
    """Pass it as `pb_utils`. `values` has the value of each series by family and by its label values."""

    def __init__(self):
        self.values = defaultdict(dict)
        self.updates = 0
        outer = self

        class MetricFamily:
            GAUGE, COUNTER, HISTOGRAM = "GAUGE", "COUNTER", "HISTOGRAM"

            def __init__(self, *, name, description, kind):
                self.name = name

            def Metric(self, *, labels, buckets=None):
                return _Series(outer, outer.values[self.name], tuple(labels.values()))

        self.MetricFamily = MetricFamily


class _Series:
    def __init__(self, families, values, labels):
        self.families, self.values, self.labels = families, values, labels

    def increment(self, value):
        self.set(self.values.get(self.labels, 0) + value)

    def set(self, value):
        self.families.updates += 1
        self.values[self.labels] = value

    def observe(self, value):
        self.families.updates += 1
        self.values.setdefault(self.labels, []).append(value)


def factory(families):
    """Return a factory of metrics without labels of their own."""
    return MetricFactory(families, {}, max_model_len=1024, enabled=True)
