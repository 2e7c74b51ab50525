"""Requests on their way to the engine's model, each row as one of its requests, and what it answers on its way back.

The server's own way for one model to call another (BLS) costs a thread for each row, milliseconds for each token, and
in some versions the server's life; the local socket of the engine costs none of these.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, internal_error
from paged_backend.server.channel import Channel, Received, ServerChannel
from paged_backend.server.round_trips import RoundTrips
from paged_backend.server.watch import CancellationPoller, PollResult
from paged_backend.trtllm.caps import DEFAULT_CAPS, RelayCaps
from paged_backend.trtllm.interfaces import Ask, Interface
from paged_backend.trtllm.links import Link, Links, Outputs, RetryElsewhere, control_frame
from paged_backend.trtllm.rows import use_client_names

log = logging.getLogger("paged_llm")


@dataclass(eq=False)
class Job:
    """One request of a client's. The lock guards all of it: a link's thread answers, the watch's asks."""

    channel: Channel
    request_id: str
    rows: list[Row] = field(default_factory=list)
    stopping: bool = False  # asked to end, with what it has
    lock: threading.Lock = field(default_factory=threading.Lock)
    entered: float | None = None  # which only the engine knows

    def answer(self, row: Row, outputs: list[Mapping[str, np.ndarray]], *, last: bool) -> None:
        with self.lock:
            row.ended = row.ended or last
            final = all(one.ended for one in self.rows)
            for index, one in enumerate(outputs):
                if not self.channel.closed:
                    self.channel.send(one, final=final and index == len(outputs) - 1)

    def fail(self, error: RequestError) -> None:
        """End the whole request. Does nothing where it has ended already."""
        with self.lock:
            self.channel.fail(error)


@dataclass(eq=False)
class Row:
    job: Job
    ask: Ask
    id: int  # of the engine's request, on its link
    received: Received  # by the engine
    link: Link
    tried: set[str] = field(default_factory=set)  # the names of the links that it had before
    again: RequestError | None = None  # why its link brings no answer: another is to; guarded by the relay's lock
    asked: bool = False  # whether the engine has got it
    answered: bool = False  # whether the engine has begun to answer it
    told: bool = False  # whether the engine was told to end it
    ended: bool = False  # whether its last response has been sent

    def pack(self, link: Link) -> bytes:
        return link.pack(self.id, self.received)

    @property
    def may_move(self) -> bool:
        """Whether another instance may take it, now that this link has ended. What ended without a word may have been
        ended by the row: only one more instance gets that."""
        return not self.answered and (self.link.leaving or not self.tried)


class Relay:
    """Of one model. `submit` never raises: what is wrong with a request goes back to its client."""

    def __init__(
        self,
        pb_utils: Any,
        model: str,
        engine: str,
        interface: Interface | None = None,
        caps: RelayCaps = DEFAULT_CAPS,
    ):
        """`pb_utils` is the module that the server gives its Python models; `engine` the model that generates;
        `interface` what clients send and get, by default that of the model's name."""
        self._pb_utils = pb_utils
        self._model = model
        self._interface = interface or Interface(model, caps=caps)
        self._links = Links(engine, self._hear, self._lose, caps.max_frame_bytes)
        self._max_rows = caps.max_open_rows
        self._ids = itertools.count()
        self._rows: dict[int, Row] = {}  # those that the engine has not ended; guarded by the lock
        self._lock = threading.Lock()
        self._stopping = False
        self._wake = threading.Event()  # the engine is to be told of something, or asked again, or the teller is to end
        self._teller = threading.Thread(target=self._tell_all, name="teller", daemon=True)
        self._teller.start()
        self._round_trips = RoundTrips()
        self._watch: CancellationPoller[Job] = CancellationPoller(
            lambda job: not job.channel.closed, self._round_trips, self._leave
        )
        self._watch.start()

    def stop(self) -> None:
        """End the threads, and what the engine still does. The server calls this once every request has ended."""
        self._watch.stop()
        self._round_trips.stop()
        self._stopping = True
        self._wake.set()
        self._teller.join()
        self._links.stop()

    def submit(self, pb_request: Any) -> None:
        try:
            channel = ServerChannel(self._pb_utils, pb_request, str)
        except Exception:
            log.exception("a request without a way back")
            return
        try:
            self._take(channel)
        except RequestError as error:
            _refuse(channel, error)
        except Exception as error:
            log.exception("a request could not be taken")
            _refuse(channel, internal_error(error))
            self._wake.set()

    def _take(self, channel: Channel) -> None:
        tensors, parameters, timeout_us, sequence_id, flags, request_id = channel.received()
        if np.any(tensors.get("stop", False)):
            self._stop_requests(request_id)
            self._interface.confirm_stop(channel)
            return
        asks = self._interface.read(tensors)
        parameters = self._interface.parameters(parameters)
        job, link = Job(channel, request_id), self._links.pick()
        own = parameters, timeout_us, sequence_id, flags
        for ask in asks:
            received = ask.tensors, *own, f"{self._model}-{uuid.uuid4()}"
            job.rows.append(Row(job, ask, next(self._ids), received, link))
        frames = [row.pack(link) for row in job.rows]
        self._register(job.rows)
        for row, frame in zip(job.rows, frames, strict=True):
            self._send(row, frame)
            row.asked = True
        self._watch.add(job)
        if job.stopping or channel.closed or any(row.again for row in job.rows):  # since before all of it was sent
            self._wake.set()

    def _register(self, rows: list[Row]) -> None:
        with self._lock:
            if len(self._rows) + len(rows) > self._max_rows:
                reason = f"{len(self._rows)} rows are open, and {len(rows)} would come; at most {self._max_rows} may be"
                raise RequestError(ErrorCode.UNAVAILABLE, f"{reason} (max_open_rows)")
            for row in rows:
                self._rows[row.id] = row
                row.link.num_open += 1

    def _forget(self, row: Row) -> None:
        with self._lock:
            if self._rows.pop(row.id, None):
                row.link.num_open -= 1

    def _send(self, row: Row, frame: bytes) -> None:
        try:
            row.link.send(frame)
        except OSError:
            self._lose(row.link)

    def _hear(self, row_id: int, answer: Outputs | RequestError, last: bool) -> None:
        """What the engine answers to a row."""
        row = self._rows.get(row_id)
        if row is None:
            return
        if isinstance(answer, RetryElsewhere):
            with self._lock:
                row.again = answer
            self._wake.set()
            return
        row.answered = True
        if last:
            self._forget(row)
        try:
            if not isinstance(answer, RequestError):
                row.job.answer(row, list(self._interface.write(row.ask, answer)), last=last)
            else:
                row.job.fail(RequestError(answer.code, use_client_names(str(answer), row.ask.renamed), verbatim=True))
        except Exception as error:
            log.exception("a request could not be answered")
            _refuse(row.job, internal_error(error))
        if row.job.channel.closed and any(one.id in self._rows for one in row.job.rows):
            self._wake.set()  # nobody waits for the others

    def _lose(self, link: Link) -> None:
        """What was open on a link that has ended can have no answer from it. May be called twice."""
        error = RequestError(ErrorCode.UNAVAILABLE, link.end)
        with self._lock:
            lost = [row for row in self._rows.values() if row.link is link and not row.again]
            for row in lost:
                row.again = error if row.may_move else None
            ended = [row for row in lost if not row.again]
        for row in ended:
            self._give_up(row, error)
        self._wake.set()

    def _give_up(self, row: Row, error: RequestError) -> None:
        self._forget(row)
        _refuse(row.job, error)
        self._wake.set()  # nobody waits for the others of its request

    def _ask_again(self, row: Row, error: RequestError) -> None:
        """Another instance. Where there is none, or the client has called the request off, `error` ends it."""
        link = None if row.job.stopping or row.job.channel.closed else self._other(row)
        if link is None:
            self._give_up(row, error)
            return
        with self._lock:
            row.tried.add(row.link.name)
            row.link.num_open -= 1
            row.link, row.again = link, None
            link.num_open += 1
        self._send(row, row.pack(link))

    def _other(self, row: Row) -> Link | None:
        try:
            return self._links.pick(row.tried | {row.link.name})
        except RequestError as error:
            log.debug("a request cannot be sent again: %s", error)
        except Exception:
            log.exception("a request could not be sent again")
        return None

    def _stop_requests(self, request_id: str) -> None:
        """End the open requests of that id."""
        if not request_id:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "stop: needs the request id of what is to be stopped")
        for row in self._open():
            if row.job.request_id == request_id:
                row.job.stopping = True
        self._wake.set()

    def _tell(self, row: Row) -> None:
        """The engine, that nobody waits for the row, or that what there is will do."""
        row.told = True
        self._send(row, control_frame(row.id, "cancel" if row.job.channel.closed else "stop"))

    def _open(self) -> list[Row]:
        with self._lock:
            return list(self._rows.values())

    def _leave(self, found: PollResult[Job]) -> None:
        """On the watch's thread."""
        for job, error in found.failed:
            log.error("a client could not be asked whether it is gone", exc_info=error)
            _refuse(job, internal_error(error))
        for job in found.gone:
            _refuse(job, RequestError(ErrorCode.CANCELLED, "the request was cancelled by its client"))
        self._wake.set()

    def _tell_all(self) -> None:
        """End what nobody waits for any more, and move what another instance is to take. In a thread of its own: the
        engine may take long to hear it."""
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stopping:
                return
            for row in self._open():
                try:
                    self._see_to(row)
                except Exception as error:  # which is not the others'
                    log.exception("a request could not be handed on")
                    self._give_up(row, internal_error(error))

    def _see_to(self, row: Row) -> None:
        closed = row.job.channel.closed
        if row.again and (row.asked or closed):
            self._ask_again(row, row.again)
        elif (row.job.stopping or closed) and row.asked and not row.told:
            self._tell(row)


def _refuse(to: Channel | Job, error: RequestError) -> None:
    """Whatever is in the way: what the server's `execute` raises ends other requests, too."""
    try:
        to.fail(error)
    except Exception:
        log.exception("a request could not be answered with %s", error)
