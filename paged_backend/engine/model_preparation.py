"""Prepares the model and the pools, in the same way on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.sizes import GIB
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.distributed.stage_links import StageLinks
from paged_backend.engine.host_copy import distinct_storages, find_tensors
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
from paged_backend.execution.launched_step import LaunchedStep
from paged_backend.execution.runner import Runner
from paged_backend.files.start_checks import ROOT
from paged_backend.kv import cache as kv_cache
from paged_backend.kv.cache_layout import CacheLayout, CacheSpec
from paged_backend.kv.state_cache import bytes_per_slot
from paged_backend.loading import model_loader
from paged_backend.loading.description import Description
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.scheduling.plan import Costs
from paged_backend.utils.machine import limit_torch_threads
from paged_kernels.compilation import check_cache
from paged_kernels.cpu import native


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
    loaded = model_loader.load(config, ROOT, device, partial(check_memory, config, device=device))
    check_options(config, type(loaded.model).__name__, has_states=bool(loaded.spec.states))
    log_restrictions(loaded, device)
    state_bytes(config, loaded.cache, kv_cache.free_bytes(config, device))
    warmed = warm_up(config, loaded, device)
    layout, *sizes, host_slots = pool_sizes(config, loaded.cache, device, warmed.gpu_bytes)
    num_blocks, num_host_blocks = map(group.all_reduce_min, sizes)
    check_longest(config, layout, num_blocks)
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


class PoolSizes(NamedTuple):
    """The pools of a rank."""

    layout: CacheLayout
    num_blocks: int  # or pages, if the layout divides blocks
    num_host_blocks: int
    num_host_state_slots: int


def pool_sizes(config: EngineConfig, cache: CacheSpec, device: torch.device, reserved: int) -> PoolSizes:
    """Return the sizes of the pools beside `reserved` bytes of the device. Raises ConfigError if they do not fit."""
    states = state_bytes(config, cache, kv_cache.free_bytes(config, device, reserved))
    layout, kv_dtype = cache_layout(config, cache), cache.kv_dtype
    host_slots = num_host_state_slots(config, cache, device)
    if not kv_cache.bytes_per_block(layout.shapes, config.block_size, kv_dtype):
        without_memory = blocks_without_memory(config, cache.max_model_len)
        blocks = config.num_gpu_blocks_override or without_memory
        return PoolSizes(layout, blocks, without_memory if host_slots else 0, host_slots)
    num_blocks = kv_cache.num_pages(
        config, layout.shapes, kv_dtype, device, reserved, states=states, pages=layout.blocks.pages
    )
    host_states = host_slots * bytes_per_slot(cache.states)
    num_host_blocks = kv_cache.num_host_blocks(config, layout.shapes, kv_dtype, device, host_states)
    return PoolSizes(layout, num_blocks, num_host_blocks, host_slots)


def check_longest(config: EngineConfig, layout: CacheLayout, num_blocks: int) -> None:
    """Raise ConfigError if the device pool cannot hold max_model_len tokens."""
    longest, blocks = config.max_model_len, layout.blocks
    if longest is not None and blocks.pages_for([longest], [longest], 0) > num_blocks:
        raise ConfigError(
            f"max_model_len={longest}: the KV cache holds only {blocks.max_tokens(num_blocks)} tokens"
            f" ({num_blocks} blocks of {config.block_size}); shorten it or give the pool more memory"
        )


def check_memory(config: EngineConfig, described: Description, *, device: torch.device) -> None:
    """Raise ConfigError if the weights and pools of a rank cannot fit into the memory, or the model's layers exclude an
    option. What a step needs beside them is only known once the model is loaded."""
    weights, free = rank_bytes(config, described), kv_cache.free_bytes(config, device)
    if weights > free and config.quantization is None:
        raise ConfigError(
            f"{described.path}: the weights take {weights / GIB:.1f} GiB in {described.dtype}; must fit into the"
            f" {free / GIB:.1f} GiB that are free"
        )
    if described.cache is None:
        return
    check_options(config, described.name, has_states=bool(described.cache.states))
    layout, num_blocks, *_ = pool_sizes(config, rank_cache(config, described.cache), device, min(weights, free))
    check_longest(config, layout, num_blocks)


def rank_bytes(config: EngineConfig, described: Description) -> int:
    """Return the bytes of a rank's weights, about."""
    draft = described.draft.weight_bytes if described.draft else 0
    return (described.weight_bytes + draft) // config.num_ranks


def rank_cache(config: EngineConfig, cache: CacheSpec) -> CacheSpec:
    """Return what the rank with the fewest layers keeps."""
    ranks = config.tensor_parallel_size
    layers = (
        layer if layer.latent else replace(layer, num_kv_heads=layer.num_kv_heads // ranks) for layer in cache.layers
    )
    return cache._replace(layers=tuple(layers)[: len(cache.layers) // config.pipeline_parallel_size])


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
    return StageLinks(group, stages, hidden_size, prepared.loaded.spec.dtype, LaunchedStep)
