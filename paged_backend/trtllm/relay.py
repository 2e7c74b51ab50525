"""Forwards requests to the engine's model, one engine request per row, and its responses back to the client.

Triton's own way for one model to call another (BLS) needs a thread per row and milliseconds per token, and crashes the
server in some versions. The engine's local socket (utils/local_socket.py) avoids this.
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
from paged_backend.server.streams.polling import CancellationPoller, PollResult
from paged_backend.server.wire.channel import Channel, Received, ServerChannel, send_error
from paged_backend.trtllm.interfaces import Interface, RowRequest, create_interface, engine_parameters
from paged_backend.trtllm.limits import DEFAULT_LIMITS, RelayLimits
from paged_backend.trtllm.links import Link, Links, Outputs, RetryElsewhere, control_frame
from paged_backend.trtllm.rows import use_client_names

log = logging.getLogger("paged_llm")


@dataclass(eq=False)
class Job:
    """One client request. The lock guards its channel: a link's thread sends, the poller's thread cancels."""

    channel: Channel
    request_id: str
    rows: list[Row] = field(default_factory=list)
    stopping: bool = False  # whether the client asked to end it with the output so far
    lock: threading.Lock = field(default_factory=threading.Lock)
    scheduled_at: float | None = None  # unknown to the relay, so the poller treats the request as waiting

    def respond(self, row: Row, outputs: list[Mapping[str, np.ndarray]], *, last: bool) -> None:
        """Send the responses of a row. The last one of the last row is final."""
        with self.lock:
            row.ended = row.ended or last
            final = all(other.ended for other in self.rows)
            for index, response in enumerate(outputs):
                if not self.channel.closed:
                    self.channel.send(response, final=final and index == len(outputs) - 1)

    def fail(self, error: RequestError) -> None:
        """End the whole request. Does nothing if it has ended."""
        with self.lock:
            self.channel.fail(error)


@dataclass(eq=False)
class Row:
    """One row of a client request, which is one request to the engine."""

    job: Job
    row_request: RowRequest
    id: int  # id of the engine's request
    received: Received  # the engine's request
    link: Link
    tried: set[str] = field(default_factory=set)  # names of earlier links
    retry_error: RequestError | None = None  # the reason for a retry that is due; guarded by the relay's lock
    submitted: bool = False  # whether the engine's request has been sent
    answered: bool = False  # whether the engine has sent a response
    control_sent: bool = False  # whether the engine was asked to cancel or stop it
    ended: bool = False  # whether its last response has been sent

    def pack(self, link: Link) -> bytes:
        return link.pack(self.id, self.received)

    @property
    def can_move(self) -> bool:
        """Whether another instance may run the row after this link has ended.

        An instance that crashed may have crashed because of the row, so only one other instance gets it then.
        """
        return not self.answered and (self.link.unloading or not self.tried)


class Relay:
    """Forwards the requests of one model. `submit` never raises: errors of a request are sent to its client."""

    def __init__(
        self,
        pb_utils: Any,
        model: str,
        engine: str,
        interface: Interface | None = None,
        limits: RelayLimits = DEFAULT_LIMITS,
    ):
        """pb_utils: the module that Triton gives its Python models.
        engine: the name of the model that generates.
        interface: format of requests and responses; by default the format for the model's name."""
        self._pb_utils = pb_utils
        self._model = model
        self._interface = interface or create_interface(model, limits=limits)
        self._links = Links(engine, self._receive, self._on_link_ended, limits.max_frame_bytes)
        self._max_rows = limits.max_open_rows
        self._ids = itertools.count()
        self._rows: dict[int, Row] = {}  # rows that the engine has not ended; guarded by the lock
        self._lock = threading.Lock()
        self._stopping = False
        self._wake = threading.Event()  # set when a row is to be cancelled, stopped or moved, or the relay stops
        self._row_updater = threading.Thread(target=self._update_rows, name="row-updater", daemon=True)
        self._row_updater.start()
        self._poller: CancellationPoller[Job] = CancellationPoller(lambda job: not job.channel.closed, self._on_polled)
        self._poller.start()

    def stop(self) -> None:
        """Stop the threads and cancel what the engine still runs. Triton calls this once every request has ended."""
        self._poller.stop()
        self._stopping = True
        self._wake.set()
        self._row_updater.join()
        self._links.stop()

    def submit(self, pb_request: Any) -> None:
        """Forward one request of the server."""
        try:
            channel = ServerChannel(self._pb_utils, pb_request, str)
        except Exception:
            log.exception("could not get a response sender")
            return
        try:
            self._submit(channel)
        except RequestError as error:
            send_error(channel, error)
        except Exception as error:
            log.exception("unexpected error while forwarding a request")
            send_error(channel, internal_error(error))
            self._wake.set()

    def _submit(self, channel: Channel) -> None:
        tensors, parameters, timeout_us, sequence_id, flags, request_id = channel.received()
        if np.any(tensors.get("stop", False)):
            self._stop_requests(request_id)
            self._interface.confirm_stop(channel)
            return
        row_requests = self._interface.read(tensors)
        job, link = Job(channel, request_id), self._links.pick()
        own = engine_parameters(parameters), timeout_us, sequence_id, flags
        for row_request in row_requests:
            received = Received(row_request.tensors, *own, f"{self._model}-{uuid.uuid4()}")
            job.rows.append(Row(job, row_request, next(self._ids), received, link))
        frames = [row.pack(link) for row in job.rows]
        self._register(job.rows)
        for row, frame in zip(job.rows, frames, strict=True):
            self._send(row, frame)
            row.submitted = True
        self._poller.add(job)
        # The request may have been stopped, have ended or lost its link before all of its rows were sent.
        if job.stopping or channel.closed or any(row.retry_error for row in job.rows):
            self._wake.set()

    def _register(self, rows: list[Row]) -> None:
        with self._lock:
            if len(self._rows) + len(rows) > self._max_rows:
                reason = f"{len(self._rows)} rows are open and {len(rows)} are added; at most {self._max_rows} may be"
                raise RequestError(ErrorCode.UNAVAILABLE, f"{reason} open (max_open_rows)")
            for row in rows:
                self._rows[row.id] = row
                row.link.num_open += 1

    def _remove(self, row: Row) -> None:
        with self._lock:
            if self._rows.pop(row.id, None):
                row.link.num_open -= 1

    def _send(self, row: Row, frame: bytes) -> None:
        try:
            row.link.send(frame)
        except OSError:
            self._on_link_ended(row.link)

    def _receive(self, row_id: int, answer: Outputs | RequestError, last: bool) -> None:
        """Handle a response of the engine, on the link's thread."""
        row = self._rows.get(row_id)
        if row is None:
            return
        if isinstance(answer, RetryElsewhere):
            with self._lock:
                row.retry_error = answer
            self._wake.set()
            return
        row.answered = True
        if last:
            self._remove(row)
        try:
            if not isinstance(answer, RequestError):
                row.job.respond(row, list(self._interface.write(row.row_request, answer)), last=last)
            else:
                text = use_client_names(str(answer), row.row_request.renamed)
                row.job.fail(RequestError(answer.code, text, verbatim=True))
        except Exception as error:
            log.exception("could not send a response")
            send_error(row.job, internal_error(error))
        if row.job.channel.closed and any(other.id in self._rows for other in row.job.rows):
            self._wake.set()  # wakes the thread that cancels the other rows

    def _on_link_ended(self, link: Link) -> None:
        """Move or fail the open rows of a link. May be called twice."""
        error = RequestError(ErrorCode.UNAVAILABLE, link.end_reason)
        with self._lock:
            lost = [row for row in self._rows.values() if row.link is link and not row.retry_error]
            for row in lost:
                row.retry_error = error if row.can_move else None
            failed = [row for row in lost if not row.retry_error]
        for row in failed:
            self._fail(row, error)
        self._wake.set()

    def _fail(self, row: Row, error: RequestError) -> None:
        """End the row's request with an error; its other rows are cancelled."""
        self._remove(row)
        send_error(row.job, error)
        self._wake.set()

    def _retry(self, row: Row, error: RequestError) -> None:
        """Send the row to another instance. If there is none, or the request was cancelled, fail it with `error`."""
        link = None if row.job.stopping or row.job.channel.closed else self._pick_other(row)
        if link is None:
            self._fail(row, error)
            return
        with self._lock:
            row.tried.add(row.link.name)
            row.link.num_open -= 1
            row.link, row.retry_error = link, None
            link.num_open += 1
        self._send(row, row.pack(link))

    def _pick_other(self, row: Row) -> Link | None:
        try:
            return self._links.pick(row.tried | {row.link.name})
        except RequestError as error:
            log.debug("a request cannot be sent to another instance: %s", error)
        except Exception:
            log.exception("could not pick another instance for a request")
        return None

    def _stop_requests(self, request_id: str) -> None:
        """End the open requests with that id, keeping their output so far."""
        if not request_id:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, "stop: has no request id; set it to that of the request to end"
            )
        for row in self._open_rows():
            if row.job.request_id == request_id:
                row.job.stopping = True
        self._wake.set()

    def _open_rows(self) -> list[Row]:
        with self._lock:
            return list(self._rows.values())

    def _on_polled(self, result: PollResult[Job]) -> None:
        """End the requests whose clients cancelled, on the poller's thread."""
        for job, error in result.failed:
            log.error("could not poll a request for cancellation", exc_info=error)
            send_error(job, internal_error(error))
        for job in result.cancelled:
            send_error(job, RequestError(ErrorCode.CANCELLED, "the request was cancelled by its client"))
        self._wake.set()

    def _update_rows(self) -> None:
        """Cancel, stop and move rows, on a thread of its own: sending to the engine may block."""
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stopping:
                return
            for row in self._open_rows():
                try:
                    self._update(row)
                except Exception as error:
                    log.exception("could not move or end a row")
                    self._fail(row, internal_error(error))

    def _update(self, row: Row) -> None:
        closed = row.job.channel.closed
        if row.retry_error and (row.submitted or closed):
            self._retry(row, row.retry_error)
        elif (row.job.stopping or closed) and row.submitted and not row.control_sent:
            row.control_sent = True
            self._send(row, control_frame(row.id, "cancel" if closed else "stop"))
