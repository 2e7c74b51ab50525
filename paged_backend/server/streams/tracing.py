"""OpenTelemetry traces: one span per request, with a span for each of its phases, exported over OTLP.

Attributes follow the semantic conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/).
Phases are recorded as plain times (`RequestTrace`); their spans are created when the request ends.
"""

from __future__ import annotations

import logging
import math
import os
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paged_backend.api.options import invalid_option
from paged_backend.api.secrets import redacted
from paged_backend.api.trace import Phase, RequestTrace
from paged_backend.server.streams.stream import Stream
from paged_backend.server.wire.call import Call

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("paged_llm")

SERVICE = "paged_llm"  # service.name, unless OTEL_SERVICE_NAME is set
PROVIDER = "paged_llm"  # gen_ai.provider.name
LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk")
MESSAGE_CHARS = 160  # maximum characters of a message
MESSAGE_SECONDS = 60.0  # time between two messages of OpenTelemetry in the log
FLUSH_MILLIS = 2000  # time to export the last spans when the model is unloaded


class Tracing:
    """Traces the requests of one model. Methods may be called from any thread."""

    def __init__(self, endpoint: str, *, model: str, sample_ratio: float = 1.0):
        """endpoint: URL that takes OTLP over HTTP, such as http://localhost:4318/v1/traces.
        model: name of the served model.
        sample_ratio: share of the requests to trace. A request with a parent is traced if its parent is.

        Raises ConfigError if OpenTelemetry is not installed.
        """
        self._model = model
        self._provider = _provider(endpoint, sample_ratio)
        self._tracer = self._provider.get_tracer("paged_backend")

    def begin(self, call: Call, arrived: float) -> RequestTrace | None:
        """Return a new trace of a request, or None if the request is not traced. arrived: time.monotonic()."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation, epoch = _operation(call), time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            TraceContextTextMapPropagator().extract(call.trace_context),
            SpanKind.SERVER,
            start_time=epoch + int(arrived * 1e9),
        )
        if not span.is_recording():
            return None
        span.set_attribute("gen_ai.operation.name", operation)
        trace = RequestTrace(span, epoch)
        trace.add("receive", arrived, time.monotonic())
        return trace

    def end(self, stream: Stream) -> None:
        """Export the spans of a request whose last response was sent. Does nothing if the request is not traced."""
        trace = stream.request.trace
        if trace is None:
            return
        try:
            self._export(trace, stream)
        except Exception:
            log.exception("request %d: its trace could not be exported", stream.request.key)

    def stop(self) -> None:
        """Export the remaining spans."""
        self._provider.force_flush(FLUSH_MILLIS)
        self._provider.shutdown()

    def _export(self, trace: RequestTrace, stream: Stream) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        now = time.monotonic()
        context = set_span_in_context(trace.span)
        for phase in (*trace.phases, *_phases_of(stream, now)):
            span = self._tracer.start_span(
                phase.name, context, start_time=trace.nanoseconds(phase.began), attributes=dict(phase.attributes)
            )
            span.end(trace.nanoseconds(phase.ended))
        trace.span.set_attributes(_attributes(stream, self._model))
        if stream.error:
            trace.span.set_attribute("error.type", stream.error.code.name)
            trace.span.set_status(Status(StatusCode.ERROR, str(stream.error)))
        trace.span.end(trace.nanoseconds(now))


def _provider(endpoint: str, sample_ratio: float) -> TracerProvider:
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        exporter = _exporter_class()
    except ImportError as error:
        problem = (
            f"OpenTelemetry is not installed ({error}); run pip install 'paged-llm-triton[tracing]', or"
            " 'paged-llm-triton[tracing-json]' beside the extra server"
        )
        raise invalid_option("otlp_traces_endpoint", endpoint, problem) from None
    _limit_messages()
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", SERVICE)})
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(sample_ratio)), resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter(endpoint=endpoint)))
    return provider


def _exporter_class() -> Callable[..., SpanExporter]:
    """Return the exporter that sends protobuf, or the JSON exporter where the package protobuf is too old for it."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
    return OTLPSpanExporter


class _MessageLimit(logging.Handler):
    """Passes a message on to the root logger, as one line, every MESSAGE_SECONDS, with the number of messages left out.

    Without it, a collector that is down fills the log: each batch is reported several times, with a traceback.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last, self._left_out = -math.inf, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a message on, or count it. Called with the handler's lock."""
        now = time.monotonic()
        if now < self._last + MESSAGE_SECONDS:
            self._left_out += 1
            return
        parts = [record.getMessage()]
        if record.exc_info and (error := record.exc_info[1]):
            while cause := error.__cause__ or error.__context__:  # the errors of HTTP libraries repeat it at length
                error = cause
            parts.append(f"{type(error).__name__}: {error}")
        text = textwrap.shorten(redacted(" ".join(parts)), MESSAGE_CHARS, placeholder=" ...")
        if self._left_out:
            text += f" ({self._left_out} earlier messages were left out)"
        line = {"msg": text, "args": (), "exc_info": None, "exc_text": None, "stack_info": None}
        logging.getLogger().handle(logging.makeLogRecord(record.__dict__ | line))
        self._last, self._left_out = now, 0


def _limit_messages() -> None:
    """Limit what OpenTelemetry logs. A filter of a logger would not apply to the loggers below it."""
    limit = _MessageLimit()
    for logger in map(logging.getLogger, LOGGERS):
        logger.handlers = [limit, *(handler for handler in logger.handlers if not isinstance(handler, _MessageLimit))]
        logger.propagate = False


def _operation(call: Call) -> str:
    """Return the name of the operation in the semantic conventions."""
    if call.pooling_type:
        return call.pooling_type.operation
    return "chat" if call.is_chat else "text_completion"


def _phases_of(stream: Stream, now: float) -> list[Phase]:
    """Return the phases between the times that every stream records."""
    trace = stream.request.trace
    assert trace
    tokenized = max(phase.ended for phase in trace.phases if phase.name in ("receive", "tokenize"))
    phases = [Phase("queue", tokenized, stream.scheduled_at or now)]
    if stream.first_token is not None and stream.last_token is not None:
        phases.append(Phase("decode", stream.first_token, stream.last_token, {"paged_llm.steps": stream.num_steps - 1}))
        phases.append(Phase("send", stream.last_token, now))
    return phases


def _attributes(stream: Stream, model: str) -> dict[str, Any]:
    """Return the attributes of a request's span."""
    sampling, samples = stream.request.sampling, stream.returned_samples
    values: Mapping[str, Any] = {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": stream.call.request_id or None,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.stop_sequences": sampling.stop or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.stream": stream.call.stream,
        "gen_ai.conversation.id": str(stream.call.sequence.id) if stream.call.sequence else None,
        "gen_ai.response.finish_reasons": [sample.finish.value for sample in samples if sample.finish],
        "gen_ai.response.time_to_first_chunk": (
            None if stream.first_token is None else stream.first_token - stream.arrived
        ),
        "gen_ai.usage.input_tokens": len(stream.request.prompt_token_ids),
        "gen_ai.usage.output_tokens": sum(sample.num_tokens for sample in stream.samples),
        "gen_ai.usage.cache_read.input_tokens": stream.usage.cached_tokens if stream.usage else None,
    }
    return {name: value for name, value in values.items() if value is not None}
