"""Handles the responder's messages: opens streams, adds tokens to them, collects the streams that need a response."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.engine.outputs import EngineDied, PoolMap, RemoteOutput, StepOutput, UnknownRequests
from paged_backend.server.cancellation import Cancellation
from paged_backend.server.engine_monitor import EngineMonitor
from paged_backend.server.first_responses import FirstResponses
from paged_backend.server.metrics.metrics import Metrics, MetricsUpdates
from paged_backend.server.open_streams import EngineControl, OpenStreams
from paged_backend.server.pool_maps import PoolMapRequests
from paged_backend.server.streams.polling import CancellationPoller, PollResult
from paged_backend.server.streams.stream import Stream
from paged_backend.server.wire.channel import Channel
from paged_backend.utils import failure

log = logging.getLogger("paged_llm")


@contextmanager
def log_errors() -> Iterator[None]:
    """Log an unexpected error that concerns no single stream, and go on serving all of them."""
    try:
        yield
    except Exception:
        log.exception("unexpected responder error")


class ResponderMessageHandler:
    """Runs on the responder's thread. `take_updated` and `take_poll_results` return what an iteration collected."""

    def __init__(
        self,
        engine: EngineControl,
        streams: OpenStreams,
        metrics: Metrics,
        *,
        updates: MetricsUpdates,
        poller: CancellationPoller[Stream],
        cancellation: Cancellation,
        monitor: EngineMonitor,
        first_responses: FirstResponses,
        pool_maps: PoolMapRequests,
    ):
        self.stopped = False
        self._engine = engine
        self._streams = streams
        self._metrics = metrics
        self._updates = updates
        self._poller = poller
        self._cancellation = cancellation
        self._monitor = monitor
        self._first_responses = first_responses
        self._pool_maps = pool_maps
        self._updated: dict[int, Stream] = {}
        self._poll_results: list[PollResult[Stream]] = []

    def take_updated(self) -> list[Stream]:
        """Return the streams that got tokens, or an end, since the last call."""
        updated, self._updated = self._updated, {}
        return list(updated.values())

    def take_poll_results(self) -> list[PollResult[Stream]]:
        results, self._poll_results = self._poll_results, []
        return results

    def on_stop(self) -> None:
        self.stopped = True

    def on_stream_opened(self, stream: Stream) -> None:
        self._streams.add(stream)
        self._poller.add(stream)
        if stream.is_tokenized:
            self._count_accepted(stream)
        if error := self._streams.engine_error:  # the engine died after the request was checked for admission
            stream.fail(error)
            self._updated[stream.request.key] = stream

    def on_prompt_tokenized(self, opened: Stream, tokenized: Stream) -> None:
        if not opened.ended:
            opened.set_prompt(tokenized)
            self._count_accepted(opened)

    def on_rejected(self, outcome: str) -> None:
        self._metrics.count_finished(outcome)

    def on_requests_moved(self, count: int) -> None:
        self._metrics.count_moved(count)

    def on_cancel(self, channel: Channel, request_id: str) -> None:
        self._cancellation.cancel_by_id(channel, request_id)

    def on_clients_polled(self, result: PollResult[Stream]) -> None:
        """Keep the result until the new tokens are stored: a stream that they finish is not cancelled."""
        self._poll_results.append(result)

    def on_pool_map_request(self, channel: Channel, arrived: float) -> None:
        self._pool_maps.add(channel, arrived)
        if error := self._streams.engine_error:
            self._pool_maps.fail(error)

    def on_pool_map(self, pool: PoolMap) -> None:
        """Answer all clients that wait for a map, after the metrics show the same numbers."""
        self._updates.record(pool.stats)
        with log_errors():
            self._updates.update(time.monotonic())
        self._pool_maps.answer(pool)

    def on_unknown_requests(self, unknown: UnknownRequests) -> None:
        self._updated |= self._monitor.fail_unknown(unknown.keys)

    def on_engine_died(self, died: EngineDied) -> None:
        failure.report(died.reason)
        error = RequestError(ErrorCode.INTERNAL, died.reason)
        self._updates.record_idle()
        self._streams.fail_all(error)
        self._pool_maps.fail(error)
        self._updated |= self._streams.by_key

    def on_step(self, output: StepOutput) -> None:
        """Add the tokens of a step to their streams."""
        self._updates.record(output.stats)
        if output.report:
            self._metrics.steps.add_step(output.report)
        self._take(output)

    def on_remote_output(self, output: RemoteOutput) -> None:
        """Add the tokens of another engine to their streams."""
        self._updates.record_others()
        self._take(output)

    def _take(self, output: StepOutput | RemoteOutput) -> None:
        """Add tokens to their streams. This is the hot path: it runs once per token and sample."""
        streams, updated, when, generated = self._streams.by_key, self._updated, output.finished_at, 0
        latencies: dict[float, int] = {}  # tokens by inter-token latency, which most samples share
        for key in output.entered:
            if key in streams:
                streams[key].mark_scheduled(output.started_at)
                self._metrics.queue_time.observe(output.started_at - streams[key].arrived)
                self._poller.mark_running(streams[key])
        for delta in output.deltas:
            stream = streams.get(delta.key)
            # Otherwise it was cancelled, or a stop string ended it, while the step ran.
            if stream is None or stream.ended or (stream.samples[delta.sample].finish and not delta.error):
                continue
            had_token, sample = stream.first_token is not None, stream.samples[delta.sample]
            before = sample.num_tokens
            try:
                stream.take(delta, when)
            except Exception as error:
                self._streams.give_up(stream, error)
            new = sample.num_tokens - before  # excludes tokens after a stop string
            generated += new
            if new:
                if sample.last_token is not None:
                    latency = (when - sample.last_token) / new
                    latencies[latency] = latencies.get(latency, 0) + new
                sample.last_token = when
            if not had_token and stream.first_token is not None:
                self._metrics.time_to_first_token.observe(stream.first_token - stream.arrived)
            updated[delta.key] = stream
            if sample.finish and not delta.last:
                self._engine.end(delta.key, delta.sample)
        if generated:
            self._metrics.count_generated_tokens(generated)
            self._metrics.steps.add_latencies(latencies)

    def _count_accepted(self, stream: Stream) -> None:
        self._first_responses.add(stream)
        self._metrics.count_prompt_tokens(len(stream.request.prompt_token_ids))
