"""The engine's thread: runs steps (schedule, pack, launch, commit), and between two steps calls from other threads.

This thread owns the scheduler, the block manager and the device. With overlap (`async_scheduling`) the device does not
wait for the host: a step is launched before the tokens of the previous one have been read.

    host    | schedule 1 | schedule 2 | commit 1, schedule 3 ...| commit 2, schedule 4 ...|
    device               | step 1 ............... | step 2 ............... | step 3 ..... |
                                                  '-- its tokens stay on the device, and are copied to the host as well

A pipeline has a step of other requests in flight for each of its stages:

    stage 1 | step 1 | step 2 | step 3 | step 4 ...      step 3 has the requests of step 1, whose tokens are committed
    stage 2          | step 1 | step 2 | step 3 ...
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import methodcaller
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from paged_backend.api.errors import ASLEEP, ErrorCode, ModelAsleep, RequestError
from paged_backend.api.request import GenerateRequest, TokenDelta
from paged_backend.engine.cache_event_publisher import CacheEventPublisher
from paged_backend.engine.model_memory import MemoryShortage, ReleasedMemory
from paged_backend.engine.moved_blocks import BlockCopier, BlockRun
from paged_backend.engine.outputs import Emit, EngineDied, PoolMap, StepOutput, StepReport
from paged_backend.engine.prefix_stores import PrefetchedBlocks, PrefixStores
from paged_backend.execution.batch import pack
from paged_backend.execution.runner import PendingStep, RunnerDied, StepRunner
from paged_backend.scheduling.plan import Plan, StepResult
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.stats import Stats
from paged_kernels.compilation import after_ready

log = logging.getLogger("paged_llm")

MAP_SHARE = 0.1  # maximum share of time for pool maps while requests run; a million blocks take milliseconds
SPILL_SECONDS = 20.0  # time to write cached blocks to the stores before the pool is released


class SleepingMemory(Protocol):
    """The memory of a model in one process, or in several under tensor parallelism; see `ModelMemory`."""

    @property
    def released(self) -> ReleasedMemory | None: ...
    def release(self) -> ReleasedMemory: ...
    def restore(self) -> ReleasedMemory: ...


class Phase(Enum):
    """How far a request is."""

    ANNOUNCED = "announced"  # admitted; its grammar, adapter or cached blocks are not ready
    ARRIVING = "arriving"  # the same, for a request that another process admitted
    WAITING = "waiting"  # the scheduler has it, and no step has computed it
    # A step has computed it, or another process admitted it. It may be preempted, or storing blocks.
    RUNNING = "running"
    ENDING = "ending"  # its end was asked for


PENDING = (Phase.ANNOUNCED, Phase.ARRIVING)


class OpenRequests:
    """The phase of each request that has not ended, by key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phases: dict[int, Phase] = {}
        self._counts: Counter[Phase] = Counter()

    def __len__(self) -> int:
        return len(self._phases)

    def __contains__(self, key: int) -> bool:
        return key in self._phases

    def phase(self, key: int) -> Phase | None:
        """Return the phase of a request; None if it has ended."""
        return self._phases.get(key)

    def count(self, *phases: Phase) -> int:
        """Return how many requests are in one of these phases."""
        return sum(self._counts[phase] for phase in phases)

    def add(self, key: int, phase: Phase) -> None:
        """Register a request."""
        with self._lock:
            self._phases[key] = phase
            self._counts[phase] += 1

    def advance(self, key: int, phase: Phase, only_from: Sequence[Phase] = tuple(Phase)) -> bool:
        """Change the phase of a request, if it is in one of these phases. Return whether it was."""
        with self._lock:
            if not self._leave(key, only_from):
                return False
            self._phases[key] = phase
            self._counts[phase] += 1
            return True

    def remove(self, key: int, only_from: Sequence[Phase] = tuple(Phase)) -> bool:
        """Forget a request, if it is in one of these phases. Return whether it was."""
        with self._lock:
            if not self._leave(key, only_from):
                return False
            del self._phases[key]
            return True

    def _leave(self, key: int, only_from: Sequence[Phase]) -> bool:
        """Count a request out of its phase, if it is in one of these. Called with the lock."""
        before = self._phases.get(key)
        if before is None or before not in only_from:
            return False
        self._counts[before] -= 1
        return True

    def keys(self, *phases: Phase) -> list[int]:
        """Return the requests in one of these phases."""
        with self._lock:
            return [key for key, phase in self._phases.items() if phase in phases]


class Announcement:
    """A request on its way to the engine's thread, held by whoever has to deliver or reject it.

    When the last reference is dropped before that, the request fails. Only a bug can cause this.
    """

    def __init__(self, core: EngineCore, key: int):
        self._core = core
        self._key = key

    def __del__(self) -> None:
        if self._core.requests.phase(self._key) in PENDING:
            self._core.post(self._core.fail_lost_announced, self._key)


class Commit(Enum):
    """Whether steps in flight are committed before a change."""

    NO = "no"
    IF_IDLE = "if no request is open"
    ALL = "always"


class Change(NamedTuple):
    """What another thread asks for."""

    apply: Callable[..., object]  # returns True if new statistics have to be emitted
    arguments: tuple[Any, ...]
    commit: Commit


# A method of an engine or scheduler with its arguments, such as `methodcaller("abort", key)`.
Control = Callable[[Any], object]


@dataclass(frozen=True)
class InFlightStep:
    """A launched step, or the error that prevented the launch."""

    plan: Plan
    launched: PendingStep | Exception
    schedule_seconds: float
    launch_seconds: float

    def result(self) -> StepResult:
        """Wait for the device and return the step's results. Raises the error of the launch or of the device."""
        if isinstance(self.launched, Exception):
            raise self.launched
        return self.launched.result()

    def report(self, *, wait: float, commit: float) -> StepReport:
        """Return the report of a step that was committed, given the seconds of its last two phases."""
        return StepReport(
            len(self.plan.chunks),
            self.plan.num_tokens,
            not isinstance(self.launched, Exception) and self.launched.replayed,
            self.schedule_seconds,
            self.launch_seconds,
            wait,
            commit,
        )


class EngineCore:
    """Runs steps until it is stopped. `requests`, `post`, `post_stats`, `stop` and `busy_seconds` may be used from any
    thread. Everything else belongs to the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        emit: Emit,
        prefix_stores: PrefixStores | None = None,
        *,
        overlap: bool = False,
        cache_events: CacheEventPublisher | None = None,
        memory: SleepingMemory | None = None,
        blocks: BlockCopier | None = None,
    ):
        """For the arguments, see `Engine`."""
        self.scheduler = scheduler
        self.requests = OpenRequests()
        self.failed = threading.Event()  # set when no further step can be run
        # Called with each abort, end or expire whose request is not here.
        self.on_unknown: Callable[[int, Control], None] = lambda key, control: None
        self._runner = runner
        self._emit = emit
        self._stores = prefix_stores
        self._handovers = prefix_stores.handovers if prefix_stores else None
        self._cache_events = cache_events
        self._memory = memory
        self._copier = blocks
        self._wakes_on_demand = False  # whether the memory was released because the requests were moved
        self._inbox: SimpleQueue[Change | None] = SimpleQueue()
        self._steps_ahead = max(int(overlap), scheduler.stages - 1)
        self._in_flight: deque[InFlightStep] = deque()  # at most `_steps_ahead` between two iterations
        self._iteration_began: float | None = None  # time.monotonic(); None between iterations
        self._pool_map_requested = False
        self._next_map = 0.0  # earliest time.monotonic() of the next pool map while requests run

    # --- other threads ----------------------------------------------------------------------------------------------

    def post(self, change: Callable[..., object], *arguments: Any, commit: Commit = Commit.NO) -> None:
        """Apply a change on the engine's thread, between two steps. The change returns True if new statistics have to
        be emitted."""
        self._inbox.put(Change(change, arguments, commit))

    def post_stats(self) -> None:
        """Emit statistics."""
        self.post(lambda: True)

    def stop(self) -> None:
        """End the loop after the current step."""
        self._inbox.put(None)

    @property
    def busy_seconds(self) -> float:
        """Seconds since the current iteration began; 0 between iterations."""
        began = self._iteration_began
        return 0.0 if began is None else time.monotonic() - began

    # --- steps ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until `stop`. Emits EngineDied after any error, so that every open request fails."""
        try:
            while self._receive():
                self._iteration_began = time.monotonic()
                self._step()
                self._iteration_began = None
            self._commit_steps()
        except BaseException as error:  # includes errors of native libraries that are not an Exception
            self.failed.set()
            log.exception("the engine loop died")
            self._emit(EngineDied(f"the engine died: {type(error).__name__}: {error}"))

    def _receive(self) -> bool:
        """Apply all changes in the inbox, blocking only if there is nothing else to do. Return False after `stop`."""
        changed, stopped = False, False
        while True:
            timeout = self._stores.poll_timeout if self._stores else None  # None: without limit
            idle = not (self.scheduler.has_work or self._in_flight or changed or self._pool_map_requested)
            try:
                change = self._inbox.get(block=idle and timeout != 0, timeout=timeout or None)
            except Empty:
                break
            if change is None:
                stopped = True
                break
            if change.commit is Commit.ALL or (change.commit is Commit.IF_IDLE and not self.scheduler.has_work):
                self._commit_steps()
            changed |= change.apply(*change.arguments) is True
        if changed:
            self.emit_step()
        if self._pool_map_requested and (time.monotonic() >= self._next_map or not self.scheduler.has_work):
            self._commit_steps()
            self._emit_pool_map()
        return not stopped

    def _step(self) -> None:
        began = time.monotonic()
        if self._stores:
            self._stores.hand_over()
        plan = self.scheduler.schedule()
        scheduled = time.monotonic()
        for key in self.scheduler.admitted:
            self.requests.advance(key, Phase.RUNNING, [Phase.WAITING])
        if plan is not None:
            if self._stores:
                self._stores.mark_changed()
            launched = self._launch(plan)
            self._in_flight.append(InFlightStep(plan, launched, scheduled - began, time.monotonic() - scheduled))
            self._commit_steps(keep=0 if self.scheduler.needs_results else self._steps_ahead)
        elif self._stores and not (self._in_flight or self._stores.all_spilled) and self._stores.spill():
            self.emit_step()
        if plan is None:  # the next plan may need the results of the oldest step
            self._commit_steps(keep=max(0, len(self._in_flight) - 1))
        self._fail_lost_scheduled()

    def _launch(self, plan: Plan) -> PendingStep | Exception:
        runner, blocks = self._runner, self.scheduler.blocks
        try:
            runner.move(plan)
            packed = pack(
                plan,
                block_size=blocks.block_size,
                draft=runner.drafter is not None,
                gqa_group=runner.gqa_group,
                uniform=runner.uniform,
                page_tables=blocks.page_tables,
                state_pages=blocks.states.page_rows if blocks.states else None,
            )
            return runner.launch(packed)
        except Exception as error:
            return error

    def _commit_steps(self, keep: int = 0) -> None:
        """Commit steps in flight, the oldest first, until `keep` are left. If the newest launch failed, commit all of
        them: no later step may depend on it."""
        steps = self._in_flight
        while len(steps) > keep or (steps and isinstance(steps[-1].launched, Exception)):
            step = steps.popleft()
            deltas, report = self._commit(step)
            if self._handovers:
                deltas = self._handovers.hold(deltas)
            self.emit_step(deltas, step.plan, report)

    def _commit(self, step: InFlightStep) -> tuple[Sequence[TokenDelta], StepReport | None]:
        began = time.monotonic()
        try:
            results = step.result()
            arrived = time.monotonic()
            if self._stores:
                self._stores.write_moved_out(step.plan.transfers)
        except RunnerDied:
            raise
        except Exception as error:  # fails this step's requests; other requests continue
            return self._fail_step(step, error), None
        deltas = self.scheduler.commit(step.plan, results)
        step.plan.add_to_traces(arrived)
        return deltas, step.report(wait=arrived - began, commit=time.monotonic() - arrived)

    def _fail_step(self, step: InFlightStep, error: Exception) -> list[TokenDelta]:
        """Fail the requests of a step, and of the steps launched after it, which depend on it.

        Raises RunnerDied if the device can run no further step.
        """
        log.error("a step failed", exc_info=error)
        try:
            self._runner.copier.finish()  # blocks may be reused only when nothing reads or writes them
        except Exception as lasting:
            raise RunnerDied(f"the device has failed: {type(error).__name__}: {error}") from lasting
        message = f"the step failed: {type(error).__name__}: {error}"
        plans = [step.plan, *(later.plan for later in self._in_flight)]
        self._in_flight.clear()
        return [delta for plan in plans for delta in self.scheduler.fail(plan, message)]

    def _fail_lost_scheduled(self) -> None:
        """Fail open requests that the scheduler has lost. This happens only after a bug."""
        here = self.scheduler.num_open + (self._handovers.num_waiting if self._handovers else 0)
        if self.requests.count(Phase.WAITING, Phase.RUNNING) <= here:
            return
        for key in self.requests.keys(Phase.WAITING, Phase.RUNNING):
            if not self._has(key):
                self._fail_lost(key)

    def fail_lost_announced(self, key: int) -> None:
        """Fail an announced request that was lost before it was delivered."""
        if self.requests.phase(key) in PENDING:
            self._fail_lost(key)

    def _fail_lost(self, key: int) -> None:
        log.error("request %d: the engine has lost it", key)
        reason = "the engine has lost the request; send it again"
        self.emit_step([TokenDelta(key, error=RequestError(ErrorCode.INTERNAL, reason))])

    # --- outputs ----------------------------------------------------------------------------------------------------

    def emit_step(
        self, deltas: Iterable[TokenDelta] = (), plan: Plan | None = None, report: StepReport | None = None
    ) -> None:
        """Emit deltas with the current statistics, and with the plan and the report of the step that produced them."""
        if self._cache_events:
            self._cache_events.publish()
        deltas = tuple(deltas)
        for delta in deltas:
            if delta.last and not self._has(delta.key):
                self.requests.remove(delta.key)
        now = time.monotonic()
        if plan is None:
            self._emit(StepOutput(deltas, self.stats, now))
        else:
            self._emit(StepOutput(deltas, self.stats, now, plan.planned_at, plan.admitted, report))

    @property
    def stats(self) -> Stats:
        """The statistics of the scheduler, the stores and the kernels."""
        scheduled = self.scheduler.stats
        return scheduled.having(
            # Pending requests wait for a grammar, an adapter or a store.
            waiting=scheduled.waiting + self.requests.count(*PENDING),
            sleeping=self._asleep and not self._wakes_on_demand,
            compilations=after_ready.count,  # kernels compiled since the model was ready
            **(self._stores.stats if self._stores else {}),
        )

    def _emit_pool_map(self) -> None:
        began = time.monotonic()
        self._pool_map_requested = False
        self._emit(PoolMap.of(self.scheduler, self.stats))
        now = time.monotonic()
        self._next_map = now + (now - began) / MAP_SHARE

    # --- changes: requests ------------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> bool:
        """Give an announced request to the scheduler, unless its end was asked for."""
        requests, key = self.requests, request.key
        if not (
            requests.advance(key, Phase.WAITING, [Phase.ANNOUNCED])
            or requests.advance(key, Phase.RUNNING, [Phase.ARRIVING])
        ):
            return False
        if self._asleep and not self._wakes_on_demand:  # it was admitted just before the model began to go to sleep
            self.emit_step([TokenDelta(request.key, error=ModelAsleep(ASLEEP))])
            return False
        return self._add(request)

    def resume(self, request: GenerateRequest) -> bool:
        """Continue a request that another engine gave back."""
        self.requests.add(request.key, Phase.RUNNING)
        return self._add(request)

    def _add(self, request: GenerateRequest) -> bool:
        if self._asleep:
            try:
                self._restore()
            except MemoryShortage as error:
                self.emit_step([TokenDelta(request.key, error=RequestError(ErrorCode.UNAVAILABLE, str(error)))])
                return False
        if self._handovers and request.sampling.prefill_only:
            self._handovers.open(request)
        self.scheduler.add(request)
        return True

    def reject(self, key: int, error: RequestError) -> None:
        """End an announced request with an error."""
        if key in self.requests:
            self.emit_step([TokenDelta(key, error=error)])

    def abort(self, key: int) -> bool:
        """Remove a request, and free its blocks."""
        return self._end_request(key, methodcaller("abort", key))

    def end(self, key: int, index: int) -> bool:
        """End one sample of a request, whose text met a stop string."""
        if key not in self.requests:
            self.on_unknown(key, methodcaller("end", key, index))
            return False
        self.scheduler.end(key, index)
        if not self._has(key):
            self.requests.remove(key)
        return True

    def end_all(self, key: int) -> bool:
        """End every sample of a request that reached its deadline or was stopped."""
        return self._end_request(key, methodcaller("end_all", key))

    def _end_request(self, key: int, control: Control) -> bool:
        """Forget a request, and end it in the scheduler by `control`."""
        if not self.requests.remove(key):
            self.on_unknown(key, control)
            return False
        if self._handovers:
            self._handovers.drop(key)
        control(self.scheduler)
        return True

    def expire(self, key: int) -> None:
        """End a beam search that reached its deadline or was stopped, and emit its hypotheses so far."""
        if key in self.requests:
            self.emit_step(self.scheduler.expire(key))
        else:
            self.on_unknown(key, methodcaller("expire", key))

    def end_prefill(self, key: int) -> None:
        """End a `prefill_only` request, whose blocks are stored or cannot be."""
        assert self._handovers
        self.emit_step(self._handovers.take_end(key))

    def _has(self, key: int) -> bool:
        """Return whether the scheduler has a request, or it waits until its blocks are stored."""
        return self.scheduler.has_request(key) or (self._handovers is not None and key in self._handovers)

    # --- changes: blocks and memory ---------------------------------------------------------------------------------

    def unpin(self, session: Hashable) -> bool:
        """Release the blocks that are pinned for a session."""
        self.scheduler.pins.drop(session)
        return True

    def store_prefetched(self, prefetched: PrefetchedBlocks) -> None:
        """Put blocks that were read from a store into the host pool, before their request arrives."""
        assert self._stores
        self._stores.store(prefetched)

    def store_moved(self, run: BlockRun) -> None:
        """Put blocks of another engine into the prefix cache, before their request arrives."""
        if self._copier is None or self._asleep:
            run.stored.set()
            return
        try:
            self._copier.store(run)
        except ValueError as error:
            log.warning("blocks of a moved request are computed again: %s", error)

    def take_out(
        self,
        is_wanted: Callable[[GenerateRequest], bool],
        take: Callable[[GenerateRequest, Sequence[BlockRun]], None],
    ) -> bool:
        """Take out the requests that another engine can continue; see `Engine.take_out`."""
        waiting = sorted(self.scheduler.waiting, key=lambda group: group.key)
        took_any = False
        for group in (*self.scheduler.running, *waiting):
            if not (group.can_move and is_wanted(group.request)):
                continue
            took_any = True
            request = replace(group.request, progress=group.progress)
            prefixes = self._copier.prefixes(group) if self._copier else []
            self.scheduler.abort(group.key)
            blocks = self._copier.read(prefixes) if self._copier else []
            take(request, blocks)
        return took_any

    def request_pool_map(self) -> None:
        """Emit a map of the pool before the next step."""
        self._pool_map_requested = True

    @property
    def _asleep(self) -> bool:
        """Whether the memory of the model is released, so that no step can run."""
        return self._memory is not None and self._memory.released is not None

    def sleep(self) -> ReleasedMemory | int:
        """Release the memory of the model and forget the prefix cache. If requests are open, change nothing and
        return their number. Raises MemoryShortage."""
        if self.requests:
            return len(self.requests)
        if self._asleep:  # its requests were moved
            self._wakes_on_demand = False
            return ReleasedMemory(0, 0, 0)
        return self._release()

    def wake(self) -> ReleasedMemory:
        """Restore the memory of a model that is asleep. Raises MemoryShortage; the model then stays asleep."""
        if not self._asleep:  # it was restored for a request that was given back
            return ReleasedMemory(0, 0, 0)
        return self._restore()

    def release_unused(self) -> bool:
        """Release the memory of a model whose requests were moved, if no request is open. The next request restores
        it."""
        if self._memory is None or self._asleep or self.requests:
            return False
        try:
            released = self._release()
        except MemoryShortage as error:
            log.warning("the memory of a model whose requests were moved is kept: %s", error)
            return False
        self._wakes_on_demand = True
        log.info("released %d bytes: a newer instance has taken over, and no request is open here", released.total)
        return True

    def _release(self) -> ReleasedMemory:
        """Release the memory. Blocks that the host pool and the disk hold stay cached."""
        assert self._memory and not self.requests
        if self._stores:
            self._stores.spill_rest(time.monotonic() + SPILL_SECONDS)
        released = self._memory.release()
        self.scheduler.clear_cache()
        return released

    def _restore(self) -> ReleasedMemory:
        assert self._memory
        restored = self._memory.restore()
        self._wakes_on_demand = False
        return restored

    def fail(self, reason: str) -> None:
        """End the loop with an error."""
        raise RunnerDied(reason)
