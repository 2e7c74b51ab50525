"""A handle to an engine in another process of this machine, over its local socket (utils/local_socket.py).

`RemoteEngine` has the methods of `Engine` for running requests, and emits the same outputs. The other side is
`EngineService`.

Frames to the engine:   {"id": 7, "generate": {...}}, see request_frames.py
                        {"id": 7, "blocks": {...}, "attached": ...}, see moved_blocks.py: blocks of a request, before
                        it; with "acknowledge": true in it if the sender waits until they are stored
                        {"id": 7, "control": "abort"}, "end_all", "expire", or "end" with "sample": 0
Frames from the engine: {"step": {"deltas": [...], "entered": [ids], "started_at": ..., "finished_at": ...,
                        "stats": {...}}}, with the statistics of the engine
                        {"id": 7, "stored": true}: the blocks with this id are stored, or cannot be
                        {"id": 7, "returned": "moved"}: it no longer runs the request, another engine may
                        {"id": 7, "returned": "rejected", "text": ...}: it cannot run the request
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Protocol

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import GenerateRequest, Progress, TokenDelta, Usage
from paged_backend.engine.moved_blocks import BlockRun
from paged_backend.engine.outputs import Emit, RemoteOutput
from paged_backend.engine.request_frames import read_delta, write_request
from paged_backend.scheduling.stats import Stats
from paged_backend.utils.local_socket import Connection, FrameError, pack

log = logging.getLogger("paged_llm")


class RequestOwner(Protocol):
    """The owner of requests that a remote engine runs. Its methods are called on the thread of the remote engine."""

    def on_ended(self, key: int) -> None:
        """Called after the last output of a request was emitted."""

    def on_started(self, key: int) -> None:
        """Called when the engine has begun to run a request."""

    def on_returned(self, engine: RemoteEngine, request: GenerateRequest, rejected: str | None) -> None:
        """Called with a request that the engine does not run, or no longer runs. The request has its progress.

        rejected: why the engine cannot run it; None if another engine may run it.
        """


@dataclass(eq=False)
class _Open:
    """A request that the engine runs, and what it has returned so far."""

    id: int
    request: GenerateRequest
    outputs: list[list[int] | None] = field(init=False)  # tokens by sample; None: the sample has ended
    has_prompt_values: bool = False
    usage: Usage | None = None
    answered: bool = False  # whether the engine has returned anything

    def __post_init__(self) -> None:
        progress = self.request.progress
        outputs = progress.outputs if progress else ((),) * self.request.sampling.num_samples
        self.outputs = [None if output is None else list(output) for output in outputs]
        if progress:
            self.has_prompt_values, self.usage = progress.has_prompt_values, progress.usage

    @property
    def ended(self) -> bool:
        return all(output is None for output in self.outputs)

    def add(self, delta: TokenDelta) -> bool:
        """Store the tokens of a delta. Return False if its sample has ended. Raises IndexError."""
        output = self.outputs[delta.sample]
        if output is None:
            return False
        output += delta.token_ids
        self.has_prompt_values |= delta.prompt_values is not None
        self.usage = delta.usage or self.usage
        if delta.finish:
            self.outputs[delta.sample] = None
        return True

    def current(self) -> GenerateRequest:
        """Return the request with its progress."""
        if self.request.sampling.beam_width > 1 or not (
            self.has_prompt_values or any(output != [] for output in self.outputs)
        ):
            return self.request
        outputs = tuple(None if output is None else tuple(output) for output in self.outputs)
        progress = Progress(outputs, self.has_prompt_values, self.usage, self.request.origin.adapter)
        return replace(self.request, progress=progress)


class RemoteEngine:
    """Runs requests in another process. The methods may be called from any thread, and do not block."""

    def __init__(
        self,
        name: str,
        connection: Connection,
        emit: Emit,
        owner: RequestOwner,
        stats: Stats | None = None,
        title: str = "the instance that the request was moved to",
        on_end: Callable[[], None] = lambda: None,
    ):
        """name: name of the socket, which identifies the engine. emit: receives the outputs, on the thread of the
        connection, and must not block. stats: the engine's statistics, if they are known. title: what errors call the
        engine. on_end: called on that thread when the connection has ended."""
        self.name = name
        self._title = title
        self._connection = connection
        self._emit = emit
        self._owner = owner
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}  # by key; guarded by the lock
        self._keys: dict[int, int] = {}  # key by id; guarded by the lock
        self._alive = True
        self.stats = stats  # the newest that are known
        self._sender = FrameSender(connection, self._return)
        threading.Thread(target=self._receive_all, name="remote engine", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the connection is open."""
        return self._alive

    @property
    def num_open(self) -> int:
        """The number of requests that the engine runs."""
        return len(self._open)

    @property
    def unsent_bytes(self) -> int:
        """The bytes of blocks that wait to be sent."""
        return self._sender.unsent_bytes

    def submit(self, request: GenerateRequest, blocks: Sequence[BlockRun] = ()) -> None:
        """Run a request, after its progress if it has any. Its outputs are emitted with its key. blocks: its computed
        blocks."""
        with self._lock:
            opened = self._open[request.key] = _Open(next(self._ids), request)
            self._keys[opened.id] = request.key
        self._sender.put_blocks(opened.id, blocks)
        self._sender.put({"id": opened.id, "generate": write_request(request)})
        if not self._alive:
            self._end_all()

    def store(self, blocks: Sequence[BlockRun], done: Callable[[], object]) -> None:
        """Send blocks of a request that another process will submit. done: called on any thread once the blocks are
        stored, or cannot be."""
        self._sender.put_blocks(next(self._ids), blocks, done)

    def abort(self, key: int) -> None:
        """Drop a request without any further output."""
        self._end(key, "abort")

    def end_all(self, key: int) -> None:
        """End every sample of a request."""
        self._end(key, "end_all")

    def end(self, key: int, index: int) -> None:
        """End one sample of a request, and the request with its last one."""
        with self._lock:
            opened = self._open.get(key)
            if opened is None:
                return
            opened.outputs[index] = None
            ended = opened.ended
        self._sender.put({"id": opened.id, "control": "end", "sample": index})
        if ended:
            self._close(key)

    def expire(self, key: int) -> None:
        """End a beam search and emit its hypotheses so far."""
        with self._lock:
            opened = self._open.get(key)
        if opened:
            self._sender.put({"id": opened.id, "control": "expire"})

    def close(self) -> None:
        """End the connection. Requests that are still open fail, or are returned if nothing of them was received."""
        self._connection.close()

    def _end(self, key: int, control: str) -> None:
        with self._lock:
            opened = self._open.pop(key, None)
            if opened:
                del self._keys[opened.id]
        if opened:
            self._sender.put({"id": opened.id, "control": control})

    def _close(self, key: int) -> None:
        """Forget a request that has ended."""
        with self._lock:
            if opened := self._open.pop(key, None):
                del self._keys[opened.id]
        self._owner.on_ended(key)

    def _receive_all(self) -> None:
        try:
            for frame in self._connection.frames():
                self._handle(frame)
        except (FrameError, OSError) as error:
            log.warning("the connection to another instance of the model ended: %s", error)
        except Exception:
            log.exception("unexpected error of the connection to another instance of the model")
        finally:
            self._alive = False
            self._connection.close()
            self._sender.close()
            self._end_all()
            self._on_end()

    def _handle(self, frame: Mapping[str, Any]) -> None:
        if isinstance(step := frame.get("step"), dict):
            self._handle_step(step)
        elif (returned := frame.get("returned")) in ("moved", "rejected") and isinstance(frame.get("id"), int):
            self._return(frame["id"], str(frame.get("text")) if returned == "rejected" else None)
        elif "stored" in frame and isinstance(frame.get("id"), int):
            self._sender.on_stored(frame["id"])
        elif "refused" in frame:
            log.warning("another instance refused the connection: %s", frame["refused"])
        elif "unloading" not in frame:
            raise FrameError(f"unknown frame with {', '.join(sorted(frame))[:100]}")

    def _handle_step(self, step: Mapping[str, Any]) -> None:
        deltas, ended, first, started = [], [], [], list[int]()
        started_at, finished_at = step.get("started_at"), step.get("finished_at")
        values, entered = step.get("deltas"), step.get("entered")
        if not (isinstance(values, list) and isinstance(entered, list)):
            raise FrameError("a step without lists of outputs and requests")
        if not (isinstance(started_at, float) and isinstance(finished_at, float)):
            raise FrameError("a step without times")
        if "stats" in step:
            self.stats = read_stats(step["stats"])
        with self._lock:
            for value in values:
                if not isinstance(value, dict) or value.get("id") not in self._keys:
                    continue  # it was aborted
                delta = read_delta(value, self._keys.__getitem__)
                opened = self._open[delta.key]
                if not opened.answered and not delta.error:
                    started.append(delta.key)
                opened.answered = True
                if not 0 <= delta.sample < len(opened.outputs):
                    raise FrameError(f"sample {delta.sample} of {len(opened.outputs)}")
                if delta.error or opened.add(delta):
                    deltas.append(delta)
                if delta.error or opened.ended:
                    ended.append(delta.key)
            for key in (self._keys[request_id] for request_id in entered if request_id in self._keys):
                if self._open[key].request.progress is None:
                    first.append(key)
        for key in started:
            self._owner.on_started(key)
        self._emit(RemoteOutput(tuple(deltas), finished_at, started_at, tuple(first)))
        for key in ended:
            self._close(key)

    def _return(self, request_id: int, rejected: str | None) -> None:
        with self._lock:
            key = self._keys.pop(request_id, None)
            opened = self._open.pop(key) if key is not None else None
        if opened:
            self._owner.on_returned(self, opened.current(), rejected)

    def _end_all(self) -> None:
        """End all open requests, since the other process has ended. Requests that it has begun to answer fail. Another
        engine may run the others, which it may not have read."""
        with self._lock:
            opened = list(self._open.values())
            self._open.clear()
            self._keys.clear()
        error = RequestError(ErrorCode.UNAVAILABLE, f"{self._title} has ended; send the request again")
        keys = [open_request.request.key for open_request in opened if open_request.answered]
        if keys:
            self._emit(RemoteOutput(tuple(TokenDelta(key, error=error) for key in keys), 0.0))
        for key in keys:
            self._owner.on_ended(key)
        for open_request in opened:
            if not open_request.answered:
                self._owner.on_returned(self, open_request.current(), None)


def read_stats(values: Any) -> Stats:
    """Return statistics that another process sent. Raises FrameError."""
    if not (isinstance(values, dict) and all(isinstance(value, int | float) for value in values.values())):
        raise FrameError("stats: must be numbers by name")
    return Stats(**values)


class FrameSender:
    """Queues frames, and sends them on a thread of its own. The methods may be called from any thread, and do not
    block."""

    def __init__(self, connection: Connection, on_rejected: Callable[[int, str], object]):
        """on_rejected: called with the id of a frame that is too large, and the reason, on the thread."""
        self._connection = connection
        self._on_rejected = on_rejected
        self._frames: SimpleQueue[tuple[dict[str, Any], list[memoryview]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unsent_bytes = 0  # guarded by the lock, like the callbacks
        self._callbacks: dict[int, Callable[[], object]] = {}  # by id of the blocks
        self._closed = False
        threading.Thread(target=self._run, name="remote engine sender", daemon=True).start()

    @property
    def unsent_bytes(self) -> int:
        """The bytes of blocks that wait to be sent."""
        return self._unsent_bytes

    def put(self, frame: dict[str, Any]) -> None:
        """Queue a frame."""
        self._frames.put((frame, []))

    def put_blocks(
        self, request_id: int, blocks: Sequence[BlockRun], stored: Callable[[], object] | None = None
    ) -> None:
        """Queue blocks. Blocks that are too large for a frame are left out. stored: called on any thread when the
        other engine has stored the blocks or cannot store them."""
        sent = [run for run in blocks if run.nbytes <= self._connection.max_frame_bytes]
        with self._lock:
            self._unsent_bytes += sum(run.nbytes for run in sent)
            if stored:
                self._callbacks[request_id] = stored
        for run in sent:
            values, attached = run.write()
            last = {"acknowledge": True} if stored and run is sent[-1] else {}
            self._frames.put(({"id": request_id, "blocks": values, "attached": run.nbytes} | last, attached))
        if not sent or self._closed:
            self.on_stored(request_id)

    def on_stored(self, request_id: int) -> None:
        """Call what waits for these blocks."""
        with self._lock:
            callback = self._callbacks.pop(request_id, None)
        if callback:
            callback()

    def close(self) -> None:
        """End the thread, and call everything that waits for blocks: the connection has ended."""
        self._closed = True
        self._frames.put(None)
        for request_id in list(self._callbacks):
            self.on_stored(request_id)

    def _run(self) -> None:
        while (item := self._frames.get()) is not None:
            frame, attached = item
            try:
                self._connection.send(pack(frame, self._connection.max_frame_bytes), attached)
            except FrameError as error:
                self.on_stored(frame["id"])
                if "blocks" not in frame:
                    self._on_rejected(frame["id"], str(error))
            except OSError:  # the thread that receives closes this one
                return
            with self._lock:
                self._unsent_bytes -= sum(map(len, attached))
