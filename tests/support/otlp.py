"""A receiver of OpenTelemetry traces: OTLP over HTTP, decoded with OpenTelemetry's own message classes."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto_json.collector.trace.v1.trace_service import ExportTraceServiceRequest

from tests.support.waiting import until


@dataclass
class Span:
    """A received span. Ids are hexadecimal, times in nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    failed: bool
    attributes: dict[str, Any]
    service: str


@dataclass
class Receiver:
    """The spans that arrived so far."""

    endpoint: str
    spans: list[Span] = field(default_factory=list)

    def roots(self) -> list[Span]:
        """Return the spans of whole requests."""
        return [span for span in self.spans if "gen_ai.operation.name" in span.attributes]

    def request(self, index: int = 0) -> tuple[Span, list[Span]]:
        """Wait for a request's span. Return it with the spans of its phases, in the order in which they began."""
        until(lambda: len(self.roots()) > index, "the span of a request")
        root = self.roots()[index]
        phases = [span for span in self.spans if span.parent_id == root.span_id]
        return root, sorted(phases, key=lambda span: (span.began, span.ended))


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """Run a receiver on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if "json" in self.headers["Content-Type"]:  # the server's own spans are protobuf
                receiver.spans.extend(_spans(ExportTraceServiceRequest.from_dict(json.loads(body))))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _spans(request: Any) -> Iterator[Span]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex() if span.parent_span_id else "",
                    int(span.start_time_unix_nano),
                    int(span.end_time_unix_nano),
                    span.status is not None and span.status.code == 2,
                    _attributes(span.attributes),
                    service,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    if value.array_value is not None:
        return [_value(one) for one in value.array_value.values]
    kinds = (value.string_value, value.int_value, value.double_value, value.bool_value)
    return next(one for one in kinds if one is not None)
