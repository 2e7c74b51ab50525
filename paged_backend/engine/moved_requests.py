"""Moves requests between engines: their tokens so far, and copies of their blocks (moved_blocks.py).

    engine A                                                       engine B
    take_out: tokens so far, blocks are freed  -- blocks, submit -> continues, like after a preemption
    ends of samples, cancellation              -- forwarded -----> frees the blocks
    emits to the same streams as before        <-- outputs ------- next token
    put_back, or submitted to engine C         <-- given back ---- if B is replaced itself

The streams stay where they are: `Engine` forwards what is asked for a moved request to the engine that has it. All of
this happens on the engine's thread, in order with its messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from paged_backend.api.request import GenerateRequest, Progress
from paged_backend.engine.messages import Message, StoreMoved
from paged_backend.engine.model_memory import MemoryShortage
from paged_backend.engine.moved_blocks import BlockRun
from paged_backend.engine.state import EngineState, LateRequests, Moved, OtherEngine
from paged_backend.scheduling.group import Group

log = logging.getLogger("paged_llm")

Take = Callable[[GenerateRequest, Sequence[BlockRun]], OtherEngine | None]


class MovedRequests:
    """Moves requests out of an engine and back. The methods may be called from any thread."""

    def __init__(self, post: Callable[[Message], None], state: EngineState):
        """post: posts a message to the engine's inbox."""
        self._post = post
        self._state = state

    @property
    def num_kept(self) -> int:
        """The number of open requests that have not been moved."""
        return self._state.num_open

    def send(self, request: GenerateRequest, engine: OtherEngine) -> None:
        """Run an announced request in another engine from its start, unless it was aborted."""
        self._post(_Send(request, engine))

    def announce(self, key: int) -> None:
        """Register a request of another engine, which will be delivered or rejected later. Unlike after
        `Engine.announce` it does not count as waiting, since its client was admitted before."""
        self._state.announced.add(key)

    def take_out(self, is_wanted: Callable[[GenerateRequest], bool], take: Take) -> None:
        """Take out the requests that another engine can continue, each with its progress.

        is_wanted: returns whether to move a request; called after those before it were moved. take: called with each
        request and its blocks, on the engine's thread, after all of its outputs were emitted; must not block. It
        returns the engine to submit the request to, or None for a request of another process, which it has told.
        """
        self._post(_TakeOut(is_wanted, take))

    def store(self, run: BlockRun) -> None:
        """Put blocks of another engine into the prefix cache, before their request is submitted."""
        self._post(StoreMoved(run))

    def put_back(self, request: GenerateRequest, engine: OtherEngine | None = None) -> None:
        """Continue a moved request, in this engine or in another one, unless it was aborted."""
        self._post(_PutBack(request, engine))

    def remove(self, key: int) -> None:
        """Forget a moved request, after its last output was emitted."""
        self._state.moved.pop(key, None)

    def release_memory(self, successor: OtherEngine, take: Take) -> None:
        """Release the memory of the model if no request is open. Requests that arrive later are taken out at once, as
        by `take_out`. The memory is restored if one is given back, or if the successor has ended."""
        self._post(_ReleaseUnused(LateRequests(successor, take)))


@dataclass(frozen=True)
class _Send(Message):
    request: GenerateRequest
    engine: OtherEngine

    def apply(self, state: EngineState) -> bool:
        key = self.request.key
        if key not in state.announced:
            self.engine.abort(key)
            return False
        state.announced.remove(key)
        state.queued.discard(key)
        state.moved[key] = Moved(self.engine)
        self.engine.submit(self.request)
        return True


@dataclass(frozen=True)
class _TakeOut(Message):
    is_wanted: Callable[[GenerateRequest], bool]
    take: Take
    commits_all: ClassVar[bool] = True

    def apply(self, state: EngineState) -> bool:
        waiting = sorted(state.scheduler.waiting, key=lambda group: group.key)
        found = False
        for group in (*state.scheduler.running, *waiting):
            if not self._can_move(group):
                continue
            found = True
            request = replace(group.request, progress=group.progress)
            prefixes = state.blocks.prefixes(group) if state.blocks else []
            state.scheduler.abort(group.key)
            state.queued.discard(group.key)
            blocks = state.blocks.read(prefixes) if state.blocks else []
            if engine := self.take(request, blocks):
                state.moved[group.key] = Moved(engine)
                engine.submit(request, blocks)
        return found

    def _can_move(self, group: Group) -> bool:
        return group.can_move and self.is_wanted(group.request)


@dataclass(frozen=True)
class _PutBack(Message):
    request: GenerateRequest
    engine: OtherEngine | None

    def apply(self, state: EngineState) -> bool:
        key = self.request.key
        moved = state.moved.get(key)
        request = _without(self.request, moved.ended) if moved else None
        if request is None:  # it was aborted, or has ended
            state.moved.pop(key, None)
            return False
        if self.engine:
            state.moved[key] = Moved(self.engine)
            self.engine.submit(request)
            return False
        del state.moved[key]
        if state.wake_for(key):
            state.scheduler.add(request)
        return True


@dataclass(frozen=True)
class _ReleaseUnused(Message):
    late: LateRequests
    needs_commit: ClassVar[bool] = True

    def apply(self, state: EngineState) -> bool:
        state.late = self.late
        if state.memory is None or state.asleep or state.num_open:
            return False
        try:
            released = state.release_memory()
        except MemoryShortage as error:
            log.warning("the memory of a model whose requests were moved is kept: %s", error)
            return False
        state.wakes_on_demand = True
        log.info("released %d bytes: a newer instance has taken over, and no request is open here", released.total)
        return True


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
