"""The metrics and the access log of the gateway."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import prometheus_client
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_client.openai.concurrency import READ
from paged_client.types import Classification, Completion, Embedding

MODEL = "paged.model"  # key of the model's name in the scope of a request
CLIENT_CLOSED_REQUEST = 499  # recorded for a request whose client disconnected before the response
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # histogram buckets

prometheus_client.disable_created_metrics()  # they would double the number of series


class Metrics:
    """The counters, gauges and histograms of a gateway."""

    def __init__(self) -> None:
        self.num_open = 0  # requests that the concurrency limit counts
        self._registry = all_of = prometheus_client.CollectorRegistry()
        self._requests = prometheus_client.Counter(
            "paged_openai_requests",
            "Requests answered, by route, model and HTTP status; 499: cancelled",
            ("route", "model", "status"),
            registry=all_of,
        )
        self._tokens = prometheus_client.Counter(
            "paged_openai_tokens",
            "Prompt tokens, cached prompt tokens, and output tokens",
            ("route", "model", "kind"),
            registry=all_of,
        )
        self._open_streams = prometheus_client.Gauge("paged_openai_open_streams", "Streams being sent", registry=all_of)
        self._first = _seconds("paged_openai_first_byte_seconds", "Time to the first byte of a response", all_of)
        self._duration = _seconds("paged_openai_request_seconds", "Duration of a request", all_of)

    def count(self, route: str, model: str, status: int, first: float | None, seconds: float) -> None:
        """Count a finished request.

        model: empty if none was chosen. first: its time to first byte; None if there was no response.
        """
        self._requests.labels(route, model, status).inc()
        self._duration.labels(route, model).observe(seconds)
        if first is not None:
            self._first.labels(route, model).observe(first)

    def count_tokens(self, route: str, model: str, completions: Sequence[Completion]) -> None:
        self.count_prompts(route, model, completions)
        output = sum(
            sample.num_output_tokens for completion in completions for sample in (completion, *completion.others)
        )
        self._tokens.labels(route, model, "output").inc(output)

    def count_prompts(self, route: str, model: str, results: Sequence[Completion | Embedding | Classification]) -> None:
        self._tokens.labels(route, model, "prompt").inc(sum(result.num_input_tokens for result in results))
        self._tokens.labels(route, model, "cached").inc(sum(map(_cached, results)))

    def open_stream(self) -> AbstractContextManager[None]:
        """Return a context in which a stream counts as open."""
        return self._open_streams.track_inprogress()

    def text(self) -> str:
        """Return all metrics in the Prometheus text format."""
        return prometheus_client.generate_latest(self._registry).decode()


def _seconds(name: str, description: str, registry: prometheus_client.CollectorRegistry) -> prometheus_client.Histogram:
    return prometheus_client.Histogram(name, description, ("route", "model"), buckets=SECONDS, registry=registry)


def _cached(result: Completion | Embedding | Classification) -> int:
    return int(result.receipt["cached_tokens"]) if result.receipt else 0


class RequestMetricsMiddleware:
    """ASGI middleware that counts each request when it ends, and writes it to the access log.

    Args:
        log: called with each line of the access log; None disables the log.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, log: Callable[[str], object] | None) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = time.perf_counter()
        is_limited = scope["method"] not in READ
        self._metrics.num_open += is_limited
        status, first, request_id = 500, None, ""  # values for a request that ends in an exception

        async def record_and_send(message: Message) -> None:
            nonlocal status, first, request_id
            if message["type"] == "http.response.start":
                status, first = message["status"], time.perf_counter() - started
                request_id = Headers(raw=message["headers"]).get("X-Request-Id", "")
            await send(message)

        try:
            await self._app(scope, receive, record_and_send)
        finally:
            seconds = time.perf_counter() - started
            self._metrics.num_open -= is_limited
            # Only known routes and models become labels: clients must not create new ones.
            route = getattr(scope.get("route"), "path_format", "other")
            self._metrics.count(route, scope.get(MODEL, ""), status, first, seconds)
            if self._log:
                self._log(_log_line(scope, status, seconds, request_id))


def _log_line(scope: Scope, status: int, seconds: float, request_id: str) -> str:
    """Return a line of JSON. It has no header but the request id, and so no API key; newlines in paths are escaped."""
    values = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": (scope.get("client") or [""])[0],
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(seconds, 4),
        "id": request_id,
    }
    return json.dumps(values)
