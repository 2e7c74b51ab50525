"""A lightweight load generator: sends many requests over a few gRPC calls and records the time of each response.

It complements perf_analyzer, which is the reference but uses more CPU time per response. Requests share a call, as with
tritonclient's `async_stream_infer`, so a response costs one protobuf message and a lookup. The outputs are not decoded.
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

from paged_client import grpc_wire
from paged_client.addresses import grpc_target
from paged_client.types import PagedError
from paged_client.wire import Values

MakeRequest = Callable[[str, Any, str], Any]  # (model, item, request id) -> ModelInferRequest
NUM_CALLS = 4  # gRPC calls, each with a reader thread; one receives about 12,000 responses per second


@dataclass
class ResponseTimes:
    """Times of one request, in seconds of time.perf_counter()."""

    sent: float
    stamps: list[float] = field(default_factory=list)  # times of its responses, including the final one


class _Call:
    """One gRPC call that carries many requests, and the thread that reads its responses."""

    def __init__(self, stub: Any, load: _Load) -> None:
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
        times, clock = self._load.times, time.perf_counter
        try:
            for response in self._call:
                now = clock()
                if response.error_message:
                    raise PagedError.parse(response.error_message, "UNKNOWN")
                inner = response.infer_response
                times[int(inner.id)].stamps.append(now)
                if inner.parameters["triton_final_response"].bool_param:
                    self._load.request_finished(self)
        except grpc.RpcError as error:
            self._load.fail(grpc_wire.rpc_error(error, self._load.url))
        except Exception as error:
            self._load.fail(error)


class _Load:
    """The requests of one run, and the response times of those that were sent."""

    def __init__(self, url: str, model: str, items: Sequence[Any], make_request: MakeRequest) -> None:
        self.url = url
        self._requests = [make_request(model, item, str(index)) for index, item in enumerate(items)]
        self.times = [ResponseTimes(0.0) for _ in items]
        self._channels = [
            # Without a local subchannel pool, channels with equal options share a connection.
            grpc.insecure_channel(url, (*grpc_wire.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))
            for _ in range(min(NUM_CALLS, len(items)))
        ]
        self._lock = threading.Lock()
        self._next = 0
        self._num_unfinished = len(items)
        self._refill = False
        self._error: Exception | None = None
        self._done = threading.Event()
        # Created last: a call starts its reader thread, which may report an error at once.
        self._calls = [_Call(service_pb2_grpc.GRPCInferenceServiceStub(channel), self) for channel in self._channels]

    def closed_loop(self, concurrency: int) -> None:
        """Keep `concurrency` requests open: send the next one whenever one finishes."""
        self._refill = True
        for index in range(min(concurrency, len(self._requests))):
            self._send_next(self._calls[index % len(self._calls)])

    def open_loop(self, arrivals: Sequence[float]) -> None:
        """Send each request at its arrival time, in seconds from now, however many are open."""
        started = time.perf_counter()
        for index, arrival in enumerate(arrivals):
            due = started + arrival
            if (wait := due - time.perf_counter()) > 0:
                time.sleep(wait)
            # Latency counts from the scheduled time: a late load generator must not hide server latency.
            self._send_next(self._calls[index % len(self._calls)], due)

    def _send_next(self, call: _Call, due: float | None = None) -> None:
        with self._lock:
            index, self._next = self._next, self._next + 1
        if index < len(self._requests):
            self.times[index].sent = due or time.perf_counter()
            call.send(self._requests[index])

    def request_finished(self, call: _Call) -> None:
        """Handle a final response. Runs on the reader thread of `call`."""
        with self._lock:
            self._num_unfinished -= 1
            if not self._num_unfinished:
                self._done.set()
        if self._refill:
            self._send_next(call)

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._done.set()

    def wait(self) -> list[ResponseTimes]:
        """Wait for all requests and return their times. Raises PagedError, or the error that ended a call."""
        self._done.wait()
        if self._error:
            raise self._error
        return self.times

    def close(self) -> None:
        for channel in self._channels if self._error else ():
            channel.close()
        for call in self._calls:
            call.close()
        for channel in self._channels:
            channel.close()


@contextmanager
def _load(url: str, model: str, items: Sequence[Any], make_request: MakeRequest) -> Iterator[_Load]:
    load = _Load(grpc_target(url), model, items, make_request)
    try:
        yield load
    finally:
        load.close()


def closed_loop(
    url: str, model: str, items: Sequence[Any], concurrency: int, make_request: MakeRequest = grpc_wire.infer_request
) -> list[ResponseTimes]:
    """Send a request for every item, with `concurrency` of them open at any time, and return their times.

    `make_request` encodes an item; by default the items are Values. Raises PagedError if a request fails.
    """
    with _load(url, model, items, make_request) as load:
        load.closed_loop(concurrency)
        return load.wait()


def open_loop(url: str, model: str, items: Sequence[Values], arrivals: Sequence[float]) -> list[ResponseTimes]:
    """Send each request at its arrival time in seconds, and return their times. Raises PagedError if one fails."""
    assert len(arrivals) == len(items)
    with _load(url, model, items, grpc_wire.infer_request) as load:
        load.open_loop(arrivals)
        return load.wait()
