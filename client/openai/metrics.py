"""What the gateway counts, as Prometheus reads it."""

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

from client.types import Completion, Embedding

CLIENT_CLOSED_REQUEST = 499  # the status of a request whose client went away before its answer, which nobody receives
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # of histograms


class Histogram:
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
    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._first: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._whole: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._open_streams = 0

    def count(self, route: str, status: int, first: float | None, seconds: float) -> None:
        """A request has ended. first: seconds until the first byte of its answer; None: there was no answer."""
        self._requests[route, status] += 1
        self._whole[route].add(seconds)
        if first is not None:
            self._first[route].add(first)

    def count_tokens(self, route: str, completions: Sequence[Completion]) -> None:
        for one in completions:
            self._tokens[route, "prompt"] += one.num_input_tokens
            self._tokens[route, "cached"] += _cached(one)
            self._tokens[route, "output"] += sum(sample.num_output_tokens for sample in (one, *one.others))

    def count_embedded(self, route: str, embedded: Sequence[Embedding]) -> None:
        self._tokens[route, "prompt"] += sum(one.num_input_tokens for one in embedded)
        self._tokens[route, "cached"] += sum(map(_cached, embedded))

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        self._open_streams += 1
        try:
            yield
        finally:
            self._open_streams -= 1

    def text(self) -> str:
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
            "# HELP paged_openai_tokens_total Tokens of prompts, of them those found in the cache, and of answers",
            "# TYPE paged_openai_tokens_total counter",
            *tokens,
            "# HELP paged_openai_open_streams Streams that are being sent",
            "# TYPE paged_openai_open_streams gauge",
            f"paged_openai_open_streams {self._open_streams}",
            *_histograms("paged_openai_first_byte_seconds", "Until an answer began", self._first),
            *_histograms("paged_openai_request_seconds", "Until a request ended", self._whole),
        ]
        return "\n".join(lines) + "\n"


def _cached(one: Completion | Embedding) -> int:
    return int(one.receipt["cached_tokens"]) if one.receipt else 0


def _histograms(name: str, help_text: str, found: Mapping[str, Histogram]) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} histogram"
    for route, histogram in sorted(found.items()):
        yield from histogram.lines(name, f'route="{route}"')


class RequestMetricsMiddleware:
    """ASGI middleware that counts each request when it ends, and writes a line of it to the access log.

    Args:
        log: takes the lines; None: there is no log.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, log: Callable[[str], object] | None) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = time.perf_counter()
        status, first, answered_as = 500, None, ""  # what an exception becomes

        async def note(message: Message) -> None:
            nonlocal status, first, answered_as
            if message["type"] == "http.response.start":
                status, first = message["status"], time.perf_counter() - started
                answered_as = Headers(raw=message["headers"]).get("X-Request-Id", "")
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            seconds = time.perf_counter() - started
            # Of paths that there are, so that nobody can make labels at will.
            self._metrics.count(getattr(scope.get("route"), "path_format", "other"), status, first, seconds)
            if self._log:
                self._log(_line(scope, status, seconds, answered_as))


def _line(scope: Scope, status: int, seconds: float, request_id: str) -> str:
    """JSON, in which a path cannot begin another line. Of a request's headers only its id is in it, and so no key."""
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
