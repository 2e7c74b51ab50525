"""Prepares the model and the pools, in the same way on every rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from paged_backend.api.config import STORES, EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.sizes import GIB
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.distributed.stage_links import StageLinks
from paged_backend.engine.host_copy import distinct_storages, find_tensors
from paged_backend.engine.model_memory import ModelMemory
from paged_backend.engine.pools import Pools, PoolSizing, free_bytes
from paged_backend.engine.runner_builder import build_runner, capture_graphs, graph_shapes_of
from paged_backend.engine.warm_up import measure_costs, measure_decode, warm_up
from paged_backend.execution.cpu_threads import count_threads
from paged_backend.execution.launched_step import LaunchedStep
from paged_backend.execution.runner import Runner
from paged_backend.files.start_checks import ROOT
from paged_backend.kv.cache import CacheSpec
from paged_backend.loading import model_loader
from paged_backend.loading.description import Description
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.scheduling.plan import Costs
from paged_backend.utils.machine import limit_torch_threads
from paged_kernels.compilation import check_cache
from paged_kernels.cpu import native
from paged_kernels.launch import device_of

log = logging.getLogger("paged_llm")

WITHOUT_STATES = ("enable_lora", "tensor_parallel_size", *STORES)  # options that recurrent layers exclude


class RankShare(NamedTuple):
    """The layers of a rank, and the memory of its weights and KV cache."""

    layers: int
    weight_bytes: int
    kv_bytes: int  # bytes of the pool on the device


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """A verified model with its pools, on one rank."""

    loaded: LoadedModel
    runner: Runner
    pools: Pools
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
        device_of(device)
    except ValueError as error:  # an environment variable
        raise ConfigError(str(error)) from None
    loaded = model_loader.load(config, ROOT, device, partial(check_memory, config, device=device))
    sizing = PoolSizing(config, loaded.cache, device)
    _check_recurrent(config, type(loaded.model).__name__, has_states=bool(loaded.spec.states))
    log_restrictions(loaded, device)
    warmed = warm_up(config, loaded, device)
    pools = sizing.sizes(warmed.gpu_bytes)
    pools = pools._replace(
        num_pages=group.all_reduce_min(pools.num_pages), num_host_pages=group.all_reduce_min(pools.num_host_pages)
    )
    sizing.check_longest(pools.num_pages)
    # With a pipeline no later step depends on tokens that only the device has.
    broadcast = group.broadcast_tokens if config.pipeline_parallel_size == 1 else lambda tokens: None
    runner = build_runner(config, loaded, device, pools, broadcast)

    def capture(*, report: bool = False) -> None:
        capture_graphs(config, loaded, runner, graph_shapes_of(config, runner), report=report)
        counts = {count for (count,) in group.all_gather([runner.num_graphs])}
        if len(counts) > 1:  # NCCL calls: all ranks have the same graphs, or none
            runner.release_graphs()

    capture(report=True)
    stages = config.pipeline_parallel_size  # each of which takes about as long as this one
    decode_seconds = stages * measure_decode(config, loaded, runner) if device.type == "cuda" else 0.0
    costs = measure_costs(runner, stages * warmed.seconds_per_token, pools.num_host_pages)
    memory = ModelMemory(loaded, runner, group, ranks_per_node=config.ranks_per_node, capture=capture)
    shares = tuple(RankShare(*share) for share in group.all_gather(_share(loaded, runner)))
    return PreparedModel(loaded, runner, pools, costs, memory, decode_seconds, shares)


def check_memory(config: EngineConfig, described: Description, *, device: torch.device) -> None:
    """Raise ConfigError if the weights and pools of a rank cannot fit into the memory, or the model's layers exclude an
    option. What a step needs beside them is only known once the model is loaded."""
    weights, free = rank_bytes(config, described), free_bytes(config, device)
    if weights > free and config.quantization is None:
        raise ConfigError(
            f"{described.source.path}: the weights take {weights / GIB:.1f} GiB in {described.dtype}; must fit into the"
            f" {free / GIB:.1f} GiB that are free"
        )
    if described.cache is None:
        return
    _check_recurrent(config, described.name, has_states=bool(described.cache.states))
    sizing = PoolSizing(config, rank_cache(config, described.cache), device)
    sizing.check_longest(sizing.sizes(min(weights, free)).num_pages)


def _check_recurrent(config: EngineConfig, name: str, *, has_states: bool) -> None:
    """Raise ConfigError for an option that was set and that the model's recurrent layers do not support. name: name of
    the model's class."""
    if has_states:
        config.reject(WITHOUT_STATES, f"not supported for {name}, which has recurrent layers; leave it out")


def log_restrictions(loaded: LoadedModel, device: torch.device) -> None:
    """Log the features that a model with recurrent layers is served without."""
    if loaded.spec.states and device.type == "cuda":
        log.warning("%s has recurrent layers: served without CUDA graphs", type(loaded.model).__name__)


def rank_bytes(config: EngineConfig, described: Description) -> int:
    """Return about how many bytes a rank's weights take."""
    draft = described.draft.weight_bytes if described.draft else 0
    return (described.weight_bytes + draft) // config.num_ranks


def rank_cache(config: EngineConfig, cache: CacheSpec) -> CacheSpec:
    """Return the part of the cache that the rank with the fewest layers keeps."""
    ranks = config.tensor_parallel_size
    layers = (
        layer if layer.latent else replace(layer, num_kv_heads=layer.num_kv_heads // ranks) for layer in cache.layers
    )
    return cache._replace(layers=tuple(layers)[: len(cache.layers) // config.pipeline_parallel_size])


def _share(loaded: LoadedModel, runner: Runner) -> RankShare:
    """Return what this rank holds."""
    weights = sum(storage.nbytes() for storage in distinct_storages(find_tensors(loaded.model)))
    pool = sum(storage.nbytes() for storage in distinct_storages([runner.kv.memory]))
    return RankShare(len(loaded.spec.layers), weights, pool)


def stage_links(config: EngineConfig, prepared: PreparedModel, group: ProcessGroup) -> StageLinks | None:
    """Return this rank's links with other stages, which all ranks create at the same time; None without a pipeline."""
    stages = config.pipeline_parallel_size
    if stages == 1:
        return None
    hidden_size = prepared.loaded.model.config.get_text_config().hidden_size
    return StageLinks(group, stages, hidden_size, prepared.loaded.spec.dtype, LaunchedStep)
