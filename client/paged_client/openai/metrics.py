"""The metrics and the access log of the gateway."""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_client.types import Classification, Completion, Embedding

CLIENT_CLOSED_REQUEST = 499  # recorded for a request whose client disconnected before the response
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # histogram buckets


class Histogram:
    """A Prometheus histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(SECONDS, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        for limit, count in zip((*SECONDS, "+Inf"), accumulate(self._counts), strict=True):
            yield f'{name}_bucket{{{labels},le="{limit}"}} {count}'
        yield f"{name}_sum{{{labels}}} {self._sum}"
        yield f"{name}_count{{{labels}}} {sum(self._counts)}"


class Metrics:
    """The counters, gauges and histograms of the gateway."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._first: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._duration: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._prefills: Counter[str] = Counter()
        self._open_streams = 0

    def count_prefill(self, outcome: str) -> None:
        """Count a prompt that was sent to a prefill server. outcome: "stored" or "failed"."""
        self._prefills[outcome] += 1

    def count(self, route: str, status: int, first: float | None, seconds: float) -> None:
        """Count a finished request. `first` is its time to first byte; None if there was no response."""
        self._requests[route, status] += 1
        self._duration[route].add(seconds)
        if first is not None:
            self._first[route].add(first)

    def count_tokens(self, route: str, completions: Sequence[Completion]) -> None:
        for one in completions:
            self._tokens[route, "prompt"] += one.num_input_tokens
            self._tokens[route, "cached"] += _cached(one)
            self._tokens[route, "output"] += sum(sample.num_output_tokens for sample in (one, *one.others))

    def count_prompts(self, route: str, results: Sequence[Embedding | Classification]) -> None:
        self._tokens[route, "prompt"] += sum(one.num_input_tokens for one in results)
        self._tokens[route, "cached"] += sum(map(_cached, results))

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        self._open_streams += 1
        try:
            yield
        finally:
            self._open_streams -= 1

    def text(self) -> str:
        """Return all metrics in the Prometheus text format."""
        requests = [
            f'paged_openai_requests_total{{route="{route}",status="{status}"}} {count}'
            for (route, status), count in sorted(self._requests.items())
        ]
        tokens = [
            f'paged_openai_tokens_total{{route="{route}",kind="{kind}"}} {count}'
            for (route, kind), count in sorted(self._tokens.items())
        ]
        lines = [
            "# HELP paged_openai_requests_total Requests answered, by route and HTTP status; 499: cancelled",
            "# TYPE paged_openai_requests_total counter",
            *requests,
            "# HELP paged_openai_tokens_total Prompt tokens, cached prompt tokens, and output tokens",
            "# TYPE paged_openai_tokens_total counter",
            *tokens,
            "# HELP paged_openai_prefills_total Prompts sent to prefill servers, by outcome",
            "# TYPE paged_openai_prefills_total counter",
            *(f'paged_openai_prefills_total{{outcome="{name}"}} {count}' for name, count in self._prefills.items()),
            "# HELP paged_openai_open_streams Streams being sent",
            "# TYPE paged_openai_open_streams gauge",
            f"paged_openai_open_streams {self._open_streams}",
            *_histograms("paged_openai_first_byte_seconds", "Time to the first byte of a response", self._first),
            *_histograms("paged_openai_request_seconds", "Duration of a request", self._duration),
        ]
        return "\n".join(lines) + "\n"


def _cached(one: Completion | Embedding | Classification) -> int:
    return int(one.receipt["cached_tokens"]) if one.receipt else 0


def _histograms(name: str, help_text: str, by_route: Mapping[str, Histogram]) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} histogram"
    for route, histogram in sorted(by_route.items()):
        yield from histogram.lines(name, f'route="{route}"')


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
            # Only known routes become labels, so that clients cannot create new ones.
            self._metrics.count(getattr(scope.get("route"), "path_format", "other"), status, first, seconds)
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
