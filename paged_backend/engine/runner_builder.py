"""Builds runners, and captures their CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paged_backend.api.config import EngineConfig
from paged_backend.engine.pools import Pools
from paged_backend.execution.cpu_threads import CpuThreads, count_threads
from paged_backend.execution.graphs import (
    MAX_ROWS,
    GraphCapture,
    GraphShape,
    draft_shapes,
    graph_capture,
    graph_shapes,
    without_prompts,
)
from paged_backend.execution.runner import Drafter, Runner
from paged_backend.kv.cache import KVCache
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.models.attention import scale_channels
from paged_backend.models.decoder import FusedDecoder
from paged_backend.models.latent_attention import MIN_EXPANDED_ROWS
from paged_backend.utils.startup import Progress


def build_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    device: torch.device,
    pools: Pools,
    broadcast_tokens: Callable[[Tensor], None] = lambda tokens: None,
) -> Runner:
    """Allocate the pools and return a runner of the model, with its draft model and adapter slots if it has them.

    broadcast_tokens: replaces a tensor of sampled tokens by the tokens of rank 0.
    """
    layout, cpu, pinned = pools.layout, torch.device("cpu"), device.type == "cuda"
    kv, drafter, threads = KVCache.allocate(layout, pools.num_pages, device), None, None
    scale_channels(loaded.model, kv)
    if device.type == "cpu":
        kv.populate(count_threads(config.ranks_per_node))
        fused = FusedDecoder.of(loaded.model)
        is_native = config.batch_invariant or (fused is not None and fused.native is not None)
        threads = CpuThreads(config.ranks_per_node, is_native=is_native)
    if loaded.draft:
        drafter = Drafter(loaded.draft.model, kv.layer_range(len(loaded.spec.layers), len(kv.layers)))
        scale_channels(drafter.model, drafter.kv)
    return Runner(
        loaded.model,
        kv,
        KVCache.allocate(layout, pools.num_host_pages, cpu, pinned=pinned) if pools.num_host_pages else None,
        max_sampled=config.max_num_seqs + config.max_num_batched_tokens,  # one more per draft token
        drafter=drafter,
        lora=loaded.lora,
        threads=threads,
        broadcast_tokens=broadcast_tokens,
    )


def graph_shapes_of(config: EngineConfig, runner: Runner) -> list[GraphShape]:
    """Return the shapes of steps to capture, the largest first."""
    has_latents = any(layer.shares_memory for layer in runner.kv.layers)
    return graph_shapes(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        queries=1 + config.num_speculative_tokens,
        shared=runner.shares_prefixes,
        max_chunk=MIN_EXPANDED_ROWS - 1 if has_latents else MAX_ROWS,
    )


def capture_graphs(
    config: EngineConfig, loaded: LoadedModel, runner: Runner, shapes: list[GraphShape], *, report: bool = False
) -> None:
    """Capture graphs of these shapes if the device supports graphs and the options allow them. If prompts run code that
    cannot be captured, only the other steps are. report: whether to log the progress."""
    if config.enforce_eager or loaded.spec.states or loaded.spec.pooling or config.pipeline_parallel_size > 1:
        return
    others = without_prompts(shapes)
    if not _capture(config, loaded, runner, shapes, report=report) and others != shapes:
        _capture(config, loaded, runner, others, report=report)


def _capture(
    config: EngineConfig, loaded: LoadedModel, runner: Runner, shapes: list[GraphShape], *, report: bool
) -> bool:
    """Capture graphs of these shapes, and return whether the runner has them."""
    capture = graph_capture(runner.kv.device)
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
            num_pages=runner.kv.pages_per_block,
        )
    return runner.num_graphs > 0


def _counted(capture: GraphCapture, progress: Progress) -> GraphCapture:
    def counted(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        replay = capture(step)
        progress.advance()
        return replay

    return counted
