"""Runs requests of other processes in this engine; the other side is `RemoteEngine`, which documents the frames.

local socket -- generate, control --> RemoteClient --> Engine
local socket <-- step, returned ----- RemoteClient <-- EngineService.emit --> outputs of own requests
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from transformers import PreTrainedTokenizerBase

from paged_backend.api.errors import CannotContinue, ErrorCode, RequestError
from paged_backend.api.limits import EngineLimits
from paged_backend.api.request import GenerateRequest, TokenDelta
from paged_backend.engine.engine import Engine
from paged_backend.engine.moved_blocks import BlockRun, read_blocks
from paged_backend.engine.outputs import Emit, EngineDied, EngineOutput, StepOutput
from paged_backend.engine.request_frames import read_request, write_delta
from paged_backend.scheduling.stats import Stats
from paged_backend.utils.local_socket import FrameError, pack

log = logging.getLogger("paged_llm")

FIRST_KEY = -(2**62)  # keys of requests of other processes; they are in front of own requests that wait
MAX_UNSTORED_BYTES = 64 << 20  # maximum bytes of received blocks; above it, a connection waits for the engine
STORE_SECONDS = 2.0  # maximum time that it waits, before the sender gives up
FLUSH_SECONDS = 5.0  # time to send what is queued before a connection is closed


@dataclass(eq=False)
class _Served:
    """A request of another process."""

    id: int  # chosen by that process
    left: set[int]  # samples that have not ended


class EngineService:
    """The requests of other processes, by key."""

    def __init__(self, limits: EngineLimits, tokenizer: PreTrainedTokenizerBase, emit: Emit):
        """emit: receives the outputs of the engine's own requests."""
        self._limits = limits
        self._tokenizer = tokenizer
        self._emit_own = emit
        self._engine: Engine | None = None
        self._submit: Callable[[GenerateRequest], None] | None = None
        self._check: Callable[[GenerateRequest], None] = lambda request: None
        self._unstored: list[BlockRun] = []  # guarded by the lock
        self._lock = threading.Lock()
        self._keys = itertools.count(FIRST_KEY)
        self._served: dict[int, RemoteClient] = {}  # by key
        self._clients: set[RemoteClient] = set()  # clients that have sent a request

    def start(
        self,
        engine: Engine,
        submit: Callable[[GenerateRequest], None],
        check: Callable[[GenerateRequest], None] = lambda request: None,
    ) -> None:
        """Accept requests.

        submit: runs a request that was announced to the engine. check: raises RequestError if a request cannot run.
        """
        self._engine, self._submit, self._check = engine, submit, check

    @property
    def num_open(self) -> int:
        """The number of requests of other processes."""
        return len(self._served)

    def serves(self, key: int) -> bool:
        """Return whether this is the key of a request of another process."""
        return key in self._served

    def emit(self, output: EngineOutput) -> None:
        """Pass outputs on, on the engine's thread: to other processes, and to `emit` of the constructor."""
        if self._clients and isinstance(output, StepOutput):
            output = self._emit_served(output)
        elif self._served and isinstance(output, EngineDied):
            error = RequestError(ErrorCode.UNAVAILABLE, output.reason)
            for key, client in list(self._served.items()):
                client.send_step([TokenDelta(key, error=error)], [], 0.0, 0.0)
                self._served.pop(key, None)
        self._emit_own(output)

    def forget(self, client: RemoteClient) -> None:
        """Send nothing more to a client: its connection has ended."""
        self._clients.discard(client)

    def give_back(self, key: int) -> None:
        """Tell the process of a request, which the engine no longer has, that it may continue elsewhere."""
        if client := self._served.pop(key, None):
            client.give_back(key)

    def connect(self, send: Callable[[bytes], None], end: Callable[[], None], max_frame_bytes: int) -> RemoteClient:
        """Return the client at the other end of a connection.

        send: sends a frame, or does nothing if the connection has ended; may block. end: closes the connection.
        """
        return RemoteClient(self, send, end, max_frame_bytes)

    def accept(self, client: RemoteClient, request_id: int, values: Any) -> None:
        """Run a request. Raises FrameError, or RequestError if the engine cannot run it."""
        if not self._engine or not self._submit:
            raise RequestError(ErrorCode.UNAVAILABLE, "the engine accepts no requests of other processes")
        request = read_request(values, next(self._keys), self._limits, self._tokenizer)
        self._check(request)
        self._clients.add(client)
        client.add(request_id, request)
        self._served[request.key] = client
        announcement = self._engine.announce(request.key, admitted_elsewhere=True)
        self._submit(replace(request, announcement=announcement))

    def store(self, run: BlockRun) -> None:
        """Put blocks into the prefix cache. Waits while the engine has too many bytes to store."""
        if self._engine is None:
            run.stored.set()
            return
        self._engine.store(run)
        with self._lock:
            self._unstored = [unstored for unstored in self._unstored if not unstored.stored.is_set()] + [run]
            excess, waits_for = sum(unstored.nbytes for unstored in self._unstored) - MAX_UNSTORED_BYTES, None
            for unstored in self._unstored:
                if excess > 0:
                    excess, waits_for = excess - unstored.nbytes, unstored
        if waits_for:
            waits_for.stored.wait(STORE_SECONDS)

    def control(self, key: int, control: Any, sample: Any, *, is_last: bool = True) -> None:
        """Change a request that is running. is_last: whether this ends the request. Raises FrameError."""
        assert self._engine
        if is_last:
            self._served.pop(key, None)
        if control == "abort":
            self._engine.abort(key)
        elif control == "end_all":
            self._engine.end_all(key)
        elif control == "expire":
            self._engine.expire(key)
        elif control == "end" and isinstance(sample, int):
            self._engine.end(key, sample)
        else:
            raise FrameError(f"control={control!r}: unknown")

    def _emit_served(self, output: StepOutput) -> StepOutput:
        """Send the outputs of served requests, and return the output without them."""
        served = self._served
        by_client: dict[RemoteClient, tuple[list[TokenDelta], list[int]]] = {}
        for key in output.entered:
            if client := served.get(key):
                by_client.setdefault(client, ([], []))[1].append(key)
        own = []
        for delta in output.deltas:
            client = served.get(delta.key)
            if client:
                by_client.setdefault(client, ([], []))[0].append(delta)
            else:
                own.append(delta)
        for client in list(self._clients):
            deltas, entered = by_client.get(client, ((), ()))
            for key in client.send_step(deltas, entered, output.started_at, output.finished_at, output.stats):
                served.pop(key, None)
        return replace(output, deltas=tuple(own)) if len(own) < len(output.deltas) else output


class RemoteClient:
    """Another process, and its requests that run here. The lock guards them: frames come on the connection's thread,
    outputs on the engine's."""

    def __init__(
        self, service: EngineService, send: Callable[[bytes], None], end: Callable[[], None], max_frame_bytes: int
    ):
        self._service = service
        self._send = send
        self._end = end
        self._max_frame_bytes = max_frame_bytes
        self._lock = threading.Lock()
        self._keys: dict[int, int] = {}  # key by id
        self._requests: dict[int, _Served] = {}  # by key
        self._frames: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._sender: threading.Thread | None = None

    @property
    def num_open(self) -> int:
        """The number of its open requests."""
        return len(self._requests)

    def handle(self, request_id: int, frame: Mapping[str, Any]) -> bool:
        """Handle a frame, on the connection's thread. Return whether it was for the engine. Raises FrameError."""
        if "generate" in frame:
            self._generate(request_id, frame["generate"])
        elif "blocks" in frame:
            self._store(request_id, frame)
        elif "control" in frame:
            self._control(request_id, frame["control"], frame.get("sample"))
        else:
            return False
        return True

    def add(self, request_id: int, request: GenerateRequest) -> None:
        """Register a request before the engine runs it."""
        outputs = request.progress.outputs if request.progress else ((),) * request.sampling.num_samples
        left = {index for index, output in enumerate(outputs) if output is not None}
        with self._lock:
            self._requests[request.key] = _Served(request_id, left)
            self._keys[request_id] = request.key

    def send_step(
        self,
        deltas: Sequence[TokenDelta],
        entered: Sequence[int],
        started_at: float,
        finished_at: float,
        stats: Stats | None = None,
    ) -> list[int]:
        """Queue outputs, on the engine's thread. Return the keys of the requests that have ended."""
        written, ended = [], []
        with self._lock:
            ids = [self._requests[key].id for key in entered if key in self._requests]
            for delta in deltas:
                served = self._requests.get(delta.key)
                if served is None:
                    continue
                if isinstance(delta.error, CannotContinue):
                    self._frames.put({"id": served.id, "returned": "rejected", "text": str(delta.error)})
                else:
                    written.append(write_delta(served.id, delta))
                if delta.finish:
                    served.left.discard(delta.sample)
                if delta.error or not served.left:
                    self._remove(delta.key)
                    ended.append(delta.key)
        times = {"started_at": float(started_at), "finished_at": float(finished_at)}
        statistics = {"stats": vars(stats)} if stats else {}
        self._frames.put({"step": {"deltas": written, "entered": ids} | times | statistics})
        return ended

    def give_back(self, key: int) -> None:
        """Queue the end of a request here, after all of its outputs."""
        with self._lock:
            served = self._remove(key)
        if served:
            self._frames.put({"id": served.id, "returned": "moved"})

    def close(self) -> None:
        """Abort the requests of the connection, which has ended."""
        with self._lock:
            keys = list(self._requests)
            self._requests.clear()
            self._keys.clear()
        for key in keys:
            self._service.control(key, "abort", None)
        self._service.forget(self)
        self._frames.put(None)

    def flush(self) -> None:
        """Send what is queued, and end the sender."""
        self._frames.put(None)
        with self._lock:
            sender = self._sender
        if sender:
            sender.join(FLUSH_SECONDS)

    def _generate(self, request_id: int, values: Any) -> None:
        if request_id in self._keys:
            raise FrameError(f"{request_id}: the id of a request that is open")
        self._start_sender()
        try:
            self._service.accept(self, request_id, values)
        except RequestError as error:
            self._frames.put({"id": request_id, "returned": "rejected", "text": str(error)})

    def _store(self, request_id: int, frame: Mapping[str, Any]) -> None:
        """Store blocks, in order with the requests that come after them."""
        self._start_sender()
        self._service.store(read_blocks(frame))
        if frame.get("acknowledge"):  # a request that another connection submits now comes after them
            self._frames.put({"id": request_id, "stored": True})

    def _start_sender(self) -> None:
        with self._lock:  # it has started when `flush` sees it
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_all, name="remote client", daemon=True)
                self._sender.start()

    def _control(self, request_id: int, control: Any, sample: Any) -> None:
        with self._lock:
            key = self._keys.get(request_id)
            if key is None:  # it has ended
                return
            left = self._requests[key].left
            if control == "end":
                left.discard(sample)
            if control in ("abort", "end_all") or not left:
                self._remove(key)
        self._service.control(key, control, sample, is_last=key not in self._requests)

    def _remove(self, key: int) -> _Served | None:
        """Forget a request. Called with the lock."""
        served = self._requests.pop(key, None)
        if served:
            del self._keys[served.id]
        return served

    def _send_all(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                self._send(pack(frame, self._max_frame_bytes))
            except FrameError as error:
                log.error("closed a connection to another instance: %s", error)
                self._end()
                return
