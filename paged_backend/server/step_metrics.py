"""Metrics of steps: inter-token latency, batch size, and the time of each phase of a step.

They change with every step and every token, so they are added up here and reported at intervals.
"""

from __future__ import annotations

import math

from paged_backend.engine.outputs import StepReport
from paged_backend.server.bulk_histogram import BulkHistogram
from paged_backend.server.metric_definitions import STEP_PHASES
from paged_backend.server.metric_factory import MetricFactory

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
