"""Prometheus metrics, served by Triton at /metrics. Their names and descriptions are in metric_definitions.py.

An update is a round trip to the server process, so only the responder's thread makes updates, and gauges are updated
only when they change.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from paged_backend.engine.outputs import StepReport
from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.server.metrics.families import (
    COUNTERS,
    FAMILIES,
    GAUGES,
    NO_LABELS,
    OUTCOMES,
    STEP_PHASES,
    Family,
    token_buckets,
)
from paged_backend.utils.machine import MemoryUsage
from paged_backend.utils.restarts import REASONS

log = logging.getLogger("paged_llm")

NO_RESTARTS: Mapping[str, int] = MappingProxyType(dict.fromkeys(REASONS, 0))
MEMORY_SECONDS = 1.0  # interval between measurements of the memory in use


class Metrics:
    """The metrics of one model instance.

    Updates do nothing if metrics are not `enabled`, or if the server was started without metrics.

    Args:
        pb_utils: the module `triton_python_backend_utils`.
        labels: labels of every metric.
        max_model_len: bounds the buckets of token counts.
        max_num_seqs: reported as the maximum number of requests.
        memory: measures the memory in use.
        restarts: restarts of the server before this one, by reason.
        enabled: whether to report metrics.
    """

    def __init__(
        self,
        pb_utils: Any,
        labels: dict[str, str],
        *,
        max_model_len: int = 1,
        max_num_seqs: int = 1,
        memory: Callable[[], MemoryUsage] = lambda: MemoryUsage(0, 0, 0),
        restarts: Mapping[str, int] = NO_RESTARTS,
        enabled: bool = True,
    ):
        factory = MetricFactory(pb_utils, labels, max_model_len=max_model_len, enabled=enabled)
        self._factory = factory  # kept because it holds the families, which must outlive their metrics
        self._enabled = factory.enabled
        self._gauges = [factory.metric(gauge.family, gauge.labels) for gauge in GAUGES]
        self._reported: list[float | None] = [None] * len(GAUGES)
        self._step_time = factory.metric("nv_trt_llm_general_metrics", {"general_type": "timestamp"})
        self._steps = -1
        self._memory_in_use = [
            [
                factory.metric("paged_memory_bytes", {"kind": kind}),
                factory.metric("nv_trt_llm_runtime_memory_metrics", {"memory_type": kind}),
            ]
            for kind in MemoryUsage._fields
        ]
        self._measure_memory, self._next_memory = memory, 0.0
        self._sleeping = False
        self._counters = [factory.metric(counter.family, counter.labels) for counter in COUNTERS]
        self._counted = [0.0] * len(COUNTERS)
        self._finished = {
            reason: factory.metric("paged_requests_finished_total", {"reason": reason}) for reason in OUTCOMES
        }
        self._moved = factory.metric("paged_migrated_requests_total")
        self._pending: dict[Metric, float] = {}  # counts that `flush` will report
        self._sessions = factory.metric("paged_sessions")
        self._session_count = -1
        factory.metric("nv_trt_llm_request_metrics", {"request_type": "max"}).set(max_num_seqs)
        for reason, count in restarts.items():
            factory.metric("paged_restarts_total", {"reason": reason}).increment(count)
        self.steps = StepMetrics(factory)
        self.prompt_tokens = factory.counter("paged_prompt_tokens_total", "vllm:prompt_tokens_total")
        self.generated_tokens = factory.counter("paged_generation_tokens_total", "vllm:generation_tokens_total")
        self.queue_time = factory.histogram("paged_queue_time_seconds", "vllm:request_queue_time_seconds")
        self.time_to_first_token = factory.histogram(
            "paged_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"
        )
        self.time_per_output_token = factory.histogram(
            "paged_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"
        )
        self.latency = factory.histogram("paged_request_latency_seconds", "vllm:e2e_request_latency_seconds")
        self.request_prompt = factory.histogram(
            "paged_request_prompt_tokens", "vllm:request_prompt_tokens", "nv_llm_input_token_len"
        )
        self.request_generated = factory.histogram(
            "paged_request_generation_tokens", "vllm:request_generation_tokens", "nv_llm_output_token_len"
        )
        self.request_n = factory.histogram("vllm:request_params_n")

    def update(self, stats: SchedulerStats) -> None:
        """Report the gauges and counters that have changed."""
        for index, gauge in enumerate(GAUGES):
            value = gauge.value(stats)
            if value != self._reported[index]:
                self._gauges[index].set(value)
                self._reported[index] = value
        for index, counter in enumerate(COUNTERS):
            count = counter.value(stats)
            if count > self._counted[index]:
                self._counters[index].increment(count - self._counted[index])
                self._counted[index] = count
        if stats.steps != self._steps:
            self._step_time.set(int(time.time()))
            self._steps = stats.steps
        changed, self._sleeping = stats.sleeping != self._sleeping, stats.sleeping
        if self._enabled and (changed or time.monotonic() >= self._next_memory):
            self._next_memory = time.monotonic() + MEMORY_SECONDS
            self._report_memory()

    def _report_memory(self) -> None:
        try:
            usage = self._measure_memory()
        except Exception:
            log.exception("the memory in use could not be measured")
            return
        for metrics, value in zip(self._memory_in_use, usage, strict=True):
            for metric in metrics:
                metric.set(value)

    def set_session_count(self, count: int) -> None:
        if count != self._session_count:
            self._sessions.set(count)
            self._session_count = count

    def count_prompt_tokens(self, prompt_tokens: int) -> None:
        """Count the prompt tokens of a request; `flush` reports them."""
        self._count(self.prompt_tokens, prompt_tokens)

    def count_generated_tokens(self, tokens: int) -> None:
        """Count generated tokens; `flush` reports them."""
        self._count(self.generated_tokens, tokens)

    def count_finished(self, reason: str) -> None:
        """Count a finished request by one of OUTCOMES; `flush` reports it."""
        self._count(self._finished[reason], 1)

    def count_moved(self, count: int) -> None:
        """Count requests that were moved to another instance; `flush` reports them."""
        self._count(self._moved, count)

    @property
    def has_pending(self) -> bool:
        """Whether there are counts to flush."""
        return bool(self._pending) or self.steps.has_pending

    def flush(self, *, idle: bool = False) -> None:
        """Report the counts since the last call, and from time to time the metrics of steps. idle: whether no request
        runs."""
        self.steps.flush(time.monotonic(), idle=idle)
        pending, self._pending = self._pending, {}
        for metric, count in pending.items():
            metric.increment(count)

    def _count(self, metric: Metric, count: float) -> None:
        self._pending[metric] = self._pending.get(metric, 0) + count

    def observe_request(self, *, prompt: int, generated: int, n: int, seconds: float) -> None:
        """Report a request that has generated tokens: its prompt tokens, the tokens of all samples, and its latency."""
        self.latency.observe(seconds)
        self.request_prompt.observe(prompt)
        self.request_generated.observe(generated)
        self.request_n.observe(n)


class Metric:
    """A value reported under any number of metric names. Errors are logged, not raised: the responder must go on."""

    def __init__(self, metrics: Iterable[Any]):
        self._metrics = tuple(metrics)

    def set(self, value: float) -> None:
        self._update("set", value)

    def increment(self, value: float) -> None:
        self._update("increment", value)

    def observe(self, value: float) -> None:
        self._update("observe", value)

    def _update(self, method: str, value: float) -> None:
        for metric in self._metrics:
            try:
                getattr(metric, method)(value)
            except Exception:
                log.exception("a metric could not be updated")


class MetricFactory:
    """Creates the metrics of one model instance.

    Keep it as long as its metrics: the server deletes the metrics of a family that is no longer referenced. They do
    nothing if they are not `enabled`, or if the server was started without metrics.

    Args:
        pb_utils: the module `triton_python_backend_utils`.
        labels: labels of every metric.
        max_model_len: bounds the buckets of token counts.
        enabled: whether to report metrics.
    """

    def __init__(self, pb_utils: Any, labels: Mapping[str, str], *, max_model_len: int, enabled: bool):
        self._pb_utils = pb_utils
        self._labels = dict(labels)
        self._families: dict[str, Any] = {}  # kept because a family must outlive its metrics
        self._tokens = token_buckets(max_model_len)
        self.enabled = enabled and self._server_has_metrics()

    def metric(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> Metric:
        """Create a gauge or a counter."""
        if not self.enabled:
            return Metric(())
        family = FAMILIES[name]
        return self._create(name, family.kind, family.help, labels)

    def histogram(self, *names: str) -> Metric:
        """Create one histogram that is reported under several names."""
        return Metric([self._histogram(FAMILIES[name]) for name in names] if self.enabled else ())

    def counter(self, *names: str) -> Metric:
        """Create one counter that is reported under several names."""
        return Metric([metric for name in names for metric in self.metric(name)._metrics])

    def part(self, family: Family, suffix: str, labels: Mapping[str, str] = NO_LABELS) -> Metric:
        """Create a counter for a part of a histogram: `_bucket`, `_sum` or `_count`."""
        if not self.enabled:
            return Metric(())
        return self._create(family.name + suffix, "COUNTER", family.help, dict(family.labels) | dict(labels))

    def buckets(self, family: Family) -> tuple[float, ...]:
        """Return the upper bounds of a histogram's buckets."""
        return family.buckets or self._tokens

    def _create(self, name: str, kind: str, description: str, labels: Mapping[str, str]) -> Metric:
        return Metric([self._family(name, kind, description).Metric(labels=self._labels | dict(labels))])

    def _histogram(self, family: Family) -> Any:
        created = self._family(family.name, family.kind, family.help)
        return created.Metric(labels=self._labels | dict(family.labels), buckets=list(self.buckets(family)))

    def _family(self, name: str, kind: str, description: str) -> Any:
        if name not in self._families:
            create = self._pb_utils.MetricFamily
            self._families[name] = create(name=name, description=description, kind=getattr(create, kind))
        return self._families[name]

    def _server_has_metrics(self) -> bool:
        family = FAMILIES["paged_sessions"]
        try:
            self._family(family.name, family.kind, family.help)
        except Exception as error:
            log.info("no metrics: %s", error)
            return False
        return True


# Time between two reports, which take up to about 100 round trips each: while requests run, and once none does.
FLUSH_SECONDS, IDLE_FLUSH_SECONDS = 1.0, 0.1


class StepMetrics:
    """Adds up what steps report. Used by the responder's thread only."""

    def __init__(self, factory: MetricFactory):
        self._latencies = [
            BulkHistogram(factory, name)
            for name in (
                "paged_inter_token_latency_seconds",
                "vllm:inter_token_latency_seconds",
                "vllm:time_per_output_token_seconds",
            )
        ]
        self._batch_size = BulkHistogram(factory, "paged_batch_size")
        self._step_tokens = [
            BulkHistogram(factory, name) for name in ("paged_step_tokens", "vllm:iteration_tokens_total")
        ]
        self._phases = {name: factory.metric("paged_step_seconds_total", {"phase": name}) for name in STEP_PHASES}
        self._steps = {
            True: factory.metric("paged_steps_total", {"cuda_graph": "yes"}),
            False: factory.metric("paged_steps_total", {"cuda_graph": "no"}),
        }
        self._enabled = factory.enabled
        self._reports: list[StepReport] = []
        self._has_latencies = False
        self._last_flush = -math.inf  # time.monotonic()

    @property
    def has_pending(self) -> bool:
        return bool(self._reports or self._has_latencies)

    def add_step(self, report: StepReport) -> None:
        """Add a step."""
        if self._enabled:
            self._reports.append(report)

    def add_latencies(self, latencies: dict[float, int]) -> None:
        """Add inter-token latencies in seconds, with the number of tokens that have each."""
        if not self._enabled:
            return
        self._has_latencies |= bool(latencies)
        for histogram in self._latencies:
            for seconds, tokens in latencies.items():
                histogram.observe(seconds, tokens)

    def flush(self, now: float, *, idle: bool = False) -> None:
        """Report everything that was added, if the last report is old enough. idle: whether no request runs."""
        if now - self._last_flush < (IDLE_FLUSH_SECONDS if idle else FLUSH_SECONDS) or not self.has_pending:
            return
        self._last_flush = now
        reports, self._reports, self._has_latencies = self._reports, [], False
        for report in reports:
            self._batch_size.observe(report.num_seqs)
            for histogram in self._step_tokens:
                histogram.observe(report.num_tokens)
        for name, phase in self._phases.items():
            if reports:
                phase.increment(sum(getattr(report, name) for report in reports))
        for replayed, counter in self._steps.items():
            if steps := sum(report.replayed is replayed for report in reports):
                counter.increment(steps)
        for histogram in (*self._latencies, self._batch_size, *self._step_tokens):
            histogram.flush()


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


UPDATE_SECONDS = 0.1  # time between two updates, while steps only add tokens


class MetricsUpdates:
    """Collects scheduler statistics and updates `Metrics` with the newest at intervals, because updates are slow."""

    def __init__(self, metrics: Metrics, add_stats: Callable[[SchedulerStats], SchedulerStats] = lambda stats: stats):
        """add_stats: adds the statistics of other engines to those of this process's."""
        self._metrics = metrics
        self._add_stats = add_stats
        self._stats: SchedulerStats | None = None  # the newest statistics
        self._is_current = True  # whether the metrics show `_stats`
        self.next_update = 0.0  # time.monotonic()

    @property
    def is_pending(self) -> bool:
        """Whether the metrics lack statistics or counts."""
        return not self._is_current or self._metrics.has_pending

    def record(self, stats: SchedulerStats) -> None:
        self._stats, self._is_current = stats, False

    def record_others(self) -> None:
        """Record that the statistics of other engines have changed."""
        self._is_current = False

    def record_idle(self) -> None:
        """Record that no request runs or waits: the engine has died."""
        if self._stats:
            self.record(self._stats.idle())

    def update(self, now: float, *, idle: bool = False) -> None:
        """Bring the metrics up to date. idle: whether no request runs.

        Called before a final response, so that a client that reads the metrics after it sees its request counted.
        """
        self.next_update = now + UPDATE_SECONDS
        if self._stats and not self._is_current:
            self._metrics.update(self._add_stats(self._stats))
        self._is_current = True
        self._metrics.flush(idle=idle)
