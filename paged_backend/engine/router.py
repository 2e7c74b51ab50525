"""Which engine runs each request: this process's engine, a replica, or a newer instance of the model.

    admission, responder ---> Router ---> Engine          the engine of this process
                                 |
                                 '------> RemoteEngine    replicas (data parallelism), and the instance that replaces
                                                          this one; their outputs go to the same streams

A request of another engine that is given back continues here, or in a third engine, from its tokens so far. An abort
or end that arrives while a request is being moved is passed on to its new engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paged_backend.api.request import GenerateRequest, Progress
from paged_backend.engine.core import Control
from paged_backend.engine.engine import Engine
from paged_backend.engine.moved_blocks import BlockRun
from paged_backend.engine.remote_engine import RemoteEngine

# Returns the engine that a request goes to; None for a request of another process, after telling that process.
Take = Callable[[GenerateRequest, Sequence[BlockRun]], RemoteEngine | None]


class _Successor(NamedTuple):
    """Where later requests go once the memory of the model is not needed here."""

    engine: RemoteEngine
    take: Take


@dataclass(eq=False)
class _Route:
    """A request that another engine runs."""

    engine: RemoteEngine
    ended: set[int] = field(default_factory=set)  # samples that were ended since


class Router:
    """Passes requests, and calls that end them, to the engine that runs them. The methods may be called from any
    thread."""

    def __init__(self, own: Engine):
        """own: the engine of this process. It runs all requests that are not sent to another one."""
        self.own = own
        self._lock = threading.RLock()  # an engine that has ended gives a request back while it is submitted
        self._routes: dict[int, _Route] = {}  # by key
        self._successor: _Successor | None = None
        own.on_unknown(self._forward)

    @property
    def busy_seconds(self) -> float:
        """See `Engine.busy_seconds`."""
        return self.own.busy_seconds

    # --- requests ---------------------------------------------------------------------------------------------------

    def deliver(self, request: GenerateRequest) -> None:
        """Run an announced request in this process's engine, or in the successor after `release_memory`."""
        with self._lock:
            if self._successor and self._successor.engine.alive and request.can_move:
                if self.own.withdraw(request.key):
                    self._submit(request, self._successor.take(request, ()))
                return
        self.own.deliver(request)

    def send(self, request: GenerateRequest, engine: RemoteEngine) -> None:
        """Run an announced request in another engine from its start, unless its end was asked for."""
        with self._lock:
            if self.own.withdraw(request.key):
                self._submit(request, engine)

    def abort(self, key: int) -> None:
        """Drop a request without any further output."""
        with self._lock:
            route = self._routes.pop(key, None)
            (route.engine if route else self.own).abort(key)

    def end(self, key: int, index: int) -> None:
        """End one sample of a request, and the request with its last one."""
        with self._lock:
            if route := self._routes.get(key):
                route.ended.add(index)
            (route.engine if route else self.own).end(key, index)

    def end_all(self, key: int) -> None:
        """End every sample of a request."""
        with self._lock:
            route = self._routes.pop(key, None)
            (route.engine if route else self.own).end_all(key)

    def expire(self, key: int) -> None:
        """End a running beam search and emit its hypotheses so far."""
        with self._lock:
            route = self._routes.get(key)
            (route.engine if route else self.own).expire(key)

    def _forward(self, key: int, control: Control) -> None:
        with self._lock:
            if key in self._routes:
                control(self)

    # --- moves ------------------------------------------------------------------------------------------------------

    def take_out(self, is_wanted: Callable[[GenerateRequest], bool], take: Take) -> None:
        """Move the requests that another engine can continue, with their tokens so far and copies of their blocks.

        is_wanted: returns whether to move a request; called after those before it were moved. take: returns the engine
        to move it to. Both are called on the engine's thread, and must not block.
        """

        def move(request: GenerateRequest, blocks: Sequence[BlockRun]) -> None:
            with self._lock:
                self.own.forget(request.key)
                self._submit(request, take(request, blocks), blocks)

        self.own.take_out(is_wanted, move)

    def put_back(self, request: GenerateRequest, engine: RemoteEngine | None = None) -> None:
        """Continue a request that another engine gave back, in this process's engine or in `engine`, unless its end was
        asked for."""
        with self._lock:
            route = self._routes.pop(request.key, None)
            left = _without(request, route.ended) if route else None
            if left and engine:
                self._submit(left, engine)
            elif left:
                self.own.resume(left)

    def remove(self, key: int) -> None:
        """Forget a request of another engine, after its last output was emitted."""
        with self._lock:
            self._routes.pop(key, None)

    def release_memory(self, successor: RemoteEngine, take: Take) -> None:
        """Release the memory of the model if no request is open. Later requests go to the successor, as by `take_out`.
        The memory is restored if a request is given back, or if the successor has ended."""
        with self._lock:
            self._successor = _Successor(successor, take)
        self.own.release_unused()

    def _submit(self, request: GenerateRequest, engine: RemoteEngine | None, blocks: Sequence[BlockRun] = ()) -> None:
        if engine:
            self._routes[request.key] = _Route(engine)
            engine.submit(request, blocks)


def _without(request: GenerateRequest, ended: set[int]) -> GenerateRequest | None:
    """Return the request without the samples that have ended; None if none is left. Beams are not samples."""
    if not ended or request.sampling.beam_width > 1:
        return request
    outputs = request.progress.outputs if request.progress else ((),) * request.sampling.num_samples
    left = tuple(None if index in ended else output for index, output in enumerate(outputs))
    if all(output is None for output in left):
        return None
    progress = replace(request.progress, outputs=left) if request.progress else Progress(left)
    return replace(request, progress=progress)
