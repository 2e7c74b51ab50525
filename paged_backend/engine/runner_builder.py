"""Builds runners, and captures their CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from paged_backend.api.block_layout import FULL
from paged_backend.api.config import EngineConfig
from paged_backend.execution.cpu_threads import CpuThreads
from paged_backend.execution.drafter import Drafter
from paged_backend.execution.graph_shapes import GraphShape, draft_shapes, graph_shapes
from paged_backend.execution.graphs import GraphCapture, graph_capture
from paged_backend.execution.runner import Runner
from paged_backend.kv.cache import KVCache
from paged_backend.kv.cache_layout import CacheLayout, CacheSpec
from paged_backend.kv.page_population import populate_in_background
from paged_backend.kv.state_cache import StateCache
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.models.decoder import FusedDecoder
from paged_backend.utils.startup import Progress


def cache_layout(config: EngineConfig, cache: CacheSpec) -> CacheLayout:
    """Return where the pool holds the layers of the model and of its draft model."""
    layers = cache.layers
    if config.pipeline_parallel_size > 1:  # all stages have the same blocks, although other layers have windows
        layers = tuple(replace(layer, window=None) for layer in layers)
    return CacheLayout.of(
        layers,
        config.block_size,
        max_model_len=cache.max_model_len,
        max_pending=2 * config.max_num_batched_tokens,  # a step may be planned while another is in flight
    )


def build_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    device: torch.device,
    *,
    num_blocks: int,
    num_host_blocks: int = 0,
    num_state_slots: int = 0,
    num_host_state_slots: int = 0,
    broadcast_tokens: Callable[[Tensor], None] = lambda tokens: None,
) -> Runner:
    """Allocate the pools and return a runner of the model, with its draft model and adapter slots if it has them.
    num_state_slots, num_host_state_slots: slots for the states of recurrent layers, if the model has any, on the device
    and on the host. broadcast_tokens: overwrites a tensor of sampled tokens with those of rank 0."""

    layout = cache_layout(config, loaded.cache)

    def cache(num_blocks: int, device: torch.device, *, pinned: bool = False) -> KVCache:
        return KVCache.allocate(
            layout.shapes,
            num_pages=num_blocks,
            block_size=config.block_size,
            dtype=loaded.spec.kv_dtype,
            device=device,
            pinned=pinned,
            places=layout.places if layout.blocks.kinds != (FULL,) else None,
        )

    kv, drafter = cache(num_blocks, device), None
    host = cache(num_host_blocks, torch.device("cpu"), pinned=device.type == "cuda") if num_host_blocks else None
    states, host_states, threads = None, None, None
    if loaded.spec.states:
        states = StateCache.allocate(loaded.spec.states, num_slots=num_state_slots, device=device)
    if num_host_state_slots:
        pinned = device.type == "cuda"
        host_states = StateCache.allocate(
            loaded.spec.states, num_slots=num_host_state_slots, device=torch.device("cpu"), pinned=pinned
        )
    if device.type == "cpu":
        populate_in_background(kv)
        fused = FusedDecoder.of(loaded.model)
        is_native = config.batch_invariant or (fused is not None and fused.native is not None)
        threads = CpuThreads(config.ranks_per_node, is_native=is_native)
    if loaded.draft:
        drafter = Drafter(loaded.draft.model, kv.layer_range(len(loaded.spec.layers), len(kv.layers)))
    return Runner(
        loaded.model,
        kv,
        host,
        max_sampled=config.max_num_seqs + config.max_num_batched_tokens,  # one more per draft token
        drafter=drafter,
        lora=loaded.lora,
        states=states,
        host_states=host_states,
        threads=threads,
        broadcast_tokens=broadcast_tokens,
    )


def graph_shapes_of(config: EngineConfig, runner: Runner) -> list[GraphShape]:
    """Return the shapes of steps to capture, the largest first."""
    return graph_shapes(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        queries=1 + config.num_speculative_tokens,
        shared=runner.shares_prefixes,
    )


def capture_graphs(
    config: EngineConfig, loaded: LoadedModel, runner: Runner, shapes: list[GraphShape], *, report: bool = False
) -> None:
    """Capture graphs of these shapes if the device supports graphs and the options allow them. report: whether to log
    the progress."""
    eager = config.enforce_eager or loaded.spec.states or loaded.spec.pooling or config.pipeline_parallel_size > 1
    capture = None if eager else graph_capture(runner.kv.device)
    if capture:
        if report:
            total = len(shapes) + (len(draft_shapes(shapes)) if runner.drafter else 0)
            capture = _counted(capture, Progress("capturing CUDA graphs", total, "graphs"))
        max_len = loaded.spec.max_model_len
        runner.capture_graphs(
            capture,
            shapes,
            block_size=config.block_size,
            max_blocks=-(-max_len // config.block_size),
            max_context_len=max_len,
            num_pages=cache_layout(config, loaded.cache).blocks.pages,
        )


def _counted(capture: GraphCapture, progress: Progress) -> GraphCapture:
    def counted(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        replay = capture(step)
        progress.advance()
        return replay

    return counted
