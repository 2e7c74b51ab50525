"""The thread that sends responses to clients, and ends their requests.

Sending is a round trip to the server process, so it does not happen on the engine's thread. Each iteration of the loop
handles all queued messages and then sends once per stream, so tokens of several steps go out as one response when
clients are slow. Messages are the engine's outputs, and calls from other threads.

    engine ---- StepOutput, PoolMap, ... --->|       |---> handle: open streams, store their tokens
    admission - open, cancel, ... ---------->| inbox |---> end what clients cancelled, send what is new
    poller ---- cancelled clients ---------->|       |---> every POLL_SECONDS: deadlines, a stalled engine
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from paged_backend.api.errors import ErrorCode, RequestError, internal_error
from paged_backend.api.request import FinishReason
from paged_backend.engine.outputs import EngineDied, EngineOutput, PoolMap, RemoteOutput, StepOutput
from paged_backend.engine.router import Router
from paged_backend.server.metrics.metrics import Metrics
from paged_backend.server.prompts.sessions import Sessions
from paged_backend.server.streams.polling import CancellationPoller, PollResult
from paged_backend.server.streams.stream import Stream
from paged_backend.server.streams.tracing import Tracing
from paged_backend.server.wire.channel import Channel, respond, send_error
from paged_backend.server.wire.responses import write_json, write_num_stopped
from paged_backend.utils import failure

log = logging.getLogger("paged_llm")

POLL_SECONDS = 0.02  # time between two checks of deadlines and of the engine
POLL_SHARE = 0.1  # share of the thread's time that these checks may take
MAX_POLL_SECONDS = 1.0  # maximum time between two checks, however long one took: the process may have been paused
GRACE_SECONDS = 1.0  # the engine's time to return the beams of a search that is ended early

Message = EngineOutput | Callable[[], None]
Inbox = SimpleQueue[Message]


class Responder:
    """Sends tokens and errors to clients.

    The public methods may be called from any thread. All others run on the responder's own, which alone changes
    `streams`, except that the poller calls `_is_open`. Times are time.monotonic().
    """

    def __init__(
        self,
        engine: Router,
        metrics: Metrics,
        sessions: Sessions,
        *,
        inbox: Inbox | None = None,
        first_response: float | None = None,
        max_response_mib: int = 64,
        stall_seconds: float = 60.0,
        max_model_len: int | None = None,
        tracing: Tracing | None = None,
    ):
        """inbox: the queue that the engine emits to; by default a new one.
        first_response: seconds until a streaming request without a token gets an empty response; None: never.
        max_response_mib: the limit for all responses of one request together.
        stall_seconds: maximum seconds of an engine step and of its answer to a pool map request.
        max_model_len: the context length, which pool maps contain.
        tracing: exports traces of requests; None: no traces."""
        self.streams: dict[int, Stream] = {}  # open streams by request key
        self.recorded_steps: list[StepOutput] | None = None  # set while a profile is taken
        self._engine = engine
        self._metrics = metrics
        self._sessions = sessions
        self._inbox: Inbox = SimpleQueue() if inbox is None else inbox
        self._first_response = first_response
        self._max_response_mib = max_response_mib
        self._stall_seconds = stall_seconds
        self._max_model_len = max_model_len
        self._tracing = tracing
        self._tenants: Counter[str] = Counter()  # open streams by tenant; guarded by the lock
        self._lock = threading.Lock()
        self._updated: dict[int, Stream] = {}  # streams that this iteration has given tokens or an end
        self._poll_results: list[PollResult[Stream]] = []  # results of this iteration
        self._without_response: deque[Stream] = deque()  # streams that may get an empty response, in order of arrival
        self._pool_map_requests: list[tuple[Channel, float]] = []  # with the times of their arrival, in order
        self._engine_error: RequestError | None = None  # set once the engine has died
        self._next_check = 0.0
        self._iteration_began: float | None = None  # set during an iteration
        self._stopping = False
        self._poller: CancellationPoller[Stream] = CancellationPoller(
            self._is_open, lambda result: self._post(self._take_poll_result, result)
        )
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._poller.start()

    def stop(self, seconds: float | None = None) -> None:
        """End the thread once the messages so far are handled, or give up on it after this many seconds."""
        self._post(self._end_loop)
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.error("responses were not sent within %.3g s; the thread is abandoned until the process ends", seconds)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy_seconds(self) -> float:
        """The seconds that the current iteration has taken; 0 between two iterations."""
        began = self._iteration_began
        return 0.0 if began is None else time.monotonic() - began

    def open(self, stream: Stream) -> None:
        """Take over a stream. Call this before the engine gets the request: its first token must find the stream."""
        with self._lock:
            self._tenants[stream.tenant] += 1
        self._post(self._add, stream)

    def num_open(self, tenant: str) -> int:
        """Return the number of a tenant's open streams."""
        return self._tenants[tenant]

    def set_prompt(self, opened: Stream, tokenized: Stream) -> None:
        """Give an open stream its tokenized prompt. Call this before the engine gets the request."""
        self._post(self._set_prompt, opened, tokenized)

    def count(self, event: str, amount: int = 1, label: str = "") -> None:
        """Count events for the metrics, such as a request that never became a stream."""
        self._post(self._metrics.count, event, amount, label)

    def cancel(self, channel: Channel, request_id: str) -> None:
        """Cancel the streams with this request id, and answer `channel` with their number."""
        self._post(self._cancel_by_id, channel, request_id)

    def request_pool_map(self, channel: Channel) -> None:
        """Answer `channel` with the next pool map. Call this before asking the engine for a map."""
        self._post(self._await_pool_map, channel, time.monotonic())

    def emit(self, output: EngineOutput) -> None:
        self._inbox.put(output)

    def _post(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._inbox.put(partial(call, *arguments))

    # The loop

    def _end_loop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            messages = self._collect()
            self._iteration_began = time.monotonic()
            for message in messages:
                _log_error(self._handle, message)
            _log_error(self._finish_iteration)
            self._iteration_began = None
        self._poller.stop()

    def _collect(self) -> list[Message]:
        """Return all queued messages. If there are none, wait until the next check, metrics update or session
        expiry."""
        due = self._sessions.next_expiry
        if self.streams or self._pool_map_requests:
            due = min(due, self._next_check)
        if self._metrics.is_pending:
            due = min(due, self._metrics.next_update)
        messages: list[Message] = []
        try:
            messages.append(self._inbox.get(timeout=None if due == math.inf else max(0.0, due - time.monotonic())))
            while True:
                messages.append(self._inbox.get_nowait())
        except Empty:
            return messages

    def _handle(self, message: Message) -> None:
        match message:
            case StepOutput():
                self._metrics.record(message.stats)
                if message.report:
                    self._metrics.add_step(message.report)
                    if self.recorded_steps is not None:
                        self.recorded_steps.append(message)
                self._take(message)
            case RemoteOutput():
                self._metrics.record_others()
                self._take(message)
            case PoolMap():
                self._answer_pool_maps(message)
            case EngineDied():
                self._fail_all(message.reason)
            case _:
                message()

    def _finish_iteration(self) -> None:
        """End and send streams, once all messages are handled: a stream that new tokens finish is not cancelled."""
        if self._poll_results:
            _log_error(self._end_polled, time.monotonic())
        updated, self._updated = self._updated, {}
        now = time.monotonic()
        if self._metrics.is_pending and (
            now >= self._metrics.next_update or any(stream.ended for stream in updated.values())
        ):
            _log_error(self._update_metrics)
        for stream in updated.values():
            self._guarded(stream, self._send)
        if self._without_response:
            _log_error(self._send_first_responses, now)
        if now >= self._next_check:
            _log_error(self._check, now)
        if now >= self._sessions.next_expiry:
            self._sessions.expire()
        self._metrics.set("sessions", self._sessions.count)

    def _update_metrics(self) -> None:
        self._metrics.update(idle=all(stream.ended for stream in self.streams.values()))

    def _guarded(self, stream: Stream, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` with the stream; if it raises, only this stream fails."""
        try:
            action(stream, *arguments)
        except Exception as error:
            self._give_up(stream, error)

    # Opening streams, and their tokens

    def _add(self, stream: Stream) -> None:
        self.streams[stream.request.key] = stream
        self._poller.add(stream)
        if stream.is_tokenized:
            self._accept(stream)
        if self._engine_error:  # the engine died after the request was checked for admission
            stream.error = self._engine_error
            self._updated[stream.request.key] = stream

    def _set_prompt(self, opened: Stream, tokenized: Stream) -> None:
        if not opened.ended:
            opened.set_prompt(tokenized)
            self._accept(opened)

    def _accept(self, stream: Stream) -> None:
        if stream.call.stream and self._first_response is not None:
            self._without_response.append(stream)
        self._metrics.count("prompt_tokens", len(stream.request.prompt_token_ids))

    def _take(self, output: StepOutput | RemoteOutput) -> None:
        """Add tokens to their streams. This is the hot path: it runs once per token and sample."""
        streams, updated, when, generated = self.streams, self._updated, output.finished_at, 0
        latencies: dict[float, int] = {}  # tokens by inter-token latency, which most samples share
        for key in output.entered:
            if stream := streams.get(key):
                stream.scheduled_at = output.started_at
                self._metrics.observe("queue_time", output.started_at - stream.arrived)
                self._poller.mark_running(stream)
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
                self._give_up(stream, error)
            new = sample.num_tokens - before  # excludes tokens after a stop string
            generated += new
            if new:
                if sample.last_token is not None:
                    latency = (when - sample.last_token) / new
                    latencies[latency] = latencies.get(latency, 0) + new
                sample.last_token = when
            if not had_token and stream.first_token is not None:
                self._metrics.observe("time_to_first_token", stream.first_token - stream.arrived)
            updated[delta.key] = stream
            if sample.finish and not delta.last:
                self._engine.end(delta.key, delta.sample)
        if generated:
            self._metrics.count("generated_tokens", generated)
        for latency, tokens in latencies.items():
            self._metrics.observe("inter_token_latency", latency, tokens)

    # Sending and closing

    def _send(self, stream: Stream, *, even_if_empty: bool = False) -> None:
        """Send what the stream has not sent yet, and close the stream if it has ended.

        even_if_empty: send a response even without new text.
        """
        key = stream.request.key
        if key not in self.streams:  # closed earlier in this iteration
            return
        if not stream.ended and not (stream.has_new_text() or (even_if_empty and stream.call.stream)):
            return
        outputs = stream.take_outputs() if not stream.error else {}
        if stream.sent_bytes > self._max_response_mib << 20:
            reason = f"its answer is larger than max_response_mib={self._max_response_mib}; ask for fewer tokens, or"
            stream.error = RequestError(ErrorCode.UNAVAILABLE, f"{reason} less of each")
            self._engine.abort(key)
        error = stream.error
        if error and error.code is ErrorCode.INTERNAL and error is not self._engine_error:
            log.error("request %d: %s", key, error)
        if stream.ended:
            self._close(stream)
            self._metrics.flush()
        if error:
            stream.channel.fail(error)
        else:
            stream.channel.send(outputs, final=stream.finished)
        if stream.ended:
            self._end_trace(stream)

    def _close(self, stream: Stream) -> None:
        """Remove a stream that has ended, release what it holds, and record its metrics."""
        stream.settle_session(answered=stream.error is None)
        del self.streams[stream.request.key]
        self._leave(stream.tenant)
        metrics, first, last = self._metrics, stream.first_token, stream.last_token
        metrics.count("finished", label=stream.outcome)
        if first is None or last is None:
            return
        metrics.observe("request_latency", last - stream.arrived)
        metrics.observe("request_prompt_tokens", len(stream.request.prompt_token_ids))
        metrics.observe("request_generated_tokens", sum(sample.num_tokens for sample in stream.samples))
        metrics.observe("request_n", stream.request.sampling.n)
        longest = max(sample.num_tokens for sample in stream.samples)
        if longest > 1:
            metrics.observe("time_per_output_token", (last - first) / (longest - 1))

    def _leave(self, tenant: str) -> None:
        with self._lock:
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]

    def _end_trace(self, stream: Stream) -> None:
        if self._tracing:
            self._tracing.end(stream)

    def _send_first_responses(self, now: float) -> None:
        """Send an empty response on each stream that waits for its first token since `first_response` seconds.

        Triton notices that an HTTP client has disconnected only when it sends to it.
        """
        assert self._first_response is not None
        while self._without_response:
            stream = self._without_response[0]
            needs_response = not stream.sent and self._is_open(stream)
            if needs_response and now < stream.arrived + self._first_response:
                return
            self._without_response.popleft()
            if needs_response:
                self._guarded(stream, partial(self._send, even_if_empty=True))

    # Ending streams before their last token

    def _is_open(self, stream: Stream) -> bool:
        """Return whether the stream has not been closed. May be called from any thread."""
        return stream.request.key in self.streams

    def _is_active(self, stream: Stream) -> bool:
        """Return whether the stream is open and has neither finished nor failed."""
        return stream.request.key in self.streams and not stream.ended

    def _fail(self, streams: Sequence[Stream], error: RequestError) -> None:
        """Abort the requests and send each client the error. All are counted before the first error is sent."""
        for stream in streams:
            stream.error = error
            self._engine.abort(stream.request.key)
            self._guarded(stream, self._close)
        self._metrics.flush()
        for stream, answer in self._poller.round_trips.each(lambda stream: stream.channel.fail(error), streams):
            if isinstance(answer, Exception):
                self._give_up(stream, answer)
            else:
                self._end_trace(stream)

    def _give_up(self, stream: Stream, error: Exception) -> None:
        """Abort one request after an unexpected error, and send that error if possible. Never raises."""
        key = stream.request.key
        log.error("request %d: could not send a response", key, exc_info=error)
        self._engine.abort(key)
        stream.error = internal_error(error)
        if self.streams.pop(key, None):
            self._leave(stream.tenant)
            self._metrics.count("finished", label="error")
            stream.settle_session(answered=False)
        try:
            stream.channel.fail(stream.error)
        except Exception:
            log.exception("request %d: could not send the error", key)
        self._end_trace(stream)

    def _cancel_by_id(self, channel: Channel, request_id: str) -> None:
        streams = [
            stream for stream in self.streams.values() if stream.call.request_id == request_id and not stream.ended
        ]
        self._fail(streams, RequestError(ErrorCode.CANCELLED, "the request was ended by a stop_request"))
        respond(channel, lambda: write_num_stopped(len(streams)))

    def _take_poll_result(self, result: PollResult[Stream]) -> None:
        self._poll_results.append(result)

    def _end_polled(self, now: float) -> None:
        """End the streams that polling found to be cancelled or stopped, unless they have ended since."""
        results, self._poll_results = self._poll_results, []
        for stream, error in [failed for result in results for failed in result.failed]:
            if self._is_active(stream):
                self._give_up(stream, error)
        # A stream that was scheduled during the poll may have been polled twice.
        cancelled = dict.fromkeys(stream for result in results for stream in result.cancelled)
        error = RequestError(ErrorCode.CANCELLED, "the request was cancelled by its client")
        self._fail(list(filter(self._is_active, cancelled)), error)
        for stream in [stream for result in results for stream in result.stopped]:
            if self._is_active(stream) and stream.early_finish is None:
                self._guarded(stream, self._end_early, FinishReason.CANCELLED, now)

    def _end_early(self, stream: Stream, reason: FinishReason, now: float) -> None:
        """End the stream with the tokens it has.

        The responder has only the common prefix of a beam search. The engine is asked for the beams, and the stream
        ends without them if the engine does not answer within GRACE_SECONDS.
        """
        if stream.is_search and stream.early_finish is None and stream.scheduled_at is not None:
            stream.early_finish, stream.deadline = reason, now + GRACE_SECONDS
            self._engine.expire(stream.request.key)
            return
        stream.end(reason)
        self._engine.end_all(stream.request.key)
        self._send(stream)

    def _time_out(self, stream: Stream, now: float) -> None:
        if kind := stream.call.pooling_type:  # it has no partial result
            reason = f"the deadline passed before the {kind.field.removesuffix('_request')} was computed"
            stream.error = RequestError(ErrorCode.DEADLINE_EXCEEDED, reason)
            self._engine.abort(stream.request.key)
            self._send(stream)
        else:
            self._end_early(stream, stream.early_finish or FinishReason.TIMEOUT, now)

    # Watching deadlines and the engine

    def _check(self, now: float) -> None:
        """End overdue requests. If the engine has stalled, fail all its requests."""
        self._fail_stalled()
        if self._pool_map_requests:
            self._end_overdue_pool_maps(now)
        for stream in [stream for stream in self.streams.values() if now > stream.deadline]:
            self._guarded(stream, self._time_out, now)
        self._next_check = now + min(max(POLL_SECONDS, (time.monotonic() - now) / POLL_SHARE), MAX_POLL_SECONDS)

    def _fail_stalled(self) -> None:
        """Fail all open streams if a step takes too long. If the step ends after all, its tokens are dropped."""
        if (seconds := self._engine.busy_seconds) > self._stall_seconds:
            reason = f"a step has taken {seconds:.0f} s, more than stall_timeout={self._stall_seconds:g}; send it again"
            active = [stream for stream in self.streams.values() if not stream.ended]
            self._fail(active, RequestError(ErrorCode.UNAVAILABLE, reason))

    def _fail_all(self, reason: str) -> None:
        """Fail every stream because the engine died; they are sent at the end of the iteration."""
        failure.report(reason)
        self._engine_error = error = RequestError(ErrorCode.INTERNAL, reason)
        self._metrics.record_idle()
        for stream in self.streams.values():
            stream.error = error
        self._fail_pool_maps(error)
        self._updated |= self.streams

    # Maps of the block pool

    def _await_pool_map(self, channel: Channel, arrived: float) -> None:
        self._pool_map_requests.append((channel, arrived))
        if self._engine_error:
            self._fail_pool_maps(self._engine_error)

    def _answer_pool_maps(self, pool: PoolMap) -> None:
        """Answer all clients that wait for a map, after the metrics show the same numbers."""
        self._metrics.record(pool.stats)
        _log_error(self._metrics.update)
        outputs = write_json(
            "pool_map",
            {
                "time": pool.taken_at,
                "block_size": pool.stats.block_size,
                "num_blocks": pool.stats.blocks_total,
                "states": pool.states,
                "state_blocks": pool.state_blocks,
                "running": pool.stats.running,
                "waiting": pool.stats.waiting,
                "tokens": pool.tokens,
                "cached_tokens_hit": pool.stats.cached_tokens,
                "preemptions": pool.stats.preemptions,
                "max_model_len": self._max_model_len,
                "sleeping": pool.stats.sleeping,
            },
        )
        requests, self._pool_map_requests = self._pool_map_requests, []
        for channel, _ in requests:
            respond(channel, lambda: outputs)

    def _fail_pool_maps(self, error: RequestError) -> None:
        requests, self._pool_map_requests = self._pool_map_requests, []
        for channel, _ in requests:
            send_error(channel, error)

    def _end_overdue_pool_maps(self, now: float) -> None:
        """Fail requests for maps that are too old: an engine that hangs must not keep the server from stopping."""
        reason = f"the engine has not reported its block pool within {self._stall_seconds:g} s"
        while self._pool_map_requests and now > self._pool_map_requests[0][1] + self._stall_seconds:
            send_error(self._pool_map_requests.pop(0)[0], RequestError(ErrorCode.UNAVAILABLE, reason))


def _log_error(action: Callable[..., None], *arguments: Any) -> None:
    """Call `action`; log an unexpected error that concerns no single stream, and go on serving all of them."""
    try:
        action(*arguments)
    except Exception:
        log.exception("unexpected responder error")
