"""The loop: schedule, pack, launch, commit. One thread owns scheduler, blocks and device.

With overlap, the device never waits for the host: a step is launched before the tokens of the one before are looked at.

    host    | plan 1 | plan 2 | commit 1, plan 3 ...| commit 2, plan 4 ...|
    device           | step 1 ........... | step 2 ........... | step 3 ........... |
                                          '-- its tokens stay here, and go to the host as well
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from torch import Tensor

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import GenerateRequest, TokenDelta
from paged_backend.engine.outputs import Emit, EngineDied, PoolMap, StepOutput, UnknownRequests
from paged_backend.execution.batch import pack
from paged_backend.execution.runner import LaunchedStep, Runner, RunnerDied
from paged_backend.loading.adapters import AdapterRegistry
from paged_backend.memory.disk import DiskTier
from paged_backend.scheduling.content import Chain, Entry, PrefixParent
from paged_backend.scheduling.plan import Plan
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.scheduling.step_result import StepResult
from paged_backend.utils.machine import use_single_thread
from paged_backend.utils.worker import BackgroundWorker

log = logging.getLogger("paged_llm")

SPILL_BLOCKS = 4  # copied at a time for the disk, while the engine is idle: a request that comes waits no longer
SPILL_SECONDS = 0.05  # between two looks at a disk that is busy
LOOK_SHARE = 0.1  # of the time at the most, while there is work: a map of a million blocks takes milliseconds
STOP_SECONDS = 20.0  # for the step in hand and for what is cached and not on disk yet, when the engine stops


@dataclass(frozen=True)
class Abort:
    """Drop a request that was cancelled or could not be answered."""

    key: int


@dataclass(frozen=True)
class End:
    """End a sample that met a stop string, or all of a request that was answered with what it had."""

    key: int
    index: int | None  # None: all of them


@dataclass(frozen=True)
class Expire:
    """End a beam search that is past its deadline, or was stopped, and emit what it has."""

    key: int


@dataclass(frozen=True)
class Die:
    """End the loop with an error."""

    reason: str


class Show:
    """Emit how many requests wait and run."""


@dataclass(frozen=True)
class Audit:
    """Emit which of these requests nobody here knows."""

    keys: tuple[int, ...]


class Look:
    """Emit a map of the pool, before the next step."""


@dataclass(frozen=True)
class Unpin:
    """Let go of a session's blocks."""

    session: Hashable


@dataclass(frozen=True)
class Fetched:
    """A request that is ready for the scheduler, and the blocks of its prompt that were on disk."""

    request: GenerateRequest
    blocks: tuple[tuple[int, list[Tensor]], ...] = ()  # the number of each in the prompt, and what it holds


@dataclass(frozen=True)
class Failed:
    """A request that could not be made ready."""

    key: int
    error: RequestError


@dataclass(frozen=True)
class InFlightStep:
    """A step that was launched, or could not be."""

    plan: Plan
    launched: LaunchedStep | Exception

    def result(self) -> StepResult:
        """Waits for the device. Raises whatever went wrong."""
        if isinstance(self.launched, Exception):
            raise self.launched
        return self.launched.result()


class Engine:
    """Runs requests until told to stop. `submit` and `expect` are called from one thread at a time; `deliver`, `refuse`
    and `abort` may be from any. `emit` is called on the engine's own and must not block."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        emit: Emit,
        disk: DiskTier | None = None,
        *,
        adapters: AdapterRegistry | None = None,
        overlap: bool = False,
    ):
        """overlap: plan and launch a step while the one before runs; of use where the device is not the host's own."""
        self._overlap = overlap
        self._flights: deque[InFlightStep] = deque()  # one at the most between two steps
        self._scheduler = scheduler
        self._runner = runner
        self._emit = emit
        self._disk = disk
        self._adapters = adapters
        self._fetcher = BackgroundWorker("fetch", use_single_thread) if disk else None
        self._expected: set[int] = set()  # keys of requests that are on their way to the loop
        self._queued: set[int] = set()  # keys of requests that have not computed yet, and are still to be answered
        self._spilled = disk is None  # whether all that is cached is on disk, as far as it may
        self._inbox: SimpleQueue[
            GenerateRequest | Fetched | Failed | Abort | End | Expire | Unpin | Show | Audit | Look | Die | None
        ] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._dead = False
        self._turn_began: float | None = None  # time.monotonic(), while a turn of the loop is under way
        self._looked = False  # whether somebody waits for a map of the pool
        self._next_look = 0.0  # time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End the loop after the step in hand, and wait for it; then keep on disk what is cached, as far as there is
        time."""
        deadline = time.monotonic() + seconds
        self._inbox.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.error("the step in hand has not ended in %.3g s; it is left to the end of the process", seconds)
            self._dead = True
        if self._disk:
            while not self._spilled and not self._dead and (left := deadline - time.monotonic()) > 0:
                self._disk.settle(left)
                self._spill()
            self._disk.close(deadline - time.monotonic())
        if self._fetcher:
            self._fetcher.stop(deadline - time.monotonic())
        if self._adapters:
            self._adapters.close(deadline - time.monotonic())

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._dead

    @property
    def busy_seconds(self) -> float:
        """How long the turn of the loop that is under way has taken; 0 between two."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def waiting(self) -> int:
        """Requests that were submitted, have not computed yet, and are still to be answered: whoever ends one before
        that gives its place away at once, though the loop hears of it after the step in hand. For any thread."""
        return len(self._queued)

    def submit(self, request: GenerateRequest) -> None:
        self.announce(request.key)
        self.deliver(request)

    def announce(self, key: int) -> None:
        """Announce a request: before anybody may abort it, and before it is delivered."""
        self._queued.add(key)
        self._expected.add(key)

    def is_pending(self, key: int) -> bool:
        """Whether one that was announced is still to be delivered: nobody has aborted it. For any thread."""
        return key in self._expected

    def deliver(self, request: GenerateRequest) -> None:
        """Run one that was announced, unless it was aborted."""
        if self._adapters and request.sampling.lora_name is not None:
            self.show()
            self._adapters.run(self._load, request)
        elif self._fetches(request):
            self._fetch_soon(request)
        else:
            self._inbox.put(request)

    def _fetches(self, request: GenerateRequest) -> bool:
        """Whether blocks of its prompt may be on disk; where all of it has to be computed, it does not matter."""
        return self._disk is not None and self._disk.up and request.sampling.prompt_logprobs is None

    def reject(self, key: int, error: RequestError) -> None:
        """End one that was announced, and cannot be delivered."""
        self._queued.discard(key)
        self._inbox.put(Failed(key, error))

    def abort(self, key: int) -> None:
        self._queued.discard(key)
        self._inbox.put(Abort(key))

    def end(self, key: int, index: int) -> None:
        """End one sample, and the request with its last one."""
        self._inbox.put(End(key, index))

    def end_all(self, key: int) -> None:
        """End every sample. Unlike those of a request that is aborted, its blocks stay its session's."""
        self._queued.discard(key)
        self._inbox.put(End(key, None))

    def expire(self, key: int) -> None:
        """End a beam search that has come to the loop; what it has by then is emitted."""
        self._inbox.put(Expire(key))

    def unpin(self, session: Hashable) -> None:
        self._inbox.put(Unpin(session))

    def die(self, reason: str) -> None:
        """No further step can be run, and whoever noticed is not the engine."""
        self._dead = True
        self._inbox.put(Die(reason))

    def show(self) -> None:
        """Have it emitted that a request waits which is not delivered yet."""
        self._inbox.put(Show())

    def report_unknown(self, keys: tuple[int, ...]) -> None:
        """Have it told which of these requests nobody here knows, after all that was told before."""
        self._inbox.put(Audit(keys))

    def look(self) -> None:
        """Have a map of the pool emitted, between two steps: one for all who ask meanwhile."""
        self._inbox.put(Look())

    def _run(self) -> None:
        try:
            while self._receive():
                self._turn_began = time.monotonic()
                self._step()
                self._turn_began = None
            self._settle()
        except BaseException as error:  # whatever it was: no request may be left without an answer
            self._dead = True
            log.exception("the engine loop died")
            self._emit(EngineDied(f"the engine died: {type(error).__name__}: {error}"))

    def _receive(self) -> bool:
        """Take what the inbox holds, waiting only where there is nothing else to do. False: stop."""
        changed = stopped = False
        while not stopped:
            wait = self._patience()
            try:
                idle = not (self._scheduler.has_work or self._flights or changed or self._looked)
                message = self._inbox.get(block=idle and wait != 0, timeout=wait or None)
            except Empty:
                break
            if message is None:
                stopped = True
                break
            if isinstance(message, Abort | End):
                changed |= self._end(message)
            elif isinstance(message, Expire):
                deltas = tuple(self._scheduler.expire(message.key))
                self._emit(StepOutput(deltas, self._stats(), time.monotonic()))
            elif isinstance(message, Unpin):
                self._scheduler.pins.drop(message.session)
                changed = True
            elif isinstance(message, Die):
                raise RunnerDied(message.reason)
            elif isinstance(message, Show):
                changed |= bool(self._expected)
            elif isinstance(message, Audit):
                self._emit(UnknownRequests(tuple(key for key in message.keys if not self._knows(key))))
            elif isinstance(message, Look):
                self._looked = True
            else:
                changed |= self._add(message)
        if changed:
            self._emit(StepOutput((), self._stats(), time.monotonic()))
        if self._looked and (time.monotonic() >= self._next_look or not self._scheduler.has_work):
            self._settle()
            self._show_pool()
        return not stopped

    def _show_pool(self) -> None:
        began, self._looked = time.monotonic(), False
        self._emit(PoolMap.of(self._scheduler, self._stats()))
        now = time.monotonic()
        self._next_look = now + (now - began) / LOOK_SHARE

    def _patience(self) -> float | None:
        """How long to wait for a message where there is no work; None: as long as it takes."""
        if self._spilled or self._disk is None:
            return None
        return 0 if self._disk.free_queue_slots and self._scheduler.blocks.has_unspilled else SPILL_SECONDS

    def _add(self, message: GenerateRequest | Fetched | Failed) -> bool:
        request = message.request if isinstance(message, Fetched) else message
        if isinstance(message, Fetched) and message.blocks:
            self._keep(message)
        if request.key not in self._expected:
            return False  # aborted meanwhile
        self._expected.remove(request.key)
        if isinstance(request, Failed):
            delta = TokenDelta(request.key, error=request.error)
            self._emit(StepOutput((delta,), self._stats(), time.monotonic()))
            return False
        self._scheduler.add(request)
        return True

    def _knows(self, key: int) -> bool:
        return key in self._expected or self._scheduler.has_request(key)

    def _end(self, message: Abort | End) -> bool:
        if message.key in self._expected:
            self._expected.remove(message.key)
            return True
        if isinstance(message, Abort):
            return self._scheduler.abort(message.key)
        if message.index is None:
            return self._scheduler.end_all(message.key)
        return self._scheduler.end(message.key, message.index)

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        self._queued.difference_update(self._scheduler.entered)
        if plan is not None:
            self._spilled = self._disk is None
            self._flights.append(InFlightStep(plan, self._launch(plan)))
            self._settle(most=1)
        elif not self._flights and not self._spilled:
            self._spill()
        if plan is None or not self._overlap or self._scheduler.needs_results:
            self._settle()

    def _launch(self, plan: Plan) -> LaunchedStep | Exception:
        try:
            self._runner.move(plan)
            runner, size = self._runner, self._scheduler.blocks.block_size
            draft = runner.drafter is not None
            return runner.launch(
                pack(plan, block_size=size, draft=draft, gqa_group=runner.gqa_group, uniform=runner.uniform)
            )
        except Exception as error:
            return error

    def _settle(self, most: int = 0) -> None:
        """Commit the steps in flight, the oldest first, until at most `most` are left; all if one could not be
        launched, for nothing may be built on it."""
        while len(self._flights) > most or (self._flights and isinstance(self._flights[-1].launched, Exception)):
            flight = self._flights.popleft()
            deltas = self._commit(flight)
            self._emit(
                StepOutput(tuple(deltas), self._stats(), time.monotonic(), flight.plan.began, flight.plan.entered)
            )

    def _commit(self, flight: InFlightStep) -> list[TokenDelta]:
        try:
            result = flight.result()
            self._write(flight.plan)
        except RunnerDied:
            raise
        except Exception as error:  # the device or the model failed this step: its requests end, the others go on
            log.error("a step failed", exc_info=error)
            with suppress(Exception):  # blocks are free for others only once nothing reads or writes them
                self._runner.transfers.settle()
            message = f"the step failed: {type(error).__name__}: {error}"
            failed = [flight.plan, *(later.plan for later in self._flights)]  # what came after has built on it
            self._flights.clear()
            return [delta for plan in failed for delta in self._scheduler.fail(plan, message)]
        return self._scheduler.commit(flight.plan, result)

    def _stats(self) -> SchedulerStats:
        stats = self._scheduler.stats
        if self._expected:  # what they wait for may be a grammar, an adapter or blocks on disk
            stats = replace(stats, waiting=stats.waiting + len(self._expected))
        if self._disk is None:
            return stats
        disk = self._disk.stats
        return replace(stats, disk_up=disk.up, disk_blocks=disk.blocks, disk_read=disk.read, disk_written=disk.written)

    # --- before a request comes to the scheduler -----------------------------------------------------------------

    def _load(self, request: GenerateRequest) -> None:
        """On the adapters' thread."""
        assert self._adapters and request.sampling.lora_name is not None
        try:
            request = replace(request, adapter=self._adapters.get(request.sampling.lora_name))
        except RequestError as error:
            self.reject(request.key, error)
        except Exception as error:
            log.exception("request %d: could not load its adapter", request.key)
            reason = f"its adapter could not be loaded: {type(error).__name__}: {error}"
            self.reject(request.key, RequestError(ErrorCode.INTERNAL, reason))
        else:
            if self._fetches(request):
                self._fetch_soon(request)
            else:
                self._inbox.put(Fetched(request))

    # --- the disk ------------------------------------------------------------------------------------------------

    def _fetch_soon(self, request: GenerateRequest) -> None:
        assert self._fetcher
        self.show()
        self._fetcher.submit(self._fetch, request)

    def _fetch(self, request: GenerateRequest) -> None:
        """On the fetcher's thread."""
        found: list[tuple[int, list[Tensor]]] = []
        try:
            found = self._read(request)
        except Exception:  # the request goes on without
            log.exception("request %d: could not read its prefix from disk", request.key)
        self._inbox.put(Fetched(request, tuple(found)))

    def _read(self, request: GenerateRequest) -> list[tuple[int, list[Tensor]]]:
        """What the prompt's prefix has on disk, and neither device nor host have. Looking at their indexes from another
        thread may err, which costs a read or a hit, never a wrong block."""
        assert self._disk and self._scheduler.blocks.host
        blocks, host = self._scheduler.blocks, self._scheduler.blocks.host
        size, tokens = blocks.block_size, request.prompt_token_ids
        before: PrefixParent = request.origin
        known: PrefixParent | None = request.origin  # the same, as far as somebody has it
        found: list[tuple[int, list[Tensor]]] = []
        for index in range((len(tokens) - 1) // size):
            content = tokens[index * size : (index + 1) * size]
            before = entry = Entry(before, content)
            known = here = None if known is None else blocks.contents.find(known, content)
            if here is None or blocks.find(here) is None:
                block = self._disk.get(entry) if len(found) < host.num_available else None
                if block is None:
                    break
                found.append((index, block))
        return found

    def _keep(self, fetched: Fetched) -> None:
        """What was on disk is on the host from now on."""
        blocks, host, memory = self._scheduler.blocks, self._scheduler.blocks.host, self._runner.host
        assert host and memory
        chain = Chain(fetched.request.origin)
        for index, content in fetched.blocks:
            block = host.keep(blocks.entry(chain, fetched.request.prompt_token_ids, index))
            if block is not None:
                memory.write_block(block, content)

    def _write(self, plan: Plan) -> None:
        """What has just gone to the host goes to disk as well."""
        if self._disk is None:
            return
        assert self._runner.host
        for move in plan.moves_out:
            if move.entry and self._disk.should_write(move.entry):
                self._disk.put(move.entry, self._runner.host.read_block(move.target))

    def _spill(self) -> None:
        """While there is nothing else to do: a few known blocks that are not on disk yet, as its queue has room."""
        assert self._disk
        if not self._disk.free_queue_slots:
            return
        plan = Plan(
            (),
            moves_out=self._scheduler.blocks.spill(
                self._disk.should_write, min(SPILL_BLOCKS, self._disk.free_queue_slots)
            ),
        )
        self._runner.move(plan)
        self._runner.transfers.settle()
        self._write(plan)
        self._scheduler.blocks.finish_moves_out(plan.moves_out)
        if not plan.moves_out and self._disk.is_idle:
            self._spilled = True
            self._emit(StepOutput((), self._stats(), time.monotonic()))
