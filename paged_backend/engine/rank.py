"""One of the processes that share a model: what each does alike, and the loop of those that follow rank 0.

Rank 0 is the server's process. It alone schedules, and sends the others the integers of each step: the same blocks
move and the same rows run everywhere, each rank with its own heads. `workers.py` starts
them, in `main`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers.utils import logging as progress_bars

from paged_backend.api.config import EngineConfig
from paged_backend.engine.warm_up import build_runner, graph_shapes_of, record, warm_up
from paged_backend.execution.runner import Runner
from paged_backend.loading import model_loader
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.memory import kv_cache
from paged_backend.memory.kv_cache import KVCache
from paged_backend.models.tensor_parallel import TensorParallelGroup
from paged_backend.scheduling.plan import Plan
from paged_backend.utils.machine import limit_torch_threads

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Start:
    """The first message to a rank."""

    config: EngineConfig
    device: torch.device
    rank: int
    rendezvous: Path


@dataclass(frozen=True)
class Ready:
    """A rank has imported what it needs, and goes to meet the others."""


@dataclass(frozen=True)
class Failed:
    """The last message of a rank."""

    reason: str


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model that is proven, and pools of a size that all ranks have."""

    loaded: LoadedModel
    runner: Runner
    num_blocks: int
    num_host_blocks: int
    seconds_per_token: float


def prepare(config: EngineConfig, tp_group: TensorParallelGroup) -> Prepared:
    """Load the model, prove it, size the pools, in step with the other ranks. Raises ConfigError, UnsupportedModel."""
    limit_torch_threads(config.tensor_parallel_size)
    loaded = model_loader.load(config, ROOT, tp_group.device)
    spec = loaded.spec
    needs = warm_up(config, loaded, tp_group.device)
    pool = tp_group.all_reduce_min(
        kv_cache.num_blocks(config, loaded.layers, spec.kv_dtype, tp_group.device, needs.gpu_bytes)
    )
    behind = tp_group.all_reduce_min(kv_cache.num_host_blocks(config, loaded.layers, spec.kv_dtype, tp_group.device))

    def cache(count: int, where: torch.device, *, pinned: bool = False) -> KVCache:
        return KVCache.allocate(
            loaded.layers,
            num_blocks=count,
            block_size=config.block_size,
            dtype=spec.kv_dtype,
            device=where,
            pinned=pinned,
        )

    runner = build_runner(
        config,
        loaded,
        cache(pool, tp_group.device),
        cache(behind, torch.device("cpu"), pinned=tp_group.device.type == "cuda") if behind else None,
        tp_group.broadcast_tokens,
    )
    record(config, loaded, runner, graph_shapes_of(config, runner))
    if not tp_group.all_reduce_min(runner.has_graphs):  # NCCL wants a call of it recorded on all ranks or on none
        runner.release_graphs()
    return Prepared(loaded, runner, pool, behind, needs.seconds_per_token)


def run_worker(channel: Connection) -> None:
    """Do what rank 0 does, until it says that this was all."""
    start = channel.recv()
    assert isinstance(start, Start)
    progress_bars.disable_progress_bar()
    torch.zeros(1, device=start.device)  # a GPU that cannot be used is told before anybody waits for this process
    channel.send(Ready())
    tp_group = TensorParallelGroup(start.device, start.rank, start.config.tensor_parallel_size)
    tp_group.join(start.rendezvous)
    runner = prepare(start.config, tp_group).runner
    while (message := channel.recv()) is not None:
        if isinstance(message, Plan):
            runner.move(message)
        else:
            runner.launch(message)
    runner.release_graphs()  # NCCL does not end what a recording holds
    tp_group.leave()


def main(descriptor: int) -> None:
    channel = Connection(descriptor)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        run_worker(channel)
    except Exception as error:  # whatever it was: rank 0 must know before this process is gone
        channel.send(Failed(f"{type(error).__name__}: {error}"))
        raise
    os._exit(0)  # Python's own way out takes a second
