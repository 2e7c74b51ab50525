"""Prometheus metrics, served by Triton at /metrics. Their names and descriptions are in metric_definitions.py.

An update is a round trip to the server process, so only the responder's thread makes updates, and gauges are updated
only when they change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.server.metric_definitions import OUTCOMES
from paged_backend.server.metric_factory import Metric, MetricFactory
from paged_backend.server.metric_series import COUNTERS, GAUGES
from paged_backend.server.step_metrics import StepMetrics
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
