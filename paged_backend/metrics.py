"""Prometheus metrics, served by Triton at /metrics.

Each update is a round trip to the server process, so they are made on the responder's thread only, and gauges only
where they changed.
"""

from __future__ import annotations

from typing import Any

from paged_backend.scheduler import SchedulerStats

OUTCOMES = ("stop", "length", "timeout", "cancelled", "error", "refused")
_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300]


_BLOCK_STATES = ("total", "used", "free", "cached", "shared")


class Metrics:
    """The metrics of one model instance. `pb_utils` is the module that the server gives its Python models."""

    def __init__(self, pb_utils: Any, labels: dict[str, str]):
        self._pb_utils = pb_utils
        self._labels = labels
        self._families: dict[str, Any] = {}  # a family must outlive its metrics
        blocks = ("paged_kv_blocks", "GAUGE", "Blocks of the key/value pool, by state")
        requests = ("paged_requests", "GAUGE", "Requests in the engine, by state")
        ended = ("paged_requests_finished_total", "COUNTER", "Requests ended, by reason")
        self._gauges = {f"blocks_{state}": self._metric(*blocks, state=state) for state in _BLOCK_STATES}
        self._gauges |= {state: self._metric(*requests, state=state) for state in ("running", "waiting")}
        self._ended = {reason: self._metric(*ended, reason=reason) for reason in OUTCOMES}
        self.prompt_tokens = self._metric("paged_prompt_tokens_total", "COUNTER", "Prompt tokens of accepted requests")
        self.generated_tokens = self._metric("paged_generation_tokens_total", "COUNTER", "Tokens generated")
        counters = {
            "preemptions": ("paged_preemptions_total", "Requests sent back to the queue"),
            "cached_tokens": ("paged_prefix_cache_hit_tokens_total", "Prompt tokens found in the cache"),
            "evictions": ("paged_kv_evictions_total", "Cached blocks whose content made way"),
            "copies": ("paged_kv_copies_total", "Blocks copied on write"),
        }
        self._counters = {key: self._metric(name, "COUNTER", help) for key, (name, help) in counters.items()}
        self._counted = dict.fromkeys(counters, 0)
        self.time_to_first_token = self._histogram("paged_time_to_first_token_seconds", "Arrival to first token")
        self.time_per_output_token = self._histogram(
            "paged_time_per_output_token_seconds", "Mean time between a request's tokens after the first"
        )
        self.latency = self._histogram("paged_request_latency_seconds", "Arrival to last token")
        self._shown: dict[str, int] = {}

    def show(self, stats: SchedulerStats) -> None:
        """Bring the gauges up to date."""
        values = {
            "blocks_total": stats.blocks_total,
            "blocks_used": stats.blocks_used,
            "blocks_free": stats.blocks_total - stats.blocks_used - stats.blocks_cached,
            "blocks_cached": stats.blocks_cached,
            "blocks_shared": stats.blocks_shared,
            "running": stats.running,
            "waiting": stats.waiting,
        }
        for name, value in values.items():
            if self._shown.get(name) != value:
                self._gauges[name].set(value)
        self._shown = values
        for name, counter in self._counters.items():
            now = getattr(stats, name)
            if now > self._counted[name]:
                counter.increment(now - self._counted[name])
                self._counted[name] = now

    def ended(self, reason: str) -> None:
        self._ended[reason].increment(1)

    def _family(self, name: str, kind: str, help: str) -> Any:
        if name not in self._families:
            families = self._pb_utils.MetricFamily
            self._families[name] = families(name=name, description=help, kind=getattr(families, kind))
        return self._families[name]

    def _metric(self, name: str, kind: str, help: str, **labels: str) -> Any:
        return self._family(name, kind, help).Metric(labels=self._labels | labels)

    def _histogram(self, name: str, help: str) -> Any:
        return self._family(name, "HISTOGRAM", help).Metric(labels=self._labels, buckets=_SECONDS)
