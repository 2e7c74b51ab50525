"""Detects an engine that lost requests, stalled or died, and fails the streams that it affects."""

from __future__ import annotations

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.server.open_streams import EngineControl, OpenStreams
from paged_backend.server.streams.stream import Stream

AUDIT_SECONDS = 2.0  # time between two audits, while streams are open


class EngineMonitor:
    """Compares the open streams with what the engine is working on. Runs on the responder's thread."""

    def __init__(self, engine: EngineControl, streams: OpenStreams, stall_seconds: float):
        """stall_seconds: the longest that one engine step may take."""
        self._engine = engine
        self._streams = streams
        self._stall_seconds = stall_seconds
        self._next_audit = 0.0  # time.monotonic()

    def check(self, now: float) -> None:
        """Fail all streams if a step has stalled, and start an audit if one is due."""
        if (seconds := self._engine.busy_seconds) > self._stall_seconds:
            self._fail_stalled(seconds)
        if self._streams and now >= self._next_audit and not self._streams.engine_error:
            self._next_audit = now + AUDIT_SECONDS
            self._engine.report_unknown(tuple(self._streams.by_key))

    def fail_unknown(self, keys: tuple[int, ...]) -> dict[int, Stream]:
        """Mark the streams that the engine no longer tracks as failed, and return them."""
        open_streams = self._streams.by_key
        lost = {key: open_streams[key] for key in keys if key in open_streams and not open_streams[key].ended}
        for stream in lost.values():
            stream.fail(RequestError(ErrorCode.INTERNAL, "the engine has lost the request; send it again"))
        return lost

    def _fail_stalled(self, seconds: float) -> None:
        """Fail all open streams. If the step ends after all, its tokens are dropped."""
        reason = f"a step has taken {seconds:.0f} s, more than stall_timeout={self._stall_seconds:g}; send it again"
        self._streams.fail(self._streams.active(), RequestError(ErrorCode.UNAVAILABLE, reason))
