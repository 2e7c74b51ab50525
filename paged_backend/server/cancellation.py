"""Ends streams before their last token: by request id, by a client that cancelled, or at a deadline."""

from __future__ import annotations

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import FinishReason
from paged_backend.server.open_streams import EngineControl, OpenStreams
from paged_backend.server.streams.polling import PollResult
from paged_backend.server.streams.stream import Stream
from paged_backend.server.wire.channel import Channel, respond
from paged_backend.server.wire.responses import write_num_stopped

GRACE_SECONDS = 1.0  # the engine's time to return the beams of a search that is ended early


class Cancellation:
    """Ends open streams. Runs on the responder's thread; `now` is time.monotonic()."""

    def __init__(self, streams: OpenStreams, engine: EngineControl):
        self._streams = streams
        self._engine = engine

    def cancel_by_id(self, channel: Channel, request_id: str) -> None:
        """Cancel the streams with this request id, and answer `channel` with their number."""
        found = [stream for stream in self._streams.active() if stream.call.request_id == request_id]
        self._streams.fail(found, RequestError(ErrorCode.CANCELLED, "the request was ended by a stop_request"))
        respond(channel, lambda: channel.send(write_num_stopped(len(found)), final=True))

    def end_polled(self, results: list[PollResult[Stream]], now: float) -> None:
        """End the streams that polling found to be cancelled or stopped, unless they have ended since.

        A stream that was scheduled during the poll may have been polled twice.
        """
        streams = self._streams
        for stream, error in [failed for result in results for failed in result.failed]:
            if streams.is_active(stream):
                streams.give_up(stream, error)
        cancelled = {
            stream.request.key: stream for result in results for stream in result.cancelled if streams.is_active(stream)
        }
        error = RequestError(ErrorCode.CANCELLED, "the request was cancelled by its client")
        streams.fail(list(cancelled.values()), error)
        for stream in [stream for result in results for stream in result.stopped]:
            if streams.is_active(stream) and stream.early_finish is None:
                streams.guarded(stream, lambda stream: self._end_early(stream, FinishReason.CANCELLED, now))

    def end_overdue(self, now: float) -> None:
        """End the streams whose deadline has passed."""
        for stream in [stream for stream in self._streams.by_key.values() if now > stream.deadline]:
            self._streams.guarded(stream, lambda stream: self._time_out(stream, now))

    def _time_out(self, stream: Stream, now: float) -> None:
        if kind := stream.call.pooling_type:  # it has no partial result
            reason = f"the deadline passed before the {kind.field.removesuffix('_request')} was computed"
            stream.fail(RequestError(ErrorCode.DEADLINE_EXCEEDED, reason))
            self._engine.abort(stream.request.key)
            self._streams.send(stream)
            return
        self._end_early(stream, stream.early_finish or FinishReason.TIMEOUT, now)

    def _end_early(self, stream: Stream, reason: FinishReason, now: float) -> None:
        """End the stream with the tokens it has.

        The responder has only the common prefix of a beam search. The engine is asked for the beams, and the stream
        ends without them if the engine does not answer within GRACE_SECONDS.
        """
        if stream.is_search and stream.early_finish is None and stream.scheduled_at is not None:
            stream.await_early_finish(reason, deadline=now + GRACE_SECONDS)
            self._engine.expire(stream.request.key)
            return
        stream.end(reason)
        self._engine.end_all(stream.request.key)
        self._streams.send(stream)
