"""Messages to the engine's inbox. Other threads post them; the engine's thread applies them between two steps."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from paged_backend.api.errors import ASLEEP, ErrorCode, ModelAsleep, RequestError
from paged_backend.api.request import GenerateRequest, TokenDelta
from paged_backend.engine.model_memory import MemoryShortage, ReleasedMemory
from paged_backend.engine.moved_blocks import BlockRun
from paged_backend.engine.outputs import UnknownRequests
from paged_backend.engine.prefix_tiers import PrefetchedBlocks
from paged_backend.engine.state import EngineState, Moved
from paged_backend.execution.runner import RunnerDied

log = logging.getLogger("paged_llm")

# What was released or restored, the number of open requests that prevent it, or an error.
MemoryReply: TypeAlias = ReleasedMemory | int | RequestError


class Message(ABC):
    """A change to the engine's state, requested by another thread."""

    needs_commit: ClassVar[bool] = False  # whether steps in flight are committed first, if no request is open
    commits_all: ClassVar[bool] = False  # whether steps in flight are committed first, even if requests are open

    @abstractmethod
    def apply(self, state: EngineState) -> bool:
        """Apply the message on the engine's thread. Return whether new statistics have to be emitted."""


@dataclass(frozen=True)
class AddRequest(Message):
    """Hand a request to the scheduler, unless it was aborted after it was announced."""

    request: GenerateRequest

    def apply(self, state: EngineState) -> bool:
        if self.request.key not in state.announced:
            return False
        state.announced.remove(self.request.key)
        if state.asleep and not state.wakes_on_demand:  # it was admitted just before the model began to go to sleep
            state.queued.discard(self.request.key)
            state.emit_step([TokenDelta(self.request.key, error=ModelAsleep(ASLEEP))])
            return False
        if state.asleep and state.late and state.late.successor.alive:
            state.queued.discard(self.request.key)
            if engine := state.late.take(self.request, ()):
                state.moved[self.request.key] = Moved(engine)
                engine.submit(self.request)
            return False
        if not state.wake_for(self.request.key):
            return False
        state.add_request(self.request)
        return True


@dataclass(frozen=True)
class StorePrefetched(Message):
    """Put blocks that were read from a tier into the host pool, before their request arrives."""

    prefetched: PrefetchedBlocks

    def apply(self, state: EngineState) -> bool:
        if state.prefix_tiers:
            state.prefix_tiers.store(self.prefetched)
        return False


@dataclass(frozen=True)
class StoreMoved(Message):
    """Put blocks of another engine into the prefix cache, before their request arrives."""

    run: BlockRun

    def apply(self, state: EngineState) -> bool:
        if state.blocks is None or state.asleep:
            self.run.stored.set()
            return False
        try:
            state.blocks.store(self.run)
        except ValueError as error:
            log.warning("blocks of a moved request are computed again: %s", error)
        return False


@dataclass(frozen=True)
class RejectRequest(Message):
    """End an announced request with an error, before the scheduler has seen it."""

    key: int
    error: RequestError

    def apply(self, state: EngineState) -> bool:
        if self.key in state.announced:
            state.announced.remove(self.key)
            state.emit_step([TokenDelta(self.key, error=self.error)])
        return False


@dataclass(frozen=True)
class AbortRequest(Message):
    """Drop a request that was cancelled or could not be answered."""

    key: int

    def apply(self, state: EngineState) -> bool:
        if self.key in state.announced:
            state.announced.remove(self.key)
            return True
        if moved := state.moved.pop(self.key, None):
            moved.engine.abort(self.key)
            return False
        return state.abort(self.key)


@dataclass(frozen=True)
class EndSamples(Message):
    """End one sample that met a stop string, or all samples of a request that reached its deadline or was stopped."""

    key: int
    index: int | None  # index of the sample; None: all samples

    def apply(self, state: EngineState) -> bool:
        if self.key in state.announced:
            state.announced.remove(self.key)
            return True
        if moved := state.moved.get(self.key):
            if self.index is None:
                del state.moved[self.key]
                moved.engine.end_all(self.key)
            else:
                moved.ended.add(self.index)
                moved.engine.end(self.key, self.index)
            return False
        if self.index is None:
            return state.end_all(self.key)
        return state.scheduler.end(self.key, self.index)


@dataclass(frozen=True)
class EndBeamSearch(Message):
    """End a beam search that reached its deadline or was stopped, and emit its hypotheses so far."""

    key: int

    def apply(self, state: EngineState) -> bool:
        if moved := state.moved.get(self.key):
            moved.engine.expire(self.key)
        else:
            state.emit_step(state.scheduler.expire(self.key))
        return False


@dataclass(frozen=True)
class UnpinSession(Message):
    """Release the blocks that are pinned for a session."""

    session: Hashable

    def apply(self, state: EngineState) -> bool:
        state.scheduler.pins.drop(self.session)
        return True


@dataclass(frozen=True)
class EmitStats(Message):
    """Emit statistics that include an announced request."""

    def apply(self, state: EngineState) -> bool:
        return bool(state.announced)


@dataclass(frozen=True)
class TiersChanged(Message):
    """Emit statistics because a tier was disabled or enabled."""

    def apply(self, state: EngineState) -> bool:
        return True


@dataclass(frozen=True)
class PrefillStored(Message):
    """End a `prefill_only` request, whose blocks are written or could not be."""

    key: int

    def apply(self, state: EngineState) -> bool:
        state.emit_step(state.take_prefill_end(self.key))
        return False


@dataclass(frozen=True)
class ReportUnknown(Message):
    """Emit the request keys that the engine does not track."""

    keys: tuple[int, ...]

    def apply(self, state: EngineState) -> bool:
        state.emit(UnknownRequests(tuple(key for key in self.keys if not state.has_request(key))))
        return False


@dataclass(frozen=True)
class SnapshotPool(Message):
    """Emit a map of the pool before the next step."""

    def apply(self, state: EngineState) -> bool:
        state.pool_map_requested = True
        return False


@dataclass(frozen=True)
class ReleaseMemory(Message):
    """Release the memory of the model and forget the prefix cache, unless requests are open."""

    reply: Callable[[MemoryReply], None]
    needs_commit: ClassVar[bool] = True

    def apply(self, state: EngineState) -> bool:
        if state.num_open:
            self.reply(state.num_open)
            return False
        if state.asleep:  # its requests were moved
            state.wakes_on_demand = False
            self.reply(ReleasedMemory(0, 0, 0))
            return True
        return _reply_with(self.reply, state.release_memory)


@dataclass(frozen=True)
class RestoreMemory(Message):
    """Restore the memory of a model that is asleep."""

    reply: Callable[[MemoryReply], None]
    needs_commit: ClassVar[bool] = True

    def apply(self, state: EngineState) -> bool:
        if not state.asleep:  # it was restored for a request that was given back
            self.reply(ReleasedMemory(0, 0, 0))
            return False
        return _reply_with(self.reply, state.restore_memory)


def _reply_with(reply: Callable[[MemoryReply], None], change: Callable[[], ReleasedMemory]) -> bool:
    """Reply with the result of a change. Without enough memory nothing changes; any other error ends the engine."""
    try:
        found = change()
    except MemoryShortage as error:
        reply(RequestError(ErrorCode.UNAVAILABLE, str(error)))
        return False
    reply(found)
    return True


@dataclass(frozen=True)
class FailEngine(Message):
    """End the engine loop with an error."""

    reason: str

    def apply(self, state: EngineState) -> bool:
        raise RunnerDied(self.reason)
