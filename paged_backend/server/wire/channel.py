"""A channel: one request of a client, and the way to send responses to it, of which exactly one is final."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, internal_error
from paged_backend.server.wire.responses import error_text

log = logging.getLogger("paged_llm")

_CODES = {  # names of Triton's error codes
    ErrorCode.INVALID_ARGUMENT: "INVALID_ARG",
    ErrorCode.UNAVAILABLE: "UNAVAILABLE",
    ErrorCode.CANCELLED: "CANCELLED",
    ErrorCode.DEADLINE_EXCEEDED: "CANCELLED",  # Triton has no such code, so only the text names the class
    ErrorCode.INTERNAL: "INTERNAL",
}


class Received(NamedTuple):
    """The request of a client."""

    tensors: dict[str, np.ndarray]  # by name
    parameters: dict[str, Any]
    timeout_us: int  # 0: no timeout
    sequence_id: int | str  # 0 or "": no sequence
    flags: int
    request_id: str  # "": no id


class Channel(Protocol):
    """The request and response side of one client request.

    Used by one thread at a time: the one that admits the request, then the responder's. `is_cancelled` may be called
    from another thread as well. Sending and polling may wait for another process, so the engine's thread does neither.
    """

    has_own_defaults: bool  # whether the interface of the client has its own defaults of sampling parameters
    closed: bool  # whether the final response has been sent
    stopped: bool  # whether the client has asked to end the request with the output so far

    def received(self) -> Received:
        """Return the request. Raises RequestError if it cannot be decoded."""

    def send(self, outputs: Mapping[str, np.ndarray], *, final: bool) -> None:
        """Send a response."""

    def fail(self, error: RequestError) -> None:
        """Send an error as the final response. Does nothing if the final response has been sent."""

    def is_cancelled(self) -> bool:
        """Return whether the client has disconnected or cancelled; False during a send and after the final response."""


class ServerChannel:
    """A request of Triton's Python backend."""

    has_own_defaults = False

    def __init__(self, pb_utils: Any, request: Any, error_text: Callable[[RequestError], str] = error_text):
        """error_text: returns the text of an error for the client."""
        self._pb_utils = pb_utils
        self._request = request
        self._sender = request.get_response_sender()
        self._error_text = error_text
        self._busy = threading.Lock()  # guards round trips: the server drops a request with its final response
        self.closed = False
        self.stopped = False

    def received(self) -> Received:
        request = self._request
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}  # all are declared
        try:
            parameters = json.loads(request.parameters() or "{}")
            own = request.timeout(), request.correlation_id(), request.flags(), request.request_id()
        except UnicodeDecodeError as error:  # names and values sent over HTTP may be any bytes
            reason = f"the request's parameters or id: byte {error.start} is not valid UTF-8; send UTF-8 text"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, reason) from None
        return Received(tensors, parameters | self._trace_context(), *own)

    def _trace_context(self) -> dict[str, str]:
        """Return the server's own trace context, `traceparent` and `tracestate`, if it traces the request."""
        context = self._request.trace().get_context()
        return json.loads(context) if context else {}

    def send(self, outputs: Mapping[str, np.ndarray], *, final: bool) -> None:
        """Send a response: a round trip to the server process."""
        tensors = [self._pb_utils.Tensor(name, value) for name, value in outputs.items()]
        self._send(self._pb_utils.InferenceResponse(output_tensors=tensors), final)

    def fail(self, error: RequestError) -> None:
        if not self.closed:
            code = getattr(self._pb_utils.TritonError, _CODES[error.code])
            failure = self._pb_utils.TritonError(self._error_text(error), code)
            self._send(self._pb_utils.InferenceResponse(output_tensors=[], error=failure), True)

    def is_cancelled(self) -> bool:
        """Ask the server: a round trip, like `send`."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            return not self.closed and self._sender.is_cancelled()
        finally:
            self._busy.release()

    def _send(self, response: Any, final: bool) -> None:
        assert not self.closed, "a response after FINAL"
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with self._busy:
            self._sender.send(response, flags=flags)
            self.closed = final  # set after a successful send: after a failed one an error may still be sent
            if final:  # released here, because the garbage collector may run after the server has exited
                self._request = self._sender = None


class Failable(Protocol):
    """A request that `send_error` can end with an error: a Channel, or a Job of trtllm/."""

    def fail(self, error: RequestError) -> None: ...


def send_error(channel: Failable, error: RequestError) -> None:
    """Send an error, and log it if that fails. Never raises: an exception in `execute` would fail other requests."""
    try:
        channel.fail(error)
    except Exception:
        log.exception("could not send the error: %s", error)


def respond(channel: Channel, answer: Callable[[], Mapping[str, np.ndarray]]) -> None:
    """Answer a control request with the outputs that `answer` returns, or with the error that it raises. Never
    raises."""
    try:
        channel.send(answer(), final=True)
    except Exception as error:
        log.exception("could not answer a control request")
        with suppress(Exception):
            channel.fail(internal_error(error))
