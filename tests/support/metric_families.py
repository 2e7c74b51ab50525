"""A stand-in for Triton's metric families that records values."""

from collections import defaultdict


class RecordedFamilies:
    """Pass it as `pb_utils`. `values` has the value of each series by family and by its label values, and `updates` all
    updates in order: (family, what was set, added or observed)."""

    def __init__(self):
        self.values = defaultdict(dict)
        self.updates = []
        outer = self

        class MetricFamily:
            GAUGE, COUNTER, HISTOGRAM = "GAUGE", "COUNTER", "HISTOGRAM"

            def __init__(self, *, name, description, kind):
                self.name = name
                outer.values[name]

            def Metric(self, *, labels, buckets=None):
                return _Series(outer, self.name, tuple(labels.values()))

        self.MetricFamily = MetricFamily


class _Series:
    def __init__(self, families, name, labels):
        self.families, self.name, self.labels = families, name, labels

    @property
    def values(self):
        return self.families.values[self.name]

    def increment(self, value):
        self.families.updates.append((self.name, value))
        self.values[self.labels] = self.values.get(self.labels, 0) + value

    def set(self, value):
        self.families.updates.append((self.name, value))
        self.values[self.labels] = value

    def observe(self, value):
        self.families.updates.append((self.name, value))
        self.values.setdefault(self.labels, []).append(value)
