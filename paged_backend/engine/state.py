"""The part of the engine's state that inbox messages read and change, on the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import GenerateRequest, TokenDelta
from paged_backend.engine.cache_event_publisher import CacheEventPublisher
from paged_backend.engine.model_memory import MemoryShortage, ReleasedMemory
from paged_backend.engine.moved_blocks import BlockCopier, BlockRun
from paged_backend.engine.outputs import Emit, PoolMap, StepOutput, StepReport
from paged_backend.engine.prefill_transfers import PrefillTransfers
from paged_backend.engine.prefix_tiers import PrefixTiers
from paged_backend.scheduling.plan import Plan
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.stats import SchedulerStats
from paged_kernels.compilation import after_ready

SPILL_SECONDS = 20.0  # time to write cached blocks to the tiers before the pool is released


class SleepingMemory(Protocol):
    """The memory of a model, of one process or of several under tensor parallelism; see `ModelMemory`."""

    @property
    def released(self) -> ReleasedMemory | None: ...
    def release(self) -> ReleasedMemory: ...
    def restore(self) -> ReleasedMemory: ...


class OtherEngine(Protocol):
    """An engine that runs requests of this one; see `RemoteEngine`."""

    @property
    def alive(self) -> bool: ...
    def submit(self, request: GenerateRequest, blocks: Sequence[BlockRun] = ()) -> None: ...
    def abort(self, key: int) -> None: ...
    def end(self, key: int, index: int) -> None: ...
    def end_all(self, key: int) -> None: ...
    def expire(self, key: int) -> None: ...


@dataclass(frozen=True)
class LateRequests:
    """Where requests go that arrive when all others were moved and the memory was released."""

    successor: OtherEngine
    take: Callable[[GenerateRequest, Sequence[BlockRun]], OtherEngine | None]  # see `MovedRequests.take_out`


@dataclass(eq=False)
class Moved:
    """A request that another engine runs."""

    engine: OtherEngine
    ended: set[int] = field(default_factory=set)  # samples that were ended since


@dataclass(eq=False)
class EngineState:
    """The scheduler, the requests that have not reached it yet, and the callback for outputs."""

    scheduler: Scheduler
    emit: Emit
    prefix_tiers: PrefixTiers | None = None
    # Keys of announced requests that have not reached the scheduler. Another thread announces requests.
    announced: set[int] = field(default_factory=set)
    pool_map_requested: bool = False
    cache_events: CacheEventPublisher | None = None
    memory: SleepingMemory | None = None
    queued: set[int] = field(default_factory=set)  # keys of requests that no step has computed yet
    moved: dict[int, Moved] = field(default_factory=dict)  # by key; another thread removes those that have ended
    wakes_on_demand: bool = False  # whether the memory was released because the requests were moved
    blocks: BlockCopier | None = None  # None: blocks of moved requests are not copied
    late: LateRequests | None = None  # where requests go that arrive after the memory was released

    @property
    def asleep(self) -> bool:
        """Whether the memory of the model is released, so that no step can run."""
        return self.memory is not None and self.memory.released is not None

    @property
    def num_open(self) -> int:
        """The number of requests that are announced, waiting or running."""
        held = self.prefill_transfers.num_waiting if self.prefill_transfers else 0
        return len(self.announced) + len(self.scheduler.running) + len(self.scheduler.waiting) + held

    @property
    def prefill_transfers(self) -> PrefillTransfers | None:
        """The transfers of `prefill_only` requests; None without a tier for them."""
        return self.prefix_tiers.transfers if self.prefix_tiers else None

    def add_request(self, request: GenerateRequest) -> None:
        """Give a request to the scheduler."""
        if self.prefill_transfers and request.sampling.prefill_only:
            self.prefill_transfers.open(request)
        self.scheduler.add(request)

    def abort(self, key: int) -> bool:
        """Remove a request and free its blocks. Return whether it was waiting or running."""
        dropped = self.prefill_transfers is not None and self.prefill_transfers.drop(key)
        return self.scheduler.abort(key) or dropped

    def end_all(self, key: int) -> bool:
        """End every sample of a request. Return whether it was waiting or running."""
        dropped = self.prefill_transfers is not None and self.prefill_transfers.drop(key)
        return self.scheduler.end_all(key) or dropped

    def take_prefill_end(self, key: int) -> list[TokenDelta]:
        """Return the end of a `prefill_only` request whose transfer is done; empty if it has ended early."""
        return self.prefill_transfers.take_end(key) if self.prefill_transfers else []

    def release_memory(self) -> ReleasedMemory:
        """Release the memory of the model, while no request is open. Blocks that the host pool and the disk hold stay
        cached. Raises MemoryShortage."""
        assert self.memory and not self.num_open
        if self.prefix_tiers:
            self.prefix_tiers.spill_rest(time.monotonic() + SPILL_SECONDS)
        released = self.memory.release()
        self.scheduler.clear_cache()
        return released

    def restore_memory(self) -> ReleasedMemory:
        """Restore the memory of the model. Raises MemoryShortage."""
        assert self.memory
        restored = self.memory.restore()
        self.wakes_on_demand = False
        return restored

    def wake_for(self, key: int) -> bool:
        """Restore the memory that was released because requests were moved, if it was. Without enough memory, fail the
        request and return False."""
        if self.asleep:
            try:
                self.restore_memory()
            except MemoryShortage as error:
                self.queued.discard(key)
                self.emit_step([TokenDelta(key, error=RequestError(ErrorCode.UNAVAILABLE, str(error)))])
                return False
        return True

    def has_request(self, key: int) -> bool:
        """Return whether a request is announced, waiting or running, here or in another engine, or waits for its
        transfer."""
        if self.prefill_transfers and key in self.prefill_transfers:
            return True
        return key in self.announced or key in self.moved or self.scheduler.has_request(key)

    def stats(self) -> SchedulerStats:
        """Return the statistics of the scheduler, the tiers and the kernels.

        Announced requests count as waiting.
        """
        stats = self.scheduler.stats
        if self.asleep and not self.wakes_on_demand:
            stats = replace(stats, sleeping=True)
        if after_ready.count:
            stats = replace(stats, compilations=after_ready.count)
        if self.announced:  # requests that wait for a grammar, an adapter or blocks of a tier
            stats = replace(stats, waiting=stats.waiting + len(self.announced))
        return stats if self.prefix_tiers is None else self.prefix_tiers.add_stats(stats)

    def emit_step(
        self, deltas: Iterable[TokenDelta] = (), plan: Plan | None = None, report: StepReport | None = None
    ) -> None:
        """Emit deltas with the current statistics, and with the plan and the report of the step that produced them."""
        if self.cache_events:
            self.cache_events.publish()
        now = time.monotonic()
        if plan is None:
            self.emit(StepOutput(tuple(deltas), self.stats(), now))
        else:
            self.emit(StepOutput(tuple(deltas), self.stats(), now, plan.planned_at, plan.admitted, report))

    def emit_pool_map(self) -> None:
        """Emit the requested pool map."""
        self.pool_map_requested = False
        self.emit(PoolMap.of(self.scheduler, self.stats()))
