"""Runs the steps of a pipeline: each rank computes the layers of its stage.

    rank 0          launch: send the step to all ranks, compute, send hidden states        result: wait for results
    other ranks     expect: post the receive     launch: compute, send hidden states, or sample and send results

Rank 0 is in the first stage. The last stage samples, since it has the logits. So only hidden states and what was
sampled move, never logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

from torch import Tensor

from paged_backend.distributed.stage_links import StageLinks
from paged_backend.distributed.step_channel import StepChannel
from paged_backend.execution.batch import PackedBatch
from paged_backend.execution.launched_step import LaunchedStep
from paged_backend.execution.runner import Runner
from paged_backend.models.pipeline import Stage
from paged_backend.scheduling.plan import StepResult


class FirstStage:
    """The first stage, on rank 0."""

    def __init__(self, runner: Runner, links: StageLinks):
        """runner: computes the layers of the stage."""
        self._runner, self._links = runner, links

    def launch(self, packed: PackedBatch) -> PipelinedStep:
        """Compute this stage's part of a step. The other stages follow while this one goes on."""
        results = self._links.expect_results()
        states = self._runner.launch(packed).states
        assert states is not None
        self._links.send_states(states)
        return PipelinedStep(results)


@dataclass(frozen=True, eq=False)
class PipelinedStep:
    """A step on its way through the stages."""

    wait: Callable[[], LaunchedStep]
    replayed: bool = False  # whether a captured graph ran the forward pass

    def result(self) -> StepResult:
        """Wait for the last stage and return its results."""
        return self.wait().result()


class StageRunner:
    """The part of any rank but 0 in the steps of its stage."""

    def __init__(self, runner: Runner, links: StageLinks):
        """runner: computes the layers of the stage."""
        stage = Stage.of(runner.model)
        assert stage is not None
        self._runner, self._links, self._stage = runner, links, stage

    def messages(self, steps: StepChannel) -> Iterator[tuple[Any, Callable[[], Tensor] | None]]:
        """Yield the messages of rank 0 until it ends, each with what waits for the hidden states of a step.

        A thread receives them, so that rank 0 does not wait until this stage has computed earlier steps. It posts the
        receive of hidden states as well. Raises the error of the thread.
        """
        received: SimpleQueue[tuple[Any, Callable[[], Tensor] | None]] = SimpleQueue()

        def receive() -> None:
            try:
                while (message := steps.receive()) is not None:
                    is_step = isinstance(message, PackedBatch)
                    received.put((message, self._links.expect_states(message.input_ids.shape[1]) if is_step else None))
                received.put((None, None))
            except Exception as error:
                received.put((error, None))

        Thread(target=receive, name="steps", daemon=True).start()
        while (entry := received.get())[0] is not None:
            if isinstance(entry[0], Exception):
                raise entry[0]
            yield entry

    def launch(self, packed: PackedBatch, arriving: Callable[[], Tensor] | None) -> None:
        """Compute this stage's part of a step and send what follows from it. arriving: waits for its hidden states;
        None in the first stage."""
        with self._stage.receiving(arriving() if arriving else None):
            launched = self._runner.launch(packed)
        if launched.states is not None:
            self._links.send_states(launched.states)
        elif self._links.sends_results:
            self._links.send_results(launched.on_host())
