"""Creates the server's metrics through `pb_utils`. An update is a round trip to the server process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from paged_backend.server.metric_definitions import FAMILIES, NO_LABELS, Family, token_buckets

log = logging.getLogger("paged_llm")


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
