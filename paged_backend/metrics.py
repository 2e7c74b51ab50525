"""Prometheus metrics, served by Triton at /metrics.

Each update is a round trip to the server process, so they are made on the responder's thread only, and gauges only
where they changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paged_backend.scheduler import SchedulerStats

log = logging.getLogger("paged_llm")

OUTCOMES = ("stop", "length", "timeout", "cancelled", "error", "refused")
_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300]


class Gauge(NamedTuple):
    name: str
    help: str
    value: Callable[[SchedulerStats], float]
    labels: dict[str, str] = {}  # noqa: RUF012  never changed


class Counter(NamedTuple):
    field: str
    name: str
    help: str
    labels: dict[str, str] = {}  # noqa: RUF012  never changed


def _blocks(state: str, value: Callable[[SchedulerStats], float]) -> Gauge:
    return Gauge("paged_kv_blocks", "Blocks of the key/value pool, by state", value, {"state": state})


def _host_blocks(state: str, value: Callable[[SchedulerStats], float]) -> Gauge:
    return Gauge("paged_host_blocks", "Blocks of the host's pool, by state", value, {"state": state})


def _requests(state: str, value: Callable[[SchedulerStats], float]) -> Gauge:
    return Gauge("paged_requests", "Requests in the engine, by state", value, {"state": state})


def _trt_blocks(kind: str, value: Callable[[SchedulerStats], float]) -> Gauge:
    name = "nv_trt_llm_kv_cache_block_metrics"
    return Gauge(name, "KV cache block metrics, as TensorRT-LLM names them", value, {"kv_cache_block_type": kind})


GAUGES = (
    _blocks("total", lambda stats: stats.blocks_total),
    _blocks("used", lambda stats: stats.blocks_used),
    _blocks("free", lambda stats: stats.blocks_free),
    _blocks("cached", lambda stats: stats.blocks_cached),
    _blocks("shared", lambda stats: stats.blocks_shared),
    _blocks("pinned", lambda stats: stats.blocks_pinned),
    _host_blocks("total", lambda stats: stats.host_total),
    _host_blocks("used", lambda stats: stats.host_used),
    _host_blocks("cached", lambda stats: stats.host_cached),
    Gauge("paged_disk_tier_up", "1 while cached blocks are kept on disk", lambda stats: stats.disk_up),
    Gauge("paged_disk_blocks", "Blocks on disk", lambda stats: stats.disk_blocks),
    _requests("running", lambda stats: stats.running),
    _requests("waiting", lambda stats: stats.waiting),
    # The names that dashboards of other backends read.
    Gauge("vllm:num_requests_running", "Requests that compute", lambda stats: stats.running),
    Gauge("vllm:num_requests_waiting", "Requests that wait", lambda stats: stats.waiting),
    Gauge("vllm:kv_cache_usage_perc", "Share of the pool in use, 0 to 1", lambda stats: stats.usage),
    _trt_blocks("max", lambda stats: stats.blocks_total),
    _trt_blocks("used", lambda stats: stats.blocks_used),
    _trt_blocks("free", lambda stats: stats.blocks_total - stats.blocks_used),
    _trt_blocks("tokens_per", lambda stats: stats.block_size),
    _trt_blocks("reused", lambda stats: stats.cached_tokens // stats.block_size),
    _trt_blocks("fraction", lambda stats: stats.usage),
)
COUNTERS = (  # by the field of SchedulerStats
    Counter("recomputed", "paged_preemptions_total", "Requests sent back to the queue, by kind", {"kind": "recompute"}),
    Counter("swapped", "paged_preemptions_total", "Requests sent back to the queue, by kind", {"kind": "swap"}),
    Counter("cached_tokens", "paged_prefix_cache_hit_tokens_total", "Prompt tokens found in the cache"),
    Counter("host_tokens", "paged_host_cache_hit_tokens_total", "Of those, tokens that came from the host"),
    Counter("evictions", "paged_kv_evictions_total", "Cached blocks whose content made way"),
    Counter("copies", "paged_kv_copies_total", "Blocks copied on write"),
    Counter("moves_out", "paged_kv_swapped_blocks_total", "Blocks moved between device and host", {"direction": "out"}),
    Counter("moves_in", "paged_kv_swapped_blocks_total", "Blocks moved between device and host", {"direction": "in"}),
    Counter("disk_read", "paged_disk_blocks_read_total", "Blocks that came from disk"),
    Counter("disk_written", "paged_disk_blocks_written_total", "Blocks that went to disk"),
    Counter("guessed_tokens", "paged_guessed_tokens_total", "Guesses of tokens that were checked"),
    Counter("accepted_tokens", "paged_accepted_tokens_total", "Of those, the right ones"),
    # The names that dashboards of other backends read.
    Counter("preemptions", "vllm:num_preemptions_total", "Requests sent back to the queue"),
    Counter("cached_tokens", "vllm:prefix_cache_hits_total", "Tokens found in the cache"),
    Counter("queried_tokens", "vllm:prefix_cache_queries_total", "Tokens looked for in the cache"),
    Counter("guessed_tokens", "vllm:spec_decode_num_draft_tokens_total", "Guesses that were checked"),
    Counter("accepted_tokens", "vllm:spec_decode_num_accepted_tokens_total", "Guesses that were right"),
)


class Metric:
    """One of the server's, whose trouble is its own: the thread that updates it has answers to send."""

    def __init__(self, metric: Any):
        self._metric = metric

    def set(self, value: float) -> None:
        self._try(self._metric.set, value)

    def increment(self, value: float) -> None:
        self._try(self._metric.increment, value)

    def observe(self, value: float) -> None:
        self._try(self._metric.observe, value)

    def _try(self, update: Callable[[float], None], value: float) -> None:
        try:
            update(value)
        except Exception:
            log.exception("a metric could not be updated")


class Metrics:
    """The metrics of one model instance. `pb_utils` is the module that the server gives its Python models."""

    def __init__(self, pb_utils: Any, labels: dict[str, str]):
        self._pb_utils = pb_utils
        self._labels = labels
        self._families: dict[str, Any] = {}  # a family must outlive its metrics
        ended = ("paged_requests_finished_total", "COUNTER", "Requests ended, by reason")
        self._gauges = [self._metric(gauge.name, "GAUGE", gauge.help, gauge.labels) for gauge in GAUGES]
        self._shown: list[float | None] = [None] * len(GAUGES)
        self._counters = [self._metric(one.name, "COUNTER", one.help, one.labels) for one in COUNTERS]
        self._counted = [0] * len(COUNTERS)
        self._ended = {reason: self._metric(*ended, {"reason": reason}) for reason in OUTCOMES}
        self._sessions = self._metric("paged_sessions", "GAUGE", "Sessions that are open")
        self._shown_sessions = -1
        self.prompt_tokens = self._metric("paged_prompt_tokens_total", "COUNTER", "Prompt tokens of accepted requests")
        self.generated_tokens = self._metric("paged_generation_tokens_total", "COUNTER", "Tokens generated")
        self.time_to_first_token = self._histogram("paged_time_to_first_token_seconds", "Arrival to first token")
        self.time_per_output_token = self._histogram(
            "paged_time_per_output_token_seconds", "Mean time between a request's tokens after the first"
        )
        self.latency = self._histogram("paged_request_latency_seconds", "Arrival to last token")

    def show(self, stats: SchedulerStats) -> None:
        """Bring gauges and counters up to date, those that changed."""
        for index, gauge in enumerate(GAUGES):
            value = gauge.value(stats)
            if value != self._shown[index]:
                self._gauges[index].set(value)
                self._shown[index] = value
        for index, counter in enumerate(COUNTERS):
            now = getattr(stats, counter.field)
            if now > self._counted[index]:
                self._counters[index].increment(now - self._counted[index])
                self._counted[index] = now

    def show_sessions(self, count: int) -> None:
        if count != self._shown_sessions:
            self._sessions.set(count)
            self._shown_sessions = count

    def ended(self, reason: str) -> None:
        self._ended[reason].increment(1)

    def _family(self, name: str, kind: str, help: str) -> Any:
        if name not in self._families:
            families = self._pb_utils.MetricFamily
            self._families[name] = families(name=name, description=help, kind=getattr(families, kind))
        return self._families[name]

    def _metric(self, name: str, kind: str, help: str, labels: Mapping[str, str] = {}) -> Metric:
        return Metric(self._family(name, kind, help).Metric(labels=self._labels | dict(labels)))

    def _histogram(self, name: str, help: str) -> Metric:
        return Metric(self._family(name, "HISTOGRAM", help).Metric(labels=self._labels, buckets=_SECONDS))
