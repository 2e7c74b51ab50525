"""Owns every open stream: turns tokens to text, sends it, and ends those whose clients have gone.

Sending is a round trip to the server process, so it does not happen on the engine's thread. Tokens that pile up for a
stream while others are served go out as one response.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, internal_error
from paged_backend.api.request import FinishReason
from paged_backend.engine.outputs import EngineDied, PoolMap, StepOutput, UnknownRequests
from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.server.channel import Channel
from paged_backend.server.metrics import Metrics
from paged_backend.server.round_trips import RoundTrips
from paged_backend.server.sessions import Sessions
from paged_backend.server.stream import Stream
from paged_backend.server.tenants import Tenants
from paged_backend.server.watch import CancellationPoller, PollResult
from paged_backend.server.wire.control import write_num_stopped, write_pool_map
from paged_backend.server.wire.write import write_response

log = logging.getLogger("paged_llm")

POLL_SECONDS = 0.02  # how often open streams are looked at
POLL_SHARE = 0.1  # of the thread's time at the most
GRACE_SECONDS = 1.0  # that the engine has to say what a beam search that is cut has come to
SHOW_SECONDS = 0.1  # between two updates of the metrics, while steps only add tokens
AUDIT_SECONDS = 2.0  # between two questions to the engine, while streams are open, whether it still has them
RESPONSE_BYTES = 1024  # that a response takes in the server beside its tensors


class Aborts(Protocol):
    @property
    def busy_seconds(self) -> float: ...
    def abort(self, key: int) -> None: ...
    def end(self, key: int, index: int) -> None: ...
    def end_all(self, key: int) -> None: ...
    def expire(self, key: int) -> None: ...
    def report_unknown(self, keys: tuple[int, ...]) -> None: ...


@dataclass(frozen=True)
class Refused:
    """A request that was answered with an error at once."""

    outcome: str  # as the metrics name it


@dataclass(frozen=True, eq=False)
class Look:
    """Answer with the next map of the pool."""

    channel: Channel
    arrived: float  # time.monotonic()


@dataclass(frozen=True, eq=False)
class Cancel:
    """End what is open under a request id, and answer how many that were."""

    channel: Channel
    request_id: str


@dataclass(frozen=True, eq=False)
class Fill:
    """The prompt of a stream that is open has been tokenized."""

    opened: Stream
    stream: Stream


_Message = (
    Fill
    | Stream
    | Look
    | StepOutput
    | PoolMap
    | UnknownRequests
    | EngineDied
    | Refused
    | Cancel
    | PollResult[Stream]
    | None
)


class Responder:
    """A thread between the engine and the clients. `open` and `emit` may be called from any thread."""

    def __init__(
        self,
        metrics: Metrics,
        sessions: Sessions,
        tenants: Tenants,
        *,
        first_response: float | None = None,
        max_response_mib: int = 64,
        stall_seconds: float = 60.0,
    ):
        """first_response: seconds after which a streaming request without a token gets an empty response; None: never.
        max_response_mib: of one request. stall_seconds: after which a step of the engine's, or what it is to tell of
        its pool, is not waited for any longer."""
        self._first_response = first_response
        self._max_response_mib = max_response_mib
        self._stall_seconds = stall_seconds
        self._unanswered: deque[Stream] = deque()  # that an empty response may be for, as they were opened
        self._next_audit = 0.0
        self._turn_began: float | None = None  # time.monotonic(), while messages are being worked off
        self._stopping = False
        self._metrics = metrics
        self._sessions = sessions
        self._tenants = tenants
        self._engine: Aborts | None = None
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._died: RequestError | None = None
        self._streams: dict[int, Stream] = {}
        self._lookers: list[Look] = []  # those who wait for a map of the pool, by arrival
        self._next_poll = 0.0
        self._stats: SchedulerStats | None = None  # newest
        self._is_shown = True  # whether the metrics have been told of it
        self._next_show = 0.0
        self._round_trips = RoundTrips()
        self._watch: CancellationPoller[Stream] = CancellationPoller(self._is_open, self._round_trips, self._inbox.put)
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)

    def start(self, engine: Aborts) -> None:
        self._engine = engine
        self._thread.start()
        self._watch.start()

    def stop(self, seconds: float | None = None) -> None:
        """End the thread once everything that was put before is out, or give up on it after so many seconds."""
        self._inbox.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.error("answers have not gone out in %.3g s; they are left to the end of the process", seconds)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy_seconds(self) -> float:
        """How long the messages at hand, and sending what came of them, have taken; 0 while there are none."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def open(self, stream: Stream) -> None:
        """Take a stream over. Must come before the engine gets the request, so that no token finds it missing."""
        self._tenants.enter(stream.tenant)
        self._inbox.put(stream)

    def fill(self, opened: Stream, stream: Stream) -> None:
        """An open stream goes on as this one, if it is open still. Must come before the engine gets the request."""
        self._inbox.put(Fill(opened, stream))

    def refused(self, outcome: str) -> None:
        """Count a request that never became a stream."""
        self._inbox.put(Refused(outcome))

    def cancel(self, channel: Channel, request_id: str) -> None:
        """Cancel the streams of this id, and answer how many those were."""
        self._inbox.put(Cancel(channel, request_id))

    def look(self, channel: Channel) -> None:
        """Answer with the next map of the pool. Must come before the engine is asked for it."""
        self._inbox.put(Look(channel, time.monotonic()))

    def emit(self, output: StepOutput | PoolMap | UnknownRequests | EngineDied) -> None:
        self._inbox.put(output)

    def _run(self) -> None:
        while not self._stopping:
            messages = self._collect()
            self._turn_began = time.monotonic()
            self._turn(messages)
            self._turn_began = None
        self._watch.stop()
        self._round_trips.stop()

    def _turn(self, messages: list[_Message]) -> None:
        touched: dict[int, Stream] = {}
        left: list[PollResult[Stream]] = []
        for message in messages:
            with _going_on():
                if message is None:
                    self._stopping = True
                elif isinstance(message, StepOutput):
                    self._book(message, touched)
                elif isinstance(message, PollResult):
                    left.append(message)
                else:
                    self._take(message, touched)
        if left:
            with _going_on():
                self._leave(left)
        if self._is_stale and (time.monotonic() >= self._next_show or any(one.ended for one in touched.values())):
            with _going_on():
                self._show()
        for stream in touched.values():
            try:  # as `_guarded` does, without a call more for each stream
                self._deliver(stream)
            except Exception as error:
                self._give_up(stream, error)
        with _going_on():
            self._greet()
        with _going_on():
            self._poll()
        with _going_on():
            self._metrics.set_session_count(len(self._sessions))

    def _take(
        self,
        message: Fill | Stream | Look | PoolMap | UnknownRequests | Refused | Cancel | EngineDied,
        touched: dict[int, Stream],
    ) -> None:
        """Anything but a step."""
        if isinstance(message, Stream):
            self._streams[message.request.key] = message
            self._watch.add(message)
            if message.is_tokenized:
                self._accept(message)
            if self._died:  # after it was asked whether it lives
                message.error = self._died
                touched[message.request.key] = message
        elif isinstance(message, Fill):
            if not message.opened.ended:
                message.opened.fill(message.stream)
                self._accept(message.opened)
        elif isinstance(message, Look):
            self._lookers.append(message)
            if self._died:
                self._fail_lookers(self._died)
        elif isinstance(message, PoolMap):
            self._show_pool(message)
        elif isinstance(message, Refused):
            self._metrics.ended(message.outcome)
        elif isinstance(message, Cancel):
            self._cancel_all(message)
        elif isinstance(message, UnknownRequests):
            touched |= self._fail_lost(message.keys)
        else:
            touched |= self._fail_all(message.reason)

    def _accept(self, stream: Stream) -> None:
        if stream.call.stream and self._first_response is not None:
            self._unanswered.append(stream)
        self._metrics.accepted(len(stream.request.prompt_token_ids))

    def _show(self) -> None:
        """Bring the metrics up to date. Before an answer ends, so that whoever has read it finds it counted."""
        self._next_show = time.monotonic() + SHOW_SECONDS
        if self._stats and not self._is_shown:
            self._metrics.show(self._stats)
        self._is_shown = True
        self._metrics.flush()

    def _learn(self, stats: SchedulerStats) -> None:
        self._stats, self._is_shown = stats, False

    @property
    def _is_stale(self) -> bool:
        """Whether the metrics have not been told of something."""
        return not self._is_shown or self._metrics.has_pending

    def _collect(self) -> list[_Message]:
        """All that has piled up; waits for the next message, but not past the next poll, which comes while streams are
        open, nor past the end of a session, nor past the time when the metrics are to be updated."""
        messages = []
        try:
            now = time.monotonic()
            poll = self._next_poll - now if self._streams or self._lookers else None
            show = self._next_show - now if self._is_stale else None
            waits = [wait for wait in (poll, show, self._sessions.seconds_left()) if wait is not None]
            messages.append(self._inbox.get(timeout=max(0.0, min(waits)) if waits else None))
            while True:
                messages.append(self._inbox.get_nowait())
        except Empty:
            return messages

    def _book(self, output: StepOutput, touched: dict[int, Stream]) -> None:
        self._learn(output.stats)
        streams, when, generated = self._streams, output.finished_at, 0
        for key in output.entered:
            if key in streams:
                streams[key].entered = output.started_at
                self._watch.enter(streams[key])
        for delta in output.deltas:
            stream = streams.get(delta.key)
            # Else it was cancelled, or met its stop string, a moment ago.
            if stream is None or stream.ended or (stream.samples[delta.sample].finish and not delta.error):
                continue
            begun, sample = stream.first_token is not None, stream.samples[delta.sample]
            before = sample.num_tokens
            try:
                stream.take(delta, when)
            except Exception as error:
                self._give_up(stream, error)
            generated += sample.num_tokens - before  # not what came with a stop string, but after it
            if not begun and stream.first_token is not None:
                self._metrics.time_to_first_token.observe(stream.first_token - stream.arrived)
            touched[delta.key] = stream
            if sample.finish and not delta.last:
                self._end(delta.key, delta.sample)
        if generated:
            self._metrics.generated(generated)

    def _fail_lost(self, keys: tuple[int, ...]) -> dict[int, Stream]:
        """Streams that nobody works for: whatever went wrong, their clients must not wait for ever."""
        lost = {key: self._streams[key] for key in keys if key in self._streams and not self._streams[key].ended}
        for stream in lost.values():
            stream.error = RequestError(ErrorCode.INTERNAL, "the engine has lost the request; send it again")
        return lost

    def _fail_all(self, reason: str) -> dict[int, Stream]:
        self._died = RequestError(ErrorCode.INTERNAL, reason)
        if self._stats:
            self._learn(self._stats.idle())
        for stream in self._streams.values():
            stream.error = self._died
        self._fail_lookers(self._died)
        return dict(self._streams)

    def _show_pool(self, pool: PoolMap) -> None:
        """Answer all who asked, who find the metrics say the same. No request of theirs: it took no place and no
        token."""
        self._learn(pool.stats)
        with _going_on():
            self._show()
        outputs = write_pool_map(
            {
                "time": pool.taken_at,
                "block_size": pool.stats.block_size,
                "num_blocks": pool.stats.blocks_total,
                "states": pool.states,
                "running": pool.stats.running,
                "waiting": pool.stats.waiting,
                "tokens": pool.tokens,
                "cached_tokens_hit": pool.stats.cached_tokens,
                "preemptions": pool.stats.preemptions,
            }
        )
        self._answer_lookers(lambda channel: channel.send(outputs, final=True))

    def _fail_lookers(self, error: RequestError) -> None:
        self._answer_lookers(lambda channel: channel.fail(error))

    def _answer_lookers(self, answer: Callable[[Channel], None]) -> None:
        lookers, self._lookers = self._lookers, []
        for looker in lookers:
            _answer(looker.channel, answer)

    def _dismiss_lookers(self, now: float) -> None:
        """Those who have waited long: an engine that hangs must not keep them, and with them the server, for ever."""
        reason = f"the engine has not told what its pool holds within {self._stall_seconds:g} s"
        error = RequestError(ErrorCode.UNAVAILABLE, reason)
        while self._lookers and now > self._lookers[0].arrived + self._stall_seconds:
            _answer(self._lookers.pop(0).channel, lambda channel: channel.fail(error))

    def _cancel_all(self, message: Cancel) -> None:
        found = [
            stream
            for stream in self._streams.values()
            if stream.call.request_id == message.request_id and not stream.ended  # whose answer is about to go out
        ]
        self._fail(found, RequestError(ErrorCode.CANCELLED, "the request was ended by a stop_request"))
        outputs = write_num_stopped(len(found))
        _answer(message.channel, lambda channel: channel.send(outputs, final=True))

    def _guarded(self, stream: Stream, action: Callable[[Stream], None]) -> None:
        try:
            action(stream)
        except Exception as error:
            self._give_up(stream, error)

    def _give_up(self, stream: Stream, error: Exception) -> None:
        """One stream's trouble, whatever it is, must not reach another's."""
        log.error("request %d: could not answer", stream.request.key, exc_info=error)
        self._abort(stream.request.key)
        stream.error = internal_error(error)
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        """Give up on a stream whose answer failed, with an error if even that still goes out."""
        if self._streams.pop(stream.request.key, None):
            self._tenants.leave(stream.tenant)
            self._metrics.ended("error")
            stream.settle(answered=False)
        try:
            stream.channel.fail(stream.error or RequestError(ErrorCode.INTERNAL, "unknown"))
        except Exception:
            log.exception("request %d: its error could not be sent", stream.request.key)

    def _greet(self) -> None:
        """Send an empty response on streams that have waited long for their first token."""
        unanswered = self._unanswered
        while unanswered:
            stream = unanswered[0]
            open_still = not stream.sent and stream.request.key in self._streams
            if open_still and time.monotonic() < stream.arrived + (self._first_response or 0.0):
                return
            unanswered.popleft()
            if open_still:
                self._guarded(stream, lambda stream: self._deliver(stream, anyway=True))

    def _deliver(self, stream: Stream, *, anyway: bool = False) -> None:
        """Send what there is to send. anyway: be it nothing."""
        if stream.request.key not in self._streams:  # closed, or dropped
            return
        if not stream.ended:
            if not stream.call.stream:
                return
            for sample in stream.samples:
                sample.speak()
            if not (anyway or any([sample.text for sample in stream.samples])):
                return
        outputs = self._outputs(stream) if not stream.error else {}
        if stream.error:
            if stream.error.code is ErrorCode.INTERNAL and stream.error is not self._died:
                log.error("request %d: %s", stream.request.key, stream.error)
            self._close(stream, stream.error.outcome)
            self._metrics.flush()
            _tell(stream)
            return
        if stream.finished:
            self._close(stream, _outcome(stream))
            self._metrics.flush()
        stream.channel.send(outputs, final=stream.finished)

    def _outputs(self, stream: Stream) -> dict[str, np.ndarray]:
        """What was not sent yet. Where that would be more than one request may get, it has an error instead."""
        call, logprobs = stream.call, stream.request.sampling.logprobs is not None
        outputs = write_response(
            call,
            [sample.send(offsets=call.return_text_offsets, logprobs=logprobs) for sample in stream.answers],
            prompt_token_ids=stream.request.prompt_token_ids,
            first=not stream.sent,
            prompt_logprobs=stream.prompt_logprobs,
            prompt_text_offsets=stream.prompt_offsets,
            token_text=stream.token_text,
            receipt=stream.usage_receipt() if stream.finished and call.return_receipt else None,
        )
        stream.sent, stream.prompt_logprobs, stream.prompt_offsets = True, None, None
        stream.sent_bytes += RESPONSE_BYTES + sum(map(_nbytes, outputs.values()))
        if stream.sent_bytes > self._max_response_mib << 20:
            reason = (
                f"its answer is larger than max_response_mib={self._max_response_mib}; ask for fewer tokens, or less"
            )
            stream.error = RequestError(ErrorCode.UNAVAILABLE, f"{reason} of each")
            self._abort(stream.request.key)
        return outputs

    def _close(self, stream: Stream, outcome: str) -> None:
        """Forget the stream, and book what it took."""
        stream.settle(answered=stream.error is None)
        del self._streams[stream.request.key]
        self._tenants.leave(stream.tenant)
        self._metrics.ended(outcome)
        if stream.first_token is None or stream.last_token is None:
            return
        self._metrics.answered(
            prompt=len(stream.request.prompt_token_ids),
            generated=sum(sample.num_tokens for sample in stream.samples),
            n=stream.request.sampling.n,
            seconds=stream.last_token - stream.arrived,
        )
        longest = max(sample.num_tokens for sample in stream.samples)
        if longest > 1:
            self._metrics.time_per_output_token.observe((stream.last_token - stream.first_token) / (longest - 1))

    def _poll(self) -> None:
        """End those that are overdue, and forget sessions whose time is over."""
        now = time.monotonic()
        if now < self._next_poll:
            return
        assert self._engine is not None
        self._sessions.expire()
        self._dismiss_lookers(now)
        if (seconds := self._engine.busy_seconds) > self._stall_seconds:
            self._fail_stalled(seconds)
        if self._streams and now >= self._next_audit and not self._died:
            self._next_audit = now + AUDIT_SECONDS
            self._engine.report_unknown(tuple(self._streams))
        for stream in [stream for stream in self._streams.values() if now > stream.deadline]:
            self._guarded(stream, self._expire)
        self._next_poll = now + max(POLL_SECONDS, (time.monotonic() - now) / POLL_SHARE)

    def _fail_stalled(self, seconds: float) -> None:
        """All that is open, as nobody knows whether the step will end. If it does, what it gave is dropped."""
        reason = f"a step has taken {seconds:.0f} s, more than stall_timeout={self._stall_seconds:g}; send it again"
        going_on = [stream for stream in self._streams.values() if not stream.ended]
        self._fail(going_on, RequestError(ErrorCode.UNAVAILABLE, reason))

    def _leave(self, left: list[PollResult[Stream]]) -> None:
        """End those that have not ended by themselves meanwhile. Who entered just then may have been asked twice."""
        for stream, error in [one for found in left for one in found.failed]:
            if self._goes_on(stream):
                self._give_up(stream, error)
        gone = {stream.request.key: stream for found in left for stream in found.gone if self._goes_on(stream)}
        self._fail(list(gone.values()), RequestError(ErrorCode.CANCELLED, "the request was cancelled by its client"))
        for stream in [stream for found in left for stream in found.stopped]:
            if self._goes_on(stream) and stream.cut is None:
                self._guarded(stream, lambda stream: self._cut(stream, FinishReason.CANCELLED))

    def _is_open(self, stream: Stream) -> bool:
        return stream.request.key in self._streams

    def _goes_on(self, stream: Stream) -> bool:
        return self._is_open(stream) and not stream.ended

    def _fail(self, streams: list[Stream], error: RequestError) -> None:
        """All are counted before the first of them is told."""
        for stream in streams:
            stream.error = error
            self._abort(stream.request.key)
            self._guarded(stream, lambda stream: self._close(stream, error.outcome))
        self._metrics.flush()
        for stream, answer in self._round_trips.each(_tell, streams):
            if isinstance(answer, Exception):
                self._give_up(stream, answer)

    def _expire(self, stream: Stream) -> None:
        if stream.call.embedding:  # of which a part is of no use
            reason = "the time limit passed before the embedding was there"
            stream.error = RequestError(ErrorCode.DEADLINE_EXCEEDED, reason)
            self._abort(stream.request.key)
            self._deliver(stream)
            return
        self._cut(stream, stream.cut or FinishReason.TIMEOUT)

    def _cut(self, stream: Stream, reason: FinishReason) -> None:
        """End it with what there is. How the outputs of a search go on after what all of them have, only the engine
        knows: it is asked, and ends them. One that does not answer does not keep the stream open."""
        if stream.is_search and stream.cut is None and stream.entered is not None:
            assert self._engine is not None
            stream.cut, stream.deadline = reason, time.monotonic() + GRACE_SECONDS
            self._engine.expire(stream.request.key)
            return
        stream.end(reason)
        assert self._engine is not None
        self._engine.end_all(stream.request.key)
        self._deliver(stream)

    def _abort(self, key: int) -> None:
        assert self._engine is not None
        self._engine.abort(key)

    def _end(self, key: int, index: int) -> None:
        assert self._engine is not None
        self._engine.end(key, index)


@contextmanager
def _going_on() -> Iterator[None]:
    """What goes wrong between the streams is none's: all of them are served on."""
    try:
        yield
    except Exception:
        log.exception("something between the streams went wrong")


def _tell(stream: Stream) -> None:
    """Its error."""
    assert stream.error is not None
    stream.channel.fail(stream.error)


def _answer(channel: Channel, answer: Callable[[Channel], None]) -> None:
    """One that is no stream's."""
    try:
        answer(channel)
    except Exception as error:
        log.exception("a question could not be answered")
        with suppress(Exception):
            channel.fail(internal_error(error))


def _nbytes(tensor: np.ndarray) -> int:
    return sum(map(len, tensor)) if tensor.dtype == np.object_ else tensor.nbytes


def _outcome(stream: Stream) -> str:
    """Of a request whose samples may have ended in several ways: the one that a user would rather know of."""
    reasons = {sample.finish for sample in stream.answers}
    return next(reason.value for reason in reversed(FinishReason) if reason in reasons)
