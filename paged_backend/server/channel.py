"""One request: what came, and the way back to its client, with the promise of exactly one final response."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.server.wire.write import error_text

_CODES = {  # our classes by the names of Triton's codes
    ErrorCode.INVALID_ARGUMENT: "INVALID_ARG",
    ErrorCode.UNAVAILABLE: "UNAVAILABLE",
    ErrorCode.CANCELLED: "CANCELLED",
    ErrorCode.DEADLINE_EXCEEDED: "CANCELLED",  # Triton has none for it; the text names ours
    ErrorCode.INTERNAL: "INTERNAL",
}


# Tensors by name, the request's parameters, its time limit in microseconds (0: none), its sequence (0 or "": none), its
# flags, and its id ("": none).
Received = tuple[dict[str, np.ndarray], dict[str, Any], int, int | str, int, str]


class Channel(Protocol):
    """Owned by one thread at a time: the one that admits the request, then the responder's; only whether it was
    cancelled may be asked from another one as well. Sending and asking may wait for another process: never on the
    engine's thread."""

    closed: bool  # whether the final response has been sent
    stopped: bool  # whether its client has asked it to end with what there is

    def received(self) -> Received:
        """Raises RequestError for what cannot be read."""

    def send(self, outputs: Mapping[str, np.ndarray], *, final: bool) -> None: ...

    def fail(self, error: RequestError) -> None:
        """End the request with an error. Does nothing where it has ended already."""

    def is_cancelled(self) -> bool:
        """Whether the client is gone or has called the request off. False while a response is on its way to it, and
        after the last."""


class ServerChannel:
    """Of a request of the server's."""

    def __init__(self, pb_utils: Any, request: Any, error_text: Callable[[RequestError], str] = error_text):
        """`error_text`: what the client reads of an error."""
        self._pb_utils = pb_utils
        self._request = request
        self._sender = request.get_response_sender()
        self._error_text = error_text
        self._busy = threading.Lock()  # with a round trip: the server forgets a request with its final response
        self.closed = False
        self.stopped = False

    def received(self) -> Received:
        request = self._request
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}  # the server lets no others in
        try:
            parameters = json.loads(request.parameters() or "{}")
            own = request.timeout(), request.correlation_id(), request.flags(), request.request_id()
        except UnicodeDecodeError as error:  # over HTTP a name or a value may be any bytes
            reason = f"the request's parameters or id: byte {error.start} is not valid UTF-8; send UTF-8 text"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, reason) from None
        return tensors, parameters, *own

    def send(self, outputs: Mapping[str, np.ndarray], *, final: bool) -> None:
        """A round trip to the server process."""
        tensors = [self._pb_utils.Tensor(name, value) for name, value in outputs.items()]
        self._send(self._pb_utils.InferenceResponse(output_tensors=tensors), final)

    def fail(self, error: RequestError) -> None:
        if not self.closed:
            code = getattr(self._pb_utils.TritonError, _CODES[error.code])
            failure = self._pb_utils.TritonError(self._error_text(error), code)
            self._send(self._pb_utils.InferenceResponse(output_tensors=[], error=failure), True)

    def is_cancelled(self) -> bool:
        """A round trip, like `send`."""
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
            self.closed = final  # not before: where sending failed, an error may still go out
            if final:  # not left to the collector, which may come when the server has gone
                self._request = self._sender = None
