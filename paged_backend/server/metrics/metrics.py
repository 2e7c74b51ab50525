"""Prometheus metrics, served by Triton at /metrics. families.py declares them.

An update is a round trip to the server process, so only the responder's thread makes updates: gauges and counters of
the engine's statistics when their values have changed, at most every UPDATE_SECONDS while steps only add tokens, and
what changes with every step or token every FLUSH_SECONDS. All are up to date before a request's final response, so that
a client that reads the metrics after it sees its request counted.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paged_backend.engine.outputs import StepReport
from paged_backend.scheduling.stats import Stats
from paged_backend.server.metrics.families import FAMILIES, STEP_PHASES, Family, token_buckets
from paged_backend.utils.machine import MemoryUsage

log = logging.getLogger("paged_llm")

UPDATE_SECONDS = 0.1  # time between two updates, while steps only add tokens
# Time between two reports of steps, which take up to about 100 round trips: while requests run, and once none does.
FLUSH_SECONDS, IDLE_FLUSH_SECONDS = 1.0, 0.1
MEMORY_SECONDS = 1.0  # interval between measurements of the memory in use


class Metrics:
    """The metrics of one model instance.

    `count`, `observe` and `set` take the name of an event in FAMILIES. If its family has a label, `label` is its value.

    Does nothing if metrics are not `enabled`, or if the server was started without metrics.
    """

    def __init__(
        self,
        pb_utils: Any,
        labels: Mapping[str, str],
        *,
        max_model_len: int = 1,
        memory: Callable[[], MemoryUsage] = lambda: MemoryUsage(0, 0, 0),
        add_stats: Callable[[Stats], Stats] = lambda stats: stats,
        enabled: bool = True,
    ):
        """pb_utils: the module `triton_python_backend_utils`.
        labels: labels of every metric.
        max_model_len: bounds the buckets of token counts.
        memory: measures the memory in use.
        add_stats: adds the statistics of other engines to this process's engine's.
        enabled: whether to report metrics."""
        self._pb_utils = pb_utils
        self._labels = dict(labels)
        self._token_buckets = token_buckets(max_model_len)
        self._measure_memory = memory
        self._add_stats = add_stats
        self._created: dict[str, Any] = {}  # families of the server, which deletes the metrics of one that is dropped
        self._statistics: list[_Statistic] = []
        self._events: dict[tuple[str, str], list[Any]] = {}  # the server's metrics by event and label
        self._bulk: dict[str, list[_BulkHistogram]] = {}  # by event
        self._enabled = enabled and self._server_has_metrics()
        if self._enabled:
            for family in FAMILIES.values():
                self._create(family)
        self._stats: Stats | None = None  # the newest statistics
        self._is_current = True  # whether the metrics show `_stats`
        self._steps, self._sleeping = -1, False  # in the statistics that were reported last
        self._gauges: dict[tuple[str, str], float] = {}  # values that were set last
        self._counts: dict[tuple[str, str], float] = {}  # counts that were not reported yet
        self._observations: list[tuple[str, float]] = []  # observations that were not reported yet, by event
        self._step_reports: list[StepReport] = []  # steps that were not reported yet
        self._bulk_pending = False  # whether a bulk histogram has observations that were not reported yet
        self._next_memory = 0.0  # time.monotonic(), like the times below
        self._last_bulk = -math.inf
        self.next_update = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether `update` has something to report."""
        return not self._is_current or bool(
            self._counts or self._observations or self._step_reports or self._bulk_pending
        )

    def record(self, stats: Stats) -> None:
        """Take the newest statistics of the engine, which `update` reports."""
        self._stats, self._is_current = stats, False

    def record_others(self) -> None:
        """Record that the statistics of other engines have changed."""
        self._is_current = False

    def record_idle(self) -> None:
        """Record that no request runs or waits: the engine has died."""
        if self._stats:
            self.record(self._stats.idle())

    def add_step(self, report: StepReport) -> None:
        """Add a step, which is reported later."""
        if self._enabled:
            self._step_reports.append(report)

    def count(self, event: str, amount: float = 1, label: str = "") -> None:
        """Count events, which are reported by the next `flush`."""
        if self._enabled:
            key = event, label
            self._counts[key] = self._counts.get(key, 0) + amount

    def set(self, event: str, value: float, label: str = "") -> None:
        """Set a gauge, if it has another value."""
        key = event, label
        if self._gauges.get(key) != value:
            self._gauges[key] = value
            self._update("set", event, value, label)

    def observe(self, event: str, value: float, count: int = 1) -> None:
        """Observe a value for a histogram, which is reported by the next `flush`.

        count: how many observations have this value. Above 1 only for events that are reported in bulk.
        """
        if bulk := self._bulk.get(event):
            self._bulk_pending = True
            for histogram in bulk:
                histogram.observe(value, count)
        elif self._enabled:
            self._observations.append((event, value))

    def update(self, *, idle: bool = False) -> None:
        """Report everything that has changed. idle: whether no request runs."""
        self.next_update = time.monotonic() + UPDATE_SECONDS
        if self._stats and not self._is_current:
            self._show(self._add_stats(self._stats))
        self._is_current = True
        self.flush(idle=idle)

    def flush(self, *, idle: bool = False) -> None:
        """Report counts and observations since the last call, and from time to time the steps.

        idle: whether no request runs.
        """
        now = time.monotonic()
        if now - self._last_bulk >= (IDLE_FLUSH_SECONDS if idle else FLUSH_SECONDS):
            self._flush_steps(now)
        counts, self._counts = self._counts, {}
        for (event, label), count in counts.items():
            self._update("increment", event, count, label)
        observations, self._observations = self._observations, []
        for event, value in observations:
            self._update("observe", event, value)

    def _show(self, stats: Stats) -> None:
        """Report the statistics that have changed."""
        now = time.monotonic()
        for shown in self._statistics:
            value, reported = shown.read(stats), shown.reported
            if not shown.is_counter and value != reported:
                _update(shown.metric, "set", value)
                shown.reported = value
            elif shown.is_counter and value > (reported or 0):
                _update(shown.metric, "increment", value - (reported or 0))
                shown.reported = value
        if stats.steps != self._steps:
            self._steps = stats.steps
            self.set("step_time", int(time.time()), "timestamp")
        changed, self._sleeping = stats.sleeping != self._sleeping, stats.sleeping
        if self._enabled and (changed or now >= self._next_memory):
            self._next_memory = now + MEMORY_SECONDS
            self._report_memory()

    def _report_memory(self) -> None:
        try:
            usage = self._measure_memory()
        except Exception:
            log.exception("the memory in use could not be measured")
            return
        for kind, value in usage._asdict().items():
            self.set("memory", value, kind)

    def _flush_steps(self, now: float) -> None:
        """Report the steps and the bulk histograms."""
        reports, self._step_reports = self._step_reports, []
        if not reports and not self._bulk_pending:
            return
        self._last_bulk, self._bulk_pending = now, False
        for report in reports:
            self.observe("batch_size", report.num_seqs)
            self.observe("step_tokens", report.num_tokens)
        for phase in STEP_PHASES if reports else ():
            self.count("step_seconds", sum(getattr(report, phase) for report in reports), phase)
        replayed = sum(report.replayed for report in reports)
        for label, steps in (("yes", replayed), ("no", len(reports) - replayed)):
            if steps:
                self.count("steps", steps, label)
        for histograms in self._bulk.values():
            for histogram in histograms:
                histogram.flush()
        self._bulk_pending = False

    def _update(self, method: str, event: str, value: float, label: str = "") -> None:
        for metric in self._events[event, label] if self._enabled else ():
            _update(metric, method, value)

    def _server_has_metrics(self) -> bool:
        try:
            self._family(FAMILIES["paged_sessions"])
        except Exception as error:
            log.info("no metrics: %s", error)
            return False
        return True

    def _create(self, family: Family) -> None:
        """Create the series of a family, which are 0 until they are updated."""
        for value, shows in family.series.items():
            labels = dict(family.labels) | ({family.label: value} if family.label else {})
            if not isinstance(shows, str):
                self._statistics.append(_Statistic(shows, self._metric(family, labels), family.kind == "COUNTER"))
            elif family.bulk:
                self._bulk.setdefault(shows, []).append(self._bulk_histogram(family))
            else:
                self._events.setdefault((shows, value), []).append(self._metric(family, labels))

    def _bulk_histogram(self, family: Family) -> _BulkHistogram:
        bounds = family.buckets or self._token_buckets
        bucket, total, count = (
            family._replace(name=family.name + suffix, kind="COUNTER") for suffix in ("_bucket", "_sum", "_count")
        )
        buckets = [self._metric(bucket, {"le": bound}) for bound in (*(f"{bound:g}" for bound in bounds), "+Inf")]
        return _BulkHistogram(bounds, buckets, self._metric(total, {}), self._metric(count, {}))

    def _metric(self, family: Family, labels: Mapping[str, str]) -> Any:
        """Create a metric of the server."""
        created, labels = self._family(family), self._labels | dict(labels)
        if family.kind == "HISTOGRAM":
            return created.Metric(labels=labels, buckets=list(family.buckets or self._token_buckets))
        return created.Metric(labels=labels)

    def _family(self, family: Family) -> Any:
        if family.name not in self._created:
            create = self._pb_utils.MetricFamily
            self._created[family.name] = create(
                name=family.name, description=family.help, kind=getattr(create, family.kind)
            )
        return self._created[family.name]


@dataclass(eq=False, slots=True)
class _Statistic:
    """A gauge or a counter that shows a value of the scheduler's statistics."""

    read: Callable[[Stats], float]
    metric: Any
    is_counter: bool
    reported: float | None = None  # the value reported last


class _BulkHistogram:
    """A histogram that is observed here and reported later, for all observations at once.

    Triton's own histograms take one round trip to the server per observation. This one is reported as counters with
    the names and labels of a Prometheus histogram (`NAME_bucket` with the label `le`, `NAME_sum`, `NAME_count`), which
    queries cannot tell from a histogram.
    """

    def __init__(self, bounds: tuple[float, ...], buckets: list[Any], total: Any, count: Any):
        """bounds: upper bounds of all buckets but the last, which has no bound."""
        self._bounds, self._buckets, self._total, self._count = bounds, buckets, total, count
        self._pending = [0] * len(buckets)  # observations not reported yet, by the first bucket that holds them
        self._pending_sum = 0.0

    def observe(self, value: float, count: int) -> None:
        """Add `count` observations of the same value; `flush` reports them."""
        self._pending[bisect_left(self._bounds, value)] += count
        self._pending_sum += value * count

    def flush(self) -> None:
        """Report all observations since the last call."""
        observed = 0
        for bucket, new in zip(self._buckets, self._pending, strict=True):
            observed += new
            if observed:
                _update(bucket, "increment", observed)
        if observed:
            _update(self._total, "increment", self._pending_sum)
            _update(self._count, "increment", observed)
        self._pending = [0] * len(self._buckets)
        self._pending_sum = 0.0


def _update(metric: Any, method: str, value: float) -> None:
    """Update a metric of the server. Errors are logged, not raised: the responder must go on."""
    try:
        getattr(metric, method)(value)
    except Exception:
        log.exception("a metric could not be updated")
