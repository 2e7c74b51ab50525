"""Prepares the model and the pools, in the same way on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.distributed.stage_links import StageLinks
from paged_backend.engine.model_memory import ModelMemory
from paged_backend.engine.recurrent_models import (
    blocks_without_memory,
    check_options,
    log_restrictions,
    num_host_state_slots,
    num_state_slots,
    state_bytes,
)
from paged_backend.engine.runner_builder import build_runner, cache_layout, capture_graphs, graph_shapes_of
from paged_backend.engine.warm_up import measure_costs, measure_decode, warm_up
from paged_backend.execution.cpu_threads import count_threads
from paged_backend.execution.runner import Runner
from paged_backend.loading import model_loader
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.memory import kv_cache
from paged_backend.memory.cache_layout import CacheLayout
from paged_backend.memory.host_copy import distinct_storages, find_tensors
from paged_backend.memory.state_cache import bytes_per_slot
from paged_backend.scheduling.plan import Costs
from paged_backend.utils.machine import limit_torch_threads
from paged_kernels.compile_ahead import check_cache
from paged_kernels.cpu import native

ROOT = Path(__file__).resolve().parents[2]  # the repository, or the directory in which the package is installed


class RankShare(NamedTuple):
    """The layers of a rank, and the memory of its weights and KV cache."""

    layers: int
    weight_bytes: int
    kv_bytes: int  # of the pool on the device


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """A verified model with its block pools. Pool sizes are the same on all ranks."""

    loaded: LoadedModel
    runner: Runner
    layout: CacheLayout
    num_blocks: int  # or pages, if the layout divides blocks
    num_host_blocks: int
    num_host_state_slots: int  # for the states of recurrent layers
    costs: Costs
    memory: ModelMemory
    decode_seconds: float  # time of a decode step of a few sequences; 0 on a CPU
    shares: tuple[RankShare, ...]  # by rank


def prepare_model(config: EngineConfig, group: ProcessGroup) -> PreparedModel:
    """Load and verify the model, size the pools and capture graphs, in step with the other ranks. Raises ConfigError
    and UnsupportedModel."""
    device = group.device
    try:
        limit_torch_threads(config.ranks_per_node)
        native.set_threads(count_threads(config.ranks_per_node))
        check_cache(device)
    except ValueError as error:  # an environment variable
        raise ConfigError(str(error)) from None
    loaded = model_loader.load(config, ROOT, device)
    check_options(config, loaded)
    log_restrictions(loaded, device)
    kv_dtype = loaded.spec.kv_dtype
    states = state_bytes(config, loaded, kv_cache.free_bytes(config, device))
    warmed = warm_up(config, loaded, device)
    states = state_bytes(config, loaded, kv_cache.free_bytes(config, device, warmed.gpu_bytes))
    layout = cache_layout(config, loaded)
    host_slots = num_host_state_slots(config, loaded, device)
    host_states = host_slots * bytes_per_slot(loaded.spec.states)
    if kv_cache.bytes_per_block(layout.shapes, config.block_size, kv_dtype):
        num_blocks = kv_cache.num_blocks(
            config, layout.shapes, kv_dtype, device, warmed.gpu_bytes, states=states, pages=layout.blocks.pages
        )
        num_host_blocks = kv_cache.num_host_blocks(config, layout.shapes, kv_dtype, device, host_states)
    else:
        without_memory = blocks_without_memory(config, loaded.spec.max_model_len)
        num_blocks = config.num_gpu_blocks_override or without_memory
        num_host_blocks = without_memory if host_slots else 0
    num_blocks = group.all_reduce_min(num_blocks)
    num_host_blocks = group.all_reduce_min(num_host_blocks)
    runner = build_runner(
        config,
        loaded,
        device,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        num_state_slots=num_state_slots(config),
        num_host_state_slots=host_slots,
        # With a pipeline no later step depends on tokens that only the device has.
        broadcast_tokens=group.broadcast_tokens if config.pipeline_parallel_size == 1 else lambda tokens: None,
    )

    def capture(*, report: bool = False) -> None:
        capture_graphs(config, loaded, runner, graph_shapes_of(config, runner), report=report)
        if not group.all_reduce_min(runner.has_graphs):  # NCCL calls: captured on all ranks or none
            runner.release_graphs()

    capture(report=True)
    stages = config.pipeline_parallel_size  # each of which takes about as long as this one
    decode_seconds = stages * measure_decode(config, loaded, runner) if device.type == "cuda" else 0.0
    costs = measure_costs(runner, stages * warmed.seconds_per_token, num_host_blocks)
    memory = ModelMemory(loaded, runner, group, ranks_per_node=config.ranks_per_node, capture=capture)
    shares = tuple(RankShare(*share) for share in group.all_gather(_share(loaded, runner)))
    return PreparedModel(
        loaded, runner, layout, num_blocks, num_host_blocks, host_slots, costs, memory, decode_seconds, shares
    )


def _share(loaded: LoadedModel, runner: Runner) -> RankShare:
    """Return what this rank holds. Weights that oneDNN has packed have no storage, and count as unpacked."""
    tensors = list(find_tensors(loaded.model))
    plain = [tensor for tensor in tensors if tensor.layout is torch.strided]
    packed = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.layout is not torch.strided)
    weights = sum(storage.nbytes() for storage in distinct_storages(plain))
    pool = sum(storage.nbytes() for storage in distinct_storages(runner.kv.tensors))
    return RankShare(len(loaded.spec.layers), weights + packed, pool)


def stage_links(config: EngineConfig, prepared: PreparedModel, group: ProcessGroup) -> StageLinks | None:
    """Return this rank's links with other stages, which all ranks create at the same time; None without a pipeline."""
    stages = config.pipeline_parallel_size
    if stages == 1:
        return None
    hidden_size = prepared.loaded.model.config.get_text_config().hidden_size
    return StageLinks(group, stages, hidden_size, prepared.loaded.spec.dtype)
