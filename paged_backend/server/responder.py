"""The thread that sends responses to clients.

Sending is a round trip to the server process, so it does not happen on the engine's thread. Each iteration of the loop
handles all queued messages and then sends once per stream, so tokens of several steps go out as one response when
clients are slow.

    engine ---- StepOutput, PoolMap, ... --->|       |---> message_handler.py: store tokens
    admission - StreamOpened, CancelById --->| inbox |---> open_streams.py: send, close
    poller ---- ClientsPolled -------------->|       |---> cancellation.py, engine_monitor.py: end early
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from paged_backend.engine.outputs import EngineOutput
from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.server.cancellation import Cancellation
from paged_backend.server.engine_monitor import EngineMonitor
from paged_backend.server.first_responses import FirstResponses
from paged_backend.server.message_handler import ResponderMessageHandler, log_errors
from paged_backend.server.messages import (
    CancelById,
    ClientsPolled,
    Message,
    PoolMapRequested,
    PromptTokenized,
    Rejected,
    RequestsMoved,
    Stop,
    StreamOpened,
)
from paged_backend.server.metrics.metrics import Metrics, MetricsUpdates
from paged_backend.server.open_streams import EngineControl, OpenStreams
from paged_backend.server.pool_maps import PoolMapRequests
from paged_backend.server.prompts.sessions import Sessions
from paged_backend.server.streams.polling import CancellationPoller, RoundTrips
from paged_backend.server.streams.stream import Stream
from paged_backend.server.streams.tracing import Tracing
from paged_backend.server.tenants import Tenants
from paged_backend.server.wire.channel import Channel

log = logging.getLogger("paged_llm")

POLL_SECONDS = 0.02  # time between two checks of deadlines and of the engine
POLL_SHARE = 0.1  # share of the thread's time that these checks may take
MAX_POLL_SECONDS = 1.0  # maximum time between two checks, however long one took: the process may have been paused

Inbox = SimpleQueue[Message]


class Responder:
    """Sends tokens and errors to clients. The public methods may be called from any thread."""

    def __init__(
        self,
        engine: EngineControl,
        metrics: Metrics,
        sessions: Sessions,
        tenants: Tenants,
        *,
        inbox: Inbox | None = None,
        first_response: float | None = None,
        max_response_mib: int = 64,
        stall_seconds: float = 60.0,
        max_model_len: int | None = None,
        tracing: Tracing | None = None,
        add_stats: Callable[[SchedulerStats], SchedulerStats] = lambda stats: stats,
    ):
        """inbox: the queue that the engine emits to; by default a new one.
        first_response: seconds until a streaming request without a token gets an empty response; None: never.
        max_response_mib: the limit for all responses of one request together.
        stall_seconds: maximum seconds of an engine step and of its answer to a pool map request.
        max_model_len: the context length, which pool maps contain.
        tracing: exports traces of requests; None: no traces.
        add_stats: adds the statistics of other engines to those of this process's, for the metrics."""
        self._metrics = metrics
        self._sessions = sessions
        self._tenants = tenants
        self._inbox: Inbox = SimpleQueue() if inbox is None else inbox
        self._round_trips = RoundTrips()
        self.streams = OpenStreams(
            engine,
            metrics,
            tenants,
            self._round_trips,
            tracing or Tracing(None, model=""),
            max_response_mib=max_response_mib,
        )
        self._poller: CancellationPoller[Stream] = CancellationPoller(
            self.streams.is_open, self._round_trips, lambda result: self._inbox.put(ClientsPolled(result))
        )
        self._updates = MetricsUpdates(metrics, add_stats)
        self._cancellation = Cancellation(self.streams, engine)
        self._monitor = EngineMonitor(engine, self.streams, stall_seconds)
        self._first_responses = FirstResponses(self.streams, first_response)
        self._pool_maps = PoolMapRequests(stall_seconds, max_model_len)
        self._handler = ResponderMessageHandler(
            engine,
            self.streams,
            metrics,
            updates=self._updates,
            poller=self._poller,
            cancellation=self._cancellation,
            monitor=self._monitor,
            first_responses=self._first_responses,
            pool_maps=self._pool_maps,
        )
        self._next_poll = 0.0  # time.monotonic()
        self._iteration_began: float | None = None  # time.monotonic(), during an iteration
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._poller.start()

    def stop(self, seconds: float | None = None) -> None:
        """End the thread once the messages so far are handled, or give up on it after this many seconds."""
        self._inbox.put(Stop())
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
        self._tenants.enter(stream.tenant)
        self._inbox.put(StreamOpened(stream))

    def set_prompt(self, opened: Stream, tokenized: Stream) -> None:
        """Give an open stream its tokenized prompt. Call this before the engine gets the request."""
        self._inbox.put(PromptTokenized(opened, tokenized))

    def count_rejected(self, outcome: str) -> None:
        """Count a request that never became a stream."""
        self._inbox.put(Rejected(outcome))

    def count_moved(self, count: int) -> None:
        """Count requests that were moved to another instance."""
        self._inbox.put(RequestsMoved(count))

    def cancel(self, channel: Channel, request_id: str) -> None:
        """Cancel the streams with this request id, and answer `channel` with their number."""
        self._inbox.put(CancelById(channel, request_id))

    def request_pool_map(self, channel: Channel) -> None:
        """Answer `channel` with the next pool map. Call this before asking the engine for one."""
        self._inbox.put(PoolMapRequested(channel, time.monotonic()))

    def emit(self, output: EngineOutput) -> None:
        self._inbox.put(output)

    def _run(self) -> None:
        while not self._handler.stopped:
            messages = self._collect()
            self._iteration_began = time.monotonic()
            self._run_iteration(messages)
            self._iteration_began = None
        self._poller.stop()
        self._round_trips.stop()

    def _collect(self) -> list[Message]:
        """Return all queued messages, waiting for one until the next check, metrics update or session expiry."""
        messages: list[Message] = []
        try:
            now = time.monotonic()
            poll = self._next_poll - now if self.streams or self._pool_maps else None
            update = self._updates.next_update - now if self._updates.is_pending else None
            waits = [wait for wait in (poll, update, self._sessions.seconds_left()) if wait is not None]
            messages.append(self._inbox.get(timeout=max(0.0, min(waits)) if waits else None))
            while True:
                messages.append(self._inbox.get_nowait())
        except Empty:
            return messages

    def _run_iteration(self, messages: list[Message]) -> None:
        for message in messages:
            with log_errors():
                message.dispatch(self._handler)
        if results := self._handler.take_poll_results():
            with log_errors():
                self._cancellation.end_polled(results, time.monotonic())
        self._send(self._handler.take_updated())
        with log_errors():
            self._first_responses.send_due(time.monotonic())
        with log_errors():
            self._poll()
        with log_errors():
            self._metrics.set_session_count(len(self._sessions))

    def _send(self, updated: list[Stream]) -> None:
        now = time.monotonic()
        if self._updates.is_pending and (now >= self._updates.next_update or any(one.ended for one in updated)):
            with log_errors():
                self._updates.update(now, idle=not self.streams.active())
        for stream in updated:
            try:  # faster than OpenStreams.guarded: this runs for every stream and step
                self.streams.send(stream)
            except Exception as error:
                self.streams.give_up(stream, error)

    def _poll(self) -> None:
        """Expire sessions, end overdue streams, and check on the engine."""
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._sessions.expire()
        self._pool_maps.end_overdue(now)
        self._monitor.check(now)
        self._cancellation.end_overdue(now)
        self._next_poll = now + min(max(POLL_SECONDS, (time.monotonic() - now) / POLL_SHARE), MAX_POLL_SECONDS)
