"""The table of open streams: sends their responses, closes them, and fails them.

All methods run on the responder's thread, except `is_open`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from paged_backend.api.errors import ErrorCode, RequestError, internal_error
from paged_backend.api.request import FinishReason
from paged_backend.server.metrics.metrics import Metrics
from paged_backend.server.streams.polling import RoundTrips
from paged_backend.server.streams.stream import Stream
from paged_backend.server.streams.tracing import Tracing
from paged_backend.server.tenants import Tenants

log = logging.getLogger("paged_llm")


class EngineControl(Protocol):
    """The methods of `Engine` that the responder calls."""

    @property
    def busy_seconds(self) -> float: ...
    def abort(self, key: int) -> None: ...
    def end(self, key: int, index: int) -> None: ...
    def end_all(self, key: int) -> None: ...
    def expire(self, key: int) -> None: ...
    def report_unknown(self, keys: tuple[int, ...]) -> None: ...


class OpenStreams:
    """Open streams by request key."""

    def __init__(
        self,
        engine: EngineControl,
        metrics: Metrics,
        tenants: Tenants,
        round_trips: RoundTrips,
        tracing: Tracing,
        *,
        max_response_mib: int,
    ):
        """max_response_mib: the limit for all responses of one request together."""
        self.by_key: dict[int, Stream] = {}
        self.engine_error: RequestError | None = None  # set once the engine has died
        self._engine = engine
        self._metrics = metrics
        self._tenants = tenants
        self._round_trips = round_trips
        self._tracing = tracing
        self._max_response_mib = max_response_mib

    def __bool__(self) -> bool:
        return bool(self.by_key)

    def add(self, stream: Stream) -> None:
        self.by_key[stream.request.key] = stream

    def is_open(self, stream: Stream) -> bool:
        """Return whether the stream has not been closed. May be called from any thread."""
        return stream.request.key in self.by_key

    def is_active(self, stream: Stream) -> bool:
        """Return whether the stream is open and neither finished nor failed."""
        return self.is_open(stream) and not stream.ended

    def active(self) -> list[Stream]:
        return [stream for stream in self.by_key.values() if not stream.ended]

    def guarded(self, stream: Stream, action: Callable[[Stream], None]) -> None:
        """Run `action`; if it raises, fail only this stream."""
        try:
            action(stream)
        except Exception as error:
            self.give_up(stream, error)

    def send(self, stream: Stream, *, even_if_empty: bool = False) -> None:
        """Send what the stream has not sent yet, and close the stream if it has ended.

        even_if_empty: send a response even without new text.
        """
        if stream.request.key not in self.by_key:  # closed earlier in this iteration
            return
        if not stream.ended and not (stream.has_new_text() or (even_if_empty and stream.call.stream)):
            return
        outputs = stream.take_outputs() if not stream.error else {}
        if stream.sent_bytes > self._max_response_mib << 20:
            self._fail_oversized(stream)
        if stream.error:
            if stream.error.code is ErrorCode.INTERNAL and stream.error is not self.engine_error:
                log.error("request %d: %s", stream.request.key, stream.error)
            self._close(stream, stream.error.outcome)
            self._metrics.flush()
            _send_error(stream)
            self._tracing.end(stream)
            return
        if stream.finished:
            self._close(stream, _outcome(stream))
            self._metrics.flush()
        stream.channel.send(outputs, final=stream.finished)
        if stream.finished:
            self._tracing.end(stream)

    def fail(self, streams: Sequence[Stream], error: RequestError) -> None:
        """Abort the requests and send each client the error. All are counted before the first error is sent."""
        for stream in streams:
            stream.fail(error)
            self._engine.abort(stream.request.key)
            self.guarded(stream, lambda stream: self._close(stream, error.outcome))
        self._metrics.flush()
        for stream, answer in self._round_trips.each(_send_error, streams):
            if isinstance(answer, Exception):
                self.give_up(stream, answer)
            else:
                self._tracing.end(stream)

    def fail_all(self, error: RequestError) -> None:
        """Mark every stream as failed because the engine died; they are sent and closed at the end of the iteration."""
        self.engine_error = error
        for stream in self.by_key.values():
            stream.fail(error)

    def give_up(self, stream: Stream, error: Exception) -> None:
        """Abort one request after an unexpected error, and send that error if possible. Never raises."""
        log.error("request %d: could not send a response", stream.request.key, exc_info=error)
        self._engine.abort(stream.request.key)
        stream.fail(internal_error(error))
        if self.by_key.pop(stream.request.key, None):
            self._tenants.leave(stream.tenant)
            self._metrics.count_finished("error")
            stream.settle_session(answered=False)
        try:
            _send_error(stream)
        except Exception:
            log.exception("request %d: could not send the error", stream.request.key)
        self._tracing.end(stream)

    def _fail_oversized(self, stream: Stream) -> None:
        most = self._max_response_mib
        reason = f"its answer is larger than max_response_mib={most}; ask for fewer tokens, or less of each"
        stream.fail(RequestError(ErrorCode.UNAVAILABLE, reason))
        self._engine.abort(stream.request.key)

    def _close(self, stream: Stream, outcome: str) -> None:
        """Remove the stream, release what it holds, and record its metrics."""
        stream.settle_session(answered=stream.error is None)
        del self.by_key[stream.request.key]
        self._tenants.leave(stream.tenant)
        self._metrics.count_finished(outcome)
        if stream.first_token is None or stream.last_token is None:
            return
        self._metrics.observe_request(
            prompt=len(stream.request.prompt_token_ids),
            generated=sum(sample.num_tokens for sample in stream.samples),
            n=stream.request.sampling.n,
            seconds=stream.last_token - stream.arrived,
        )
        longest = max(sample.num_tokens for sample in stream.samples)
        if longest > 1:
            self._metrics.time_per_output_token.observe((stream.last_token - stream.first_token) / (longest - 1))


def _send_error(stream: Stream) -> None:
    assert stream.error is not None
    stream.channel.fail(stream.error)


def _outcome(stream: Stream) -> str:
    """Return the finish reason for the metrics: of samples with different reasons, the last in FinishReason's order."""
    reasons = {sample.finish for sample in stream.returned_samples}
    return next(reason.value for reason in reversed(FinishReason) if reason in reasons)
