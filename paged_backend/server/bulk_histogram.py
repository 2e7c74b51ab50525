"""Histograms of frequent values, such as the time between two tokens: every step observes many."""

from __future__ import annotations

from bisect import bisect_left

from paged_backend.server.metric_definitions import FAMILIES
from paged_backend.server.metric_factory import MetricFactory


class BulkHistogram:
    """A histogram that is observed here and reported later, for all observations at once.

    Triton's own histograms take one round trip to the server per observation. This one is reported as counters with
    the names and labels of a Prometheus histogram (`NAME_bucket` with the label `le`, `NAME_sum`, `NAME_count`), which
    queries cannot tell from a histogram.
    """

    def __init__(self, factory: MetricFactory, name: str):
        family = FAMILIES[name]
        self._bounds = factory.buckets(family)
        self._buckets = [
            factory.part(family, "_bucket", {"le": bound}) for bound in (*map(_format, self._bounds), "+Inf")
        ]
        self._total = factory.part(family, "_sum")
        self._count = factory.part(family, "_count")
        self._pending = [0] * len(self._buckets)  # observations not reported yet, by the first bucket that holds them
        self._pending_sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of the same value; `flush` reports them."""
        self._pending[bisect_left(self._bounds, value)] += count
        self._pending_sum += value * count

    def flush(self) -> None:
        """Report all observations since the last call."""
        observed = 0
        for bucket, new in zip(self._buckets, self._pending, strict=True):
            observed += new
            if observed:
                bucket.increment(observed)
        if observed:
            self._total.increment(self._pending_sum)
            self._count.increment(observed)
        self._pending = [0] * len(self._buckets)
        self._pending_sum = 0.0


def _format(bound: float) -> str:
    """Return a bucket's bound as Prometheus writes it."""
    return f"{bound:g}"
