"""The loop: schedule, pack, run, commit. One thread owns scheduler, blocks and device."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from paged_backend.batch import pack
from paged_backend.block_manager import CACHED, FREE, PINNED
from paged_backend.request import GenerateRequest, TokenDelta
from paged_backend.runner import Runner
from paged_backend.scheduler import Plan, Scheduler, SchedulerStats

log = logging.getLogger("paged_llm")


@dataclass(frozen=True)
class Abort:
    """Drop a request that was cancelled or is past its deadline, or one sample of it that met a stop string."""

    key: int
    index: int | None = None  # None: all of it


class Look:
    """Emit a map of the pool, before the next step."""


@dataclass(frozen=True)
class PoolMap:
    """The pool at one moment."""

    when: float  # time.time()
    states: str  # see BlockManager.states
    tokens: int  # whose keys and values are in blocks that sequences hold; in a shared one they count once
    stats: SchedulerStats

    @classmethod
    def of(cls, scheduler: Scheduler) -> PoolMap:
        states, stats = scheduler.blocks.states(), scheduler.stats
        held = len(states) - sum(map(states.count, (FREE, CACHED, PINNED)))
        return cls(time.time(), states, held * stats.block_size - scheduler.empty_slots, stats)


@dataclass(frozen=True)
class StepOutput:
    """What one turn of the loop gave, and the state it left."""

    deltas: tuple[TokenDelta, ...]
    stats: SchedulerStats
    when: float  # time.monotonic() once the tokens were on the host
    began: float = 0.0  # and when the step was planned
    entered: tuple[int, ...] = ()  # keys of requests that computed in it for the first time


@dataclass(frozen=True)
class EngineDied:
    reason: str


class Engine:
    """Runs requests until told to stop. `submit` and `abort` may be called from any thread; `emit` is called on
    the engine's own and must not block."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        device: torch.device,
        emit: Callable[[StepOutput | PoolMap | EngineDied], None],
    ):
        self._scheduler = scheduler
        self._runner = runner
        self._device = device
        self._emit = emit
        self._inbox: SimpleQueue[GenerateRequest | Abort | Look | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._dead = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the step in hand, and wait for it."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._dead

    def submit(self, request: GenerateRequest) -> None:
        self._inbox.put(request)

    def abort(self, key: int) -> None:
        self._inbox.put(Abort(key))

    def end(self, key: int, index: int) -> None:
        """End one sample, and the request with its last one."""
        self._inbox.put(Abort(key, index))

    def look(self) -> None:
        """Have a map of the pool emitted: one for all who ask between two steps."""
        self._inbox.put(Look())

    def _run(self) -> None:
        try:
            while self._receive():
                self._step()
        except Exception as error:  # whatever it was: no request may be left without an answer
            self._dead = True
            log.exception("the engine loop died")
            self._emit(EngineDied(f"the engine died: {type(error).__name__}: {error}"))

    def _receive(self) -> bool:
        """Take what the inbox holds, waiting only where there is nothing else to do. False: stop."""
        changed = looked = False
        while True:
            try:
                message = self._inbox.get(block=not (self._scheduler.has_work or changed or looked))
            except Empty:
                break
            if message is None:
                return False
            if isinstance(message, Abort):
                changed |= self._drop(message)
            elif isinstance(message, Look):
                looked = True
            else:
                self._scheduler.add(message)
                changed = True
        if changed:
            self._emit(StepOutput((), self._scheduler.stats, time.monotonic()))
        if looked:
            self._emit(PoolMap.of(self._scheduler))
        return True

    def _drop(self, message: Abort) -> bool:
        if message.index is None:
            return self._scheduler.abort(message.key)
        return self._scheduler.end(message.key, message.index)

    def _step(self) -> None:
        began = time.monotonic()
        plan = self._scheduler.schedule()
        if plan is None:
            return
        deltas = self._execute(plan)
        self._emit(StepOutput(tuple(deltas), self._scheduler.stats, time.monotonic(), began, plan.entered))

    def _execute(self, plan: Plan) -> list[TokenDelta]:
        try:
            batch = pack(plan, block_size=self._scheduler.blocks.block_size, device=self._device)
            token_ids = self._runner.run(batch)
        except Exception as error:  # the device or the model failed this step: its requests end, the others go on
            log.exception("a step failed")
            return self._scheduler.fail(plan, f"the step failed: {type(error).__name__}: {error}")
        return self._scheduler.commit(plan, token_ids)
