"""Requests on their way through the engine's model: each row is one of its requests, on a thread that waits for it.

The server calls a model from another one (BLS) only with a call that blocks until the first response, and an iterator
that blocks for each further one; so a row has a thread. The server holds one of its own threads until that first
response, of 32, and those are the ones that send our answers: therefore the engine is asked to announce each request.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged_backend import wire
from paged_backend.channel import Channel
from paged_backend.request import ErrorCode, RequestError
from paged_backend.trtllm import replies, requests
from paged_backend.trtllm.requests import Ask

log = logging.getLogger("paged_llm")

_GONE = re.compile("is not (ready|healthy)|unknown model")  # in the server's own words; it tells models no classes

POLL_SECONDS = 0.1  # how often it is asked whether clients are gone, as in tensorrtllm_backend
POLL_SHARE = 0.1  # of a thread's time at the most
MAX_ROWS = 1024  # open at a time: each has a thread
STOP_SECONDS = 5.0  # that threads get to end in when the model is unloaded


@dataclass(eq=False)
class Job:
    """One request of a client's. The lock guards all of it: rows end on threads of their own."""

    channel: Channel
    request_id: str
    parameters: dict[str, Any]
    timeout_us: int
    sequence_id: int | str
    flags: int
    rows: list[Row] = field(default_factory=list)
    stopping: bool = False  # asked to end, with what it has
    lock: threading.Lock = field(default_factory=threading.Lock)

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
    id: str  # the engine's request
    ended: bool = False  # whether its last response has been sent


class Relay:
    """Of one model. `submit` never raises: what is wrong with a request goes back to its client."""

    def __init__(self, pb_utils: Any, model: str, engine: str):
        """`pb_utils` is the module that the server gives its Python models; `engine` the model that generates."""
        self._pb_utils = pb_utils
        self._model = model
        self._engine = engine
        self._rows: dict[Row, threading.Thread] = {}  # guarded by the lock
        self._lock = threading.Lock()
        self._stopping = False
        self._wake = threading.Event()  # something is to be stopped, or the poller itself
        self._poller = threading.Thread(target=self._poll, name="poller", daemon=True)
        self._poller.start()

    def stop(self) -> None:
        """Wait for the threads. The server calls this once every request has ended."""
        self._stopping = True
        self._wake.set()
        self._poller.join()
        for thread in list(self._rows.values()):
            thread.join(STOP_SECONDS)

    def submit(self, pb_request: Any) -> None:
        try:
            channel = Channel(self._pb_utils, pb_request, str)
        except Exception:
            log.exception("a request without a way back")
            return
        try:
            self._take(channel)
        except RequestError as error:
            _refuse(channel, error)
        except Exception as error:
            log.exception("a request could not be taken")
            _refuse(channel, _internal(error))

    def _take(self, channel: Channel) -> None:
        tensors, parameters, timeout_us, sequence_id, flags, request_id = channel.received()
        if requests.is_stop(tensors):
            self._stop_requests(request_id)
            channel.send({}, final=True)
            return
        asks = requests.read(self._model, tensors)
        job = Job(channel, request_id, parameters, timeout_us, sequence_id, flags)
        job.rows = [Row(job, ask, f"{self._model}-{uuid.uuid4()}") for ask in asks]
        with self._lock:
            if len(self._rows) + len(job.rows) > MAX_ROWS:
                raise RequestError(ErrorCode.UNAVAILABLE, f"{len(self._rows)} rows are open; at most {MAX_ROWS} may be")
            threads = {row: threading.Thread(target=self._run, args=[row], daemon=True) for row in job.rows}
            self._rows |= threads
        for thread in threads.values():
            thread.start()

    def _run(self, row: Row) -> None:
        try:
            for response in self._exec(row):
                self._relay(row, response)
            if not row.ended:
                raise RequestError(ErrorCode.INTERNAL, "the engine's answer has no end")
        except RequestError as error:
            if row.job.stopping and error.code is ErrorCode.CANCELLED:
                row.job.answer(row, [{}], last=True)
            else:
                _refuse(row.job, error)
        except Exception as error:
            log.exception("a request could not be answered")
            _refuse(row.job, _internal(error))
        finally:
            with self._lock:
                del self._rows[row]

    def _relay(self, row: Row, response: dict[str, np.ndarray]) -> None:
        last = replies.is_last(response)
        row.job.answer(row, list(replies.write(row.ask, response)), last=last)

    def _exec(self, row: Row) -> Iterator[dict[str, np.ndarray]]:
        """What the engine answers. Ends early, without an error, where the client has been answered by others."""
        job = row.job
        if job.channel.closed:
            return
        inputs = [self._pb_utils.Tensor(name, value) for name, value in row.ask.tensors.items()]
        request = self._pb_utils.InferenceRequest(
            model_name=self._engine,
            request_id=row.id,
            inputs=inputs,
            requested_output_names=[],
            correlation_id=job.sequence_id,
            flags=job.flags,
            timeout=job.timeout_us,
            parameters=job.parameters,
        )
        for response in request.exec(decoupled=True):
            if response.has_error():
                raise engine_error(row.ask, response.error().message())
            outputs = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            if "error" in outputs:
                raise engine_error(row.ask, outputs["error"][0].decode())
            if outputs:  # else it announces that the request is let in
                yield outputs

    def _stop_requests(self, request_id: str) -> None:
        """End the open requests of that id."""
        if not request_id:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "stop: needs the request id of what is to be stopped")
        for row in self._open():
            if row.job.request_id == request_id:
                row.job.stopping = True
        self._wake.set()

    def _stop(self, row: Row) -> None:
        """Ask the engine to end a row's request; nothing happens where that has not come to it yet."""
        request = self._pb_utils.InferenceRequest(
            model_name=self._engine,
            request_id=row.id,
            inputs=[self._pb_utils.Tensor("stop_request", np.array([True]))],
            requested_output_names=[],
        )
        try:
            for response in request.exec(decoupled=True):
                if response.has_error():
                    log.debug("%s could not be stopped: %s", row.id, response.error().message())
        except Exception:
            log.exception("%s could not be stopped", row.id)

    def _open(self) -> list[Row]:
        with self._lock:
            return list(self._rows)

    def _poll(self) -> None:
        """Notice who has gone, and end what nobody waits for any more, until it has ended."""
        wait = POLL_SECONDS
        while True:
            self._wake.wait(wait)
            self._wake.clear()
            if self._stopping:
                return
            began = time.monotonic()
            rows = self._open()
            for job in {row.job for row in rows}:
                self._ask(job)
            for row in rows:
                if (row.job.stopping or row.job.channel.closed) and not row.ended:
                    self._stop(row)
            wait = max(POLL_SECONDS, (time.monotonic() - began) / POLL_SHARE)

    def _ask(self, job: Job) -> None:
        """A round trip to the server."""
        try:
            if not job.channel.closed and job.channel.is_cancelled():
                job.fail(RequestError(ErrorCode.CANCELLED, "the request was cancelled by its client"))
        except Exception:
            log.exception("a client could not be asked whether it is gone")


def engine_error(ask: Ask, message: str) -> RequestError:
    """The error that a message of the engine's model, or of the server about it, stands for."""
    name, colon, rest = message.removeprefix(wire.ERROR_PREFIX).partition(": ")
    if colon and name in ErrorCode.__members__:
        return RequestError(ErrorCode[name], ask.in_its_words(f" {rest}").strip())
    if _GONE.search(message):
        return RequestError(ErrorCode.UNAVAILABLE, f"the engine's model does not answer: {message}")
    return RequestError(ErrorCode.INVALID_ARGUMENT, message, verbatim=True)


def _internal(error: Exception) -> RequestError:
    return RequestError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")


def _refuse(to: Channel | Job, error: RequestError) -> None:
    """Whatever is in the way: what the server's `execute` raises ends other requests, too."""
    try:
        to.fail(error)
    except Exception:
        log.exception("a request could not be answered with %s", error)
