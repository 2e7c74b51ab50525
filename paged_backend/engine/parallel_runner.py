"""The runner of rank 0 of several: the other ranks run the same steps, at the same time or in later stages.

In a pipeline, each rank computes the layers of its stage:

    rank 0          launch: send the step to all ranks, compute, send hidden states        result: wait for results
    other ranks     expect: post the receive     launch: compute, send hidden states, or sample and send results

Rank 0 is in the first stage. The last stage samples, since it has the logits. So only hidden states and what was
sampled move, never logits. The part of the other ranks is `StageRunner` (rank.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from paged_backend.distributed.stage_links import StageLinks
from paged_backend.engine.model_memory import MemoryCommand, ModelMemory, ReleasedMemory
from paged_backend.engine.workers import Workers
from paged_backend.execution.batch import PackedBatch
from paged_backend.execution.launched_step import LaunchedStep
from paged_backend.execution.runner import PendingStep, Runner, RunnerDied
from paged_backend.scheduling.plan import Plan, StepResult

T = TypeVar("T")


class ParallelRunner:
    """A `StepRunner` that sends each step to the other ranks before it runs the step itself."""

    def __init__(self, runner: Runner, workers: Workers, launch: Callable[[PackedBatch], PendingStep] | None = None):
        """runner: the runner of rank 0. launch: runs rank 0's part of a step; by default `runner.launch`."""
        self._runner = runner
        self._launch = launch or (lambda packed: runner.launch(packed))
        self.workers = workers
        self.kv, self.host = runner.kv, runner.host
        self.drafter, self.copier = runner.drafter, runner.copier
        self.gqa_group, self.uniform = runner.gqa_group, runner.uniform

    def move(self, plan: Plan) -> None:
        """Enqueue the block transfers of a plan on all ranks."""
        if any(plan.transfers):
            self.workers.send(Plan(transfers=plan.transfers.without_entries()))
        self.run_or_fail(lambda: self._runner.move(plan))

    def launch(self, packed: PackedBatch) -> ParallelStep:
        """Enqueue a step on all ranks."""
        self.workers.send(packed)
        return ParallelStep(self.run_or_fail(lambda: self._launch(packed)), self)

    def release_graphs(self) -> None:
        """Free the graphs of rank 0."""
        self._runner.release_graphs()

    def run_or_fail(self, action: Callable[[], T]) -> T:
        """Run an action of rank 0. Raises RunnerDied for any error: once one rank has failed, the ranks' states differ,
        so no further step can be run."""
        try:
            return action()
        except Exception as error:
            raise RunnerDied(self.workers.failure_reason() or f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class ParallelStep:
    """A step that was launched on all ranks."""

    launched: PendingStep
    runner: ParallelRunner

    @property
    def replayed(self) -> bool:
        """Whether a captured graph ran the forward pass."""
        return self.launched.replayed

    def result(self) -> StepResult:
        """Wait for the step and return its results."""
        return self.runner.run_or_fail(self.launched.result)


class ParallelMemory:
    """The memory of all ranks, which release and restore it at the same time. Sizes describe rank 0."""

    def __init__(self, memory: ModelMemory, workers: Workers):
        """memory: the memory of rank 0."""
        self._memory, self._workers = memory, workers

    @property
    def released(self) -> ReleasedMemory | None:
        """The memory that is released while the model sleeps; None while it is awake."""
        return self._memory.released

    @property
    def host_bytes(self) -> int:
        """The size of the weights of rank 0 in host memory while the model sleeps."""
        return self._memory.host_bytes

    def release(self) -> ReleasedMemory:
        """Release the memory of all ranks. Raises MemoryShortage."""
        self._workers.send(MemoryCommand.RELEASE)
        return self._memory.release()

    def restore(self) -> ReleasedMemory:
        """Restore the memory of all ranks. Raises MemoryShortage."""
        self._workers.send(MemoryCommand.RESTORE)
        return self._memory.restore()


class FirstStage:
    """The first stage, on rank 0."""

    def __init__(self, runner: Runner, links: StageLinks):
        """runner: computes the layers of the stage."""
        self._runner, self._links = runner, links

    def launch(self, packed: PackedBatch) -> PipelinedStep:
        """Compute this stage's part of a step. The other stages follow while this one goes on."""
        results = self._links.expect_results()
        hidden_states = self._runner.launch(packed).hidden_states
        assert hidden_states is not None
        self._links.send_hidden_states(hidden_states)
        return PipelinedStep(results)


@dataclass(frozen=True, eq=False)
class PipelinedStep:
    """A step on its way through the stages."""

    wait: Callable[[], LaunchedStep]
    replayed: bool = False  # whether a captured graph ran the forward pass

    def result(self) -> StepResult:
        """Wait for the last stage and return its results."""
        return self.wait().result()
