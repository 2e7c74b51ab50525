"""The process of a rank other than 0 under tensor parallelism.

Rank 0 is the server's process. Only rank 0 schedules. It sends the integers of each step to the other ranks, so all
ranks move the same blocks and run the same rows, each with its own attention heads. `workers.py` starts the processes,
which run `main`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from paged_backend.api.config import EngineConfig
from paged_backend.engine.model_preparation import prepare_model
from paged_backend.models.tensor_parallel import TensorParallelGroup
from paged_backend.scheduling.plan import Plan
from paged_kernels.compilations import after_ready


@dataclass(frozen=True)
class Start:
    """The first message to a rank."""

    config: EngineConfig
    device: torch.device
    rank: int
    rendezvous: Path


@dataclass(frozen=True)
class Ready:
    """A rank has imported its modules and can use its device; it joins the process group next."""


@dataclass(frozen=True)
class Failed:
    """The last message of a rank that fails."""

    reason: str


def run_worker(channel: Connection) -> None:
    """Run the steps that rank 0 sends, until it sends None."""
    start = channel.recv()
    assert isinstance(start, Start)
    transformers_logging.disable_progress_bar()
    torch.zeros(1, device=start.device)  # fails for an unusable GPU, before other ranks wait
    channel.send(Ready())
    tp_group = TensorParallelGroup(start.device, start.rank, start.config.tensor_parallel_size)
    tp_group.join(start.rendezvous)
    runner = prepare_model(start.config, tp_group).runner
    if start.device.type == "cuda":
        after_ready.watch()  # for the log; the metric counts those of rank 0, which runs the same kernels
    while (message := channel.recv()) is not None:
        if isinstance(message, Plan):
            runner.move(message)
        else:
            runner.launch(message)
    runner.release_graphs()  # NCCL cannot shut down while graphs hold its calls
    tp_group.leave()


def main(descriptor: int) -> None:
    """Run a worker that talks to rank 0 through this file descriptor."""
    channel = Connection(descriptor)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        run_worker(channel)
    except Exception as error:
        channel.send(Failed(f"{type(error).__name__}: {error}"))
        raise
    os._exit(0)  # the interpreter's own shutdown takes a second
