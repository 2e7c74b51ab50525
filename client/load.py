"""A lean load generator: many requests over a few gRPC calls, with a time stamp for each response.

Beside perf_analyzer, which is the reference but spends more on a response. Requests share a call, as
tritonclient's `async_stream_infer` lets them, so a response costs one protobuf message and a look-up. What an
answer says is not read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from client import grpc_wire
from client.types import PagedError
from client.wire import Values

Request = Callable[[str, Any, str], Any]  # (model, what is asked, request id) -> ModelInferRequest
CALLS = 4  # gRPC calls, each with a reader thread; one carries about 12,000 responses a second


@dataclass
class ResponseTimes:
    """Times of one request, by time.perf_counter()."""

    sent: float
    stamps: list[float] = field(default_factory=list)  # of its responses, the last one included


class _Call:
    """One gRPC call and the requests that go through it. `ended` is called with each request's id, on the reader's
    thread."""

    def __init__(self, stub: Any, load: _Load):
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._call = stub.ModelStreamInfer(iter(self._requests.get, None))
        self._load = load
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, request: Any) -> None:
        self._requests.put(request)

    def close(self) -> None:
        self._requests.put(None)
        self._reader.join()

    def _read(self) -> None:
        answers, clock = self._load.answers, time.perf_counter
        try:
            for response in self._call:
                now = clock()
                if response.error_message:
                    raise PagedError.parse(response.error_message, "UNKNOWN")
                inner = response.infer_response
                index = int(inner.id)
                answers[index].stamps.append(now)
                if inner.parameters["triton_final_response"].bool_param:
                    self._load.ended(self)
        except grpc.RpcError as error:
            self._load.fail(grpc_wire.rpc_error(error))
        except Exception as error:
            self._load.fail(error)


class _Load:
    """The requests of one run: which are still to be sent, and what came back."""

    def __init__(self, url: str, model: str, asks: Sequence[Any], request: Request):
        self._requests = [request(model, ask, str(index)) for index, ask in enumerate(asks)]
        self.answers = [ResponseTimes(0.0) for _ in asks]
        self._channels = [
            # Calls of one channel would share a connection, and a channel with equal options, too.
            grpc.insecure_channel(url, (*grpc_wire.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))
            for _ in range(min(CALLS, len(asks)))
        ]
        self._calls = [_Call(service_pb2_grpc.GRPCInferenceServiceStub(one), self) for one in self._channels]
        self._lock = threading.Lock()
        self._next = 0
        self._left = len(asks)
        self._refill = False
        self._error: Exception | None = None
        self._done = threading.Event()

    def closed_loop(self, concurrency: int) -> None:
        """`concurrency` requests are open at any time: each that ends lets another begin."""
        self._refill = True
        for index in range(min(concurrency, len(self._requests))):
            self._send_next(self._calls[index % len(self._calls)])

    def open_loop(self, arrivals: Sequence[float]) -> None:
        """Each request at its own time, in seconds from now, however many are open."""
        started = time.perf_counter()
        for index, arrival in enumerate(arrivals):
            due = started + arrival
            if (wait := due - time.perf_counter()) > 0:
                time.sleep(wait)
            # From when it was due: a generator that lags must not make the server look better.
            self._send_next(self._calls[index % len(self._calls)], due)

    def _send_next(self, call: _Call, due: float | None = None) -> None:
        with self._lock:
            index, self._next = self._next, self._next + 1
        if index < len(self._requests):
            self.answers[index].sent = due or time.perf_counter()
            call.send(self._requests[index])

    def ended(self, call: _Call) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._done.set()
        if self._refill:
            self._send_next(call)

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._done.set()

    def wait(self) -> list[ResponseTimes]:
        """Raises PagedError, or what else ended a call."""
        self._done.wait()
        if self._error:
            raise self._error
        return self.answers

    def close(self) -> None:
        for channel in self._channels if self._error else ():
            channel.close()
        for call in self._calls:
            call.close()
        for channel in self._channels:
            channel.close()


@contextmanager
def _load(url: str, model: str, asks: Sequence[Any], request: Request) -> Iterator[_Load]:
    load = _Load(grpc_wire.check_target(url), model, asks, request)
    try:
        yield load
    finally:
        load.close()


def closed_loop(
    url: str, model: str, asks: Sequence[Any], concurrency: int, request: Request = grpc_wire.infer_request
) -> list[ResponseTimes]:
    """Send every request, `concurrency` of them open at any time. `request` makes one for the wire of each of `asks`,
    by default of Values. Raises PagedError where one fails."""
    with _load(url, model, asks, request) as load:
        load.closed_loop(concurrency)
        return load.wait()


def open_loop(url: str, model: str, asks: Sequence[Values], arrivals: Sequence[float]) -> list[ResponseTimes]:
    """Send every request at its time, in seconds. Raises PagedError where one fails."""
    assert len(arrivals) == len(asks)
    with _load(url, model, asks, grpc_wire.infer_request) as load:
        load.open_loop(arrivals)
        return load.wait()
