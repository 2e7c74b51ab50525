"""The engine loop: schedule, pack, launch, commit.

One thread owns the scheduler, the block manager and the device. With overlap (`async_scheduling`) the device does not
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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from paged_backend.api.request import TokenDelta
from paged_backend.engine.messages import Message
from paged_backend.engine.outputs import EngineDied, StepReport
from paged_backend.engine.state import EngineState
from paged_backend.execution.batch import pack
from paged_backend.execution.runner import PendingStep, RunnerDied, StepRunner
from paged_backend.scheduling.plan import Plan, StepResult

log = logging.getLogger("paged_llm")

MAP_SHARE = 0.1  # maximum share of time for pool maps while requests run; a million blocks take milliseconds


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


class StepLoop:
    """Runs steps until it is stopped. Everything but `busy_seconds` belongs to the engine's thread."""

    def __init__(
        self,
        state: EngineState,
        runner: StepRunner,
        inbox: SimpleQueue[Message | None],
        *,
        queued: set[int],
        failed: threading.Event,
        overlap: bool,
    ):
        """inbox: messages to apply; None ends the loop. queued: keys of requests that no step has computed yet; those
        that a step schedules are removed. failed: set when the loop ends with an error. overlap: launch a step while
        the previous one runs; useful if the device is not the CPU. A pipeline always does so."""
        self._state = state
        self._scheduler = state.scheduler
        self._tiers = state.prefix_tiers
        self._runner = runner
        self._inbox = inbox
        self._queued = queued
        self._failed = failed
        self._steps_ahead = max(int(overlap), self._scheduler.stages - 1)
        self._in_flight: deque[InFlightStep] = deque()  # at most `_steps_ahead` between two iterations
        self._iteration_began: float | None = None  # time.monotonic(); None between iterations
        self._next_map = 0.0  # earliest time.monotonic() of the next pool map while requests run

    @property
    def busy_seconds(self) -> float:
        """Seconds since the current iteration began; 0 between iterations. May be read from any thread."""
        began = self._iteration_began
        return 0.0 if began is None else time.monotonic() - began

    def run(self) -> None:
        """Run until the inbox ends the loop. Emits EngineDied after any error, so that every open request fails."""
        try:
            while self._receive():
                self._iteration_began = time.monotonic()
                self._step()
                self._iteration_began = None
            self._commit_steps()
        except BaseException as error:  # includes errors of native libraries that are not an Exception
            self._failed.set()
            log.exception("the engine loop died")
            self._state.emit(EngineDied(f"the engine died: {type(error).__name__}: {error}"))

    def _receive(self) -> bool:
        """Apply all messages in the inbox, blocking only if there is nothing else to do. False: stop."""
        state, changed, stopped = self._state, False, False
        while True:
            timeout = self._poll_timeout()
            idle = not (self._scheduler.has_work or self._in_flight or changed or state.pool_map_requested)
            try:
                message = self._inbox.get(block=idle and timeout != 0, timeout=timeout or None)
            except Empty:
                break
            if message is None:
                stopped = True
                break
            if message.commits_all or (message.needs_commit and not self._scheduler.has_work):
                self._commit_steps()
            changed |= message.apply(state)
        if changed:
            state.emit_step()
        if state.pool_map_requested and (time.monotonic() >= self._next_map or not self._scheduler.has_work):
            self._commit_steps()
            self._emit_pool_map()
        return not stopped

    def _poll_timeout(self) -> float | None:
        """Return how many seconds to wait for a message while there is no work; None: without limit."""
        return self._tiers.poll_timeout if self._tiers else None

    def _emit_pool_map(self) -> None:
        began = time.monotonic()
        self._state.emit_pool_map()
        now = time.monotonic()
        self._next_map = now + (now - began) / MAP_SHARE

    def _step(self) -> None:
        began = time.monotonic()
        if self._tiers:
            self._tiers.hand_over()
        plan = self._scheduler.schedule()
        scheduled = time.monotonic()
        self._queued.difference_update(self._scheduler.admitted)
        if plan is not None:
            if self._tiers:
                self._tiers.mark_changed()
            launched = self._launch(plan)
            self._in_flight.append(InFlightStep(plan, launched, scheduled - began, time.monotonic() - scheduled))
            self._commit_steps(keep=0 if self._scheduler.needs_results else self._steps_ahead)
        elif self._tiers and not (self._in_flight or self._tiers.all_spilled) and self._tiers.spill():
            self._state.emit_step()
        if plan is None:  # the next plan may need the results of the oldest step
            self._commit_steps(keep=max(0, len(self._in_flight) - 1))

    def _launch(self, plan: Plan) -> PendingStep | Exception:
        runner = self._runner
        try:
            runner.move(plan)
            packed = pack(
                plan,
                block_size=self._scheduler.blocks.block_size,
                draft=runner.drafter is not None,
                gqa_group=runner.gqa_group,
                uniform=runner.uniform,
                page_tables=self._scheduler.blocks.page_tables,
            )
            return runner.launch(packed)
        except Exception as error:
            return error

    def _commit_steps(self, keep: int = 0) -> None:
        """Commit steps in flight, the oldest first, until `keep` are left; all of them if the launch of one failed,
        since no later step may depend on it."""
        steps = self._in_flight
        while len(steps) > keep or (steps and isinstance(steps[-1].launched, Exception)):
            step = steps.popleft()
            deltas, report = self._commit(step)
            if self._state.prefill_transfers:
                deltas = self._state.prefill_transfers.hold(deltas)
            self._state.emit_step(deltas, step.plan, report)

    def _commit(self, step: InFlightStep) -> tuple[Sequence[TokenDelta], StepReport | None]:
        began = time.monotonic()
        try:
            results = step.result()
            arrived = time.monotonic()
            if self._tiers:
                self._tiers.write_moved_out(step.plan.transfers)
        except RunnerDied:
            raise
        except Exception as error:  # fails this step's requests; other requests continue
            return self._fail(step, error), None
        deltas = self._scheduler.commit(step.plan, results)
        step.plan.add_to_traces(arrived)
        return deltas, step.report(wait=arrived - began, commit=time.monotonic() - arrived)

    def _fail(self, step: InFlightStep, error: Exception) -> list[TokenDelta]:
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
        return [delta for plan in plans for delta in self._scheduler.fail(plan, message)]
