"""A receiver of OpenTelemetry traces: OTLP over HTTP, as JSON or protobuf."""

from __future__ import annotations

import base64
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
    """The spans that arrived so far, and the types of the messages that they were in."""

    endpoint: str
    content_types: set[str] = field(default_factory=set)
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
            content_type = self.headers["Content-Type"]
            receiver.content_types.add(content_type)
            receiver.spans.extend(_spans_of_json(body) if "json" in content_type else _spans_of_protobuf(body))
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


def _spans_of_json(body: bytes) -> Iterator[Span]:
    return _spans(json.loads(body), str)


def _spans_of_protobuf(body: bytes) -> Iterator[Span]:
    """Yield the spans. Beside the server in the wheel, whose own spans are protobuf, nothing can decode them."""
    try:
        from google.protobuf.json_format import MessageToDict
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    except ImportError:
        return iter(())
    message = MessageToDict(ExportTraceServiceRequest.FromString(body))
    return _spans(message, lambda text: base64.b64decode(text).hex())


def _spans(message: dict[str, Any], identifier: Callable[[str], str]) -> Iterator[Span]:
    """Yield the spans of a message. identifier: from an id in the message to hexadecimal."""
    for resource in message["resourceSpans"]:
        service = _attributes(resource["resource"])["service.name"]
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield Span(
                    span["name"],
                    identifier(span["traceId"]),
                    identifier(span["spanId"]),
                    identifier(span.get("parentSpanId", "")),
                    int(span["startTimeUnixNano"]),
                    int(span["endTimeUnixNano"]),
                    span.get("status", {}).get("code") in (2, "STATUS_CODE_ERROR"),
                    _attributes(span),
                    service,
                )


def _attributes(owner: dict[str, Any]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in owner.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_value(one) for one in content.get("values", ())]
    return int(content) if kind == "intValue" else content
