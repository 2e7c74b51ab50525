"""Decides when the server's metrics are updated."""

from __future__ import annotations

from collections.abc import Callable

from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.server.metrics import Metrics

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
