"""Builds everything an engine needs from the options: the model, its pools, the scheduler and the other ranks."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.limits import EngineLimits
from paged_backend.api.sizes import GIB
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.distributed.stage_links import StageLinks
from paged_backend.distributed.topology import Topology
from paged_backend.engine.block_size import resolve_block_size
from paged_backend.engine.cache_event_publisher import CacheEventPublisher
from paged_backend.engine.engine import Engine
from paged_backend.engine.model_memory import ModelMemory
from paged_backend.engine.model_preparation import PreparedModel, RankShare, prepare_model, stage_links
from paged_backend.engine.moved_blocks import BlockCopier
from paged_backend.engine.outputs import Emit
from paged_backend.engine.parallel_runner import FirstStage, ParallelMemory, ParallelRunner
from paged_backend.engine.prefix_stores import build_stores, read_remote_access
from paged_backend.engine.summary import log_startup
from paged_backend.engine.workers import Workers
from paged_backend.execution.runner import Runner
from paged_backend.files.start_checks import ROOT, check_host_pool
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.content import Listener
from paged_backend.kv.stores.chain import StoreChain
from paged_backend.loading import model_loader
from paged_backend.loading.adapters import AdapterListFile, AdapterRegistry
from paged_backend.loading.description import pick_device
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.models.attention import UnsupportedModel
from paged_backend.scheduling.budgets import PrefillBudget
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.speculation import PromptLookup, Proposer, propose_placeholders
from paged_backend.utils.machine import MemoryUsage, release_openmp_threads, resident_memory, trim_memory
from paged_kernels.compilation import after_ready

log = logging.getLogger("paged_llm")

CPU_STEP_SECONDS = 0.1  # target time of a step that decodes, on a CPU
# On a GPU, prompt tokens may make a step this many times as long as a decode step, so that the time between tokens is
# less than three times the usual. On an H100 a prompt token of Qwen3-0.6B takes 4 us, so there is time for 500 of them
# beside 1 sequence (1.5 ms) and for 1,100 beside 64 (3.3 ms). GPU_MIN_PREFILL tokens take little longer than one.
GPU_DECODE_RATIO = 2.5
GPU_MIN_PREFILL = 256


@dataclass(frozen=True, eq=False)
class Assembly:
    """A built engine: a loaded model with its pools and scheduler. `engine()` adds the thread."""

    loaded: LoadedModel
    limits: EngineLimits
    scheduler: Scheduler
    runner: Runner | ParallelRunner
    device: torch.device
    model_memory: ModelMemory | ParallelMemory
    stores: StoreChain | None = None
    overlap: bool = False
    workers: Workers | None = None
    adapters: AdapterRegistry | None = None
    cache_events: CacheEventPublisher | None = None
    shares: tuple[RankShare, ...] = ()  # what each rank holds

    def engine(self, emit: Emit) -> Engine:
        """Return an engine for this assembly, not started yet. emit: receives its outputs, on the engine's thread."""
        trim_memory()
        release_openmp_threads()  # frees the OpenMP threads of this thread, which loaded the model and computes no more
        engine = Engine(
            self.scheduler,
            self.runner,
            emit,
            self.stores,
            adapters=self.adapters,
            overlap=self.overlap,
            cache_events=self.cache_events,
            memory=self.model_memory,
            blocks=BlockCopier(self.scheduler, self.runner) if isinstance(self.runner, Runner) else None,
        )
        if self.workers:
            self.workers.on_rank_failure(engine.fail)
        return engine

    def memory(self) -> MemoryUsage:
        """Return the memory that this process uses. With several ranks, it is rank 0."""
        if self.device.type != "cuda":
            return MemoryUsage(resident_memory(), 0, 0)
        host = self.runner.host
        pinned = (host.memory.nbytes if host else 0) + self.model_memory.host_bytes
        return MemoryUsage(resident_memory(), torch.cuda.memory_allocated(self.device), pinned)

    def close(self) -> None:
        """Free the graphs and end the processes of the other ranks. Called after the engine has stopped."""
        self.runner.release_graphs()
        if self.workers:
            self.workers.stop()


def assemble(config: EngineConfig, adapter_list: Path | None = None) -> Assembly:
    """Load and verify the model, size the pools and build the scheduler.

    adapter_list: the file that lists LoRA adapters. Raises ConfigError, and UnsupportedModel for a model that fails the
    verification.
    """
    topology = Topology.of(config)
    config = resolve_block_size(replace(config, nnodes=topology.num_nodes))
    device = pick_device(config)
    if topology.size == 1:
        return _assemble(config, adapter_list, ProcessGroup(device), None)
    model_loader.check_model(config, ROOT)  # checks before it starts processes
    workers = Workers(config, device, topology)
    try:
        assembly = _assemble(config, adapter_list, workers.group, workers)
        workers.close_store()
        return assembly
    except Exception as error:
        reason = workers.failure_reason()
        workers.stop(at_once=True)
        if reason is None or str(error) in reason:  # true if all ranks reject the model for one reason
            raise
        # The verification, too, fails if another rank closes its connection.
        if not isinstance(error, ConfigError) or isinstance(error, UnsupportedModel):
            raise ConfigError(reason) from error
        raise ConfigError(f"{error} ({reason})") from error


def _assemble(
    config: EngineConfig, adapter_list: Path | None, group: ProcessGroup, workers: Workers | None
) -> Assembly:
    started = time.monotonic()
    check_host_pool(config, on_cpu=group.device.type == "cpu")
    adapters = AdapterListFile(adapter_list) if config.enable_lora else None
    read_remote_access(config)  # rejects invalid secrets before the weights are loaded
    publisher = None
    with ExitStack() as failure:  # what to undo if the engine is not assembled
        if config.kv_events_config.is_enabled:  # its sockets are bound before the weights are loaded
            publisher = CacheEventPublisher(config.kv_events_config, config.block_size)
            failure.callback(publisher.close)
        prepared = prepare_model(config, group)
        # Must precede the end of the process group: NCCL waits for captured calls.
        failure.callback(prepared.runner.release_graphs)
        links = stage_links(config, prepared, group)
        assembly = _build(config, adapters, prepared, workers, started, publisher, links)
        failure.pop_all()
    return assembly


def _build(
    config: EngineConfig,
    adapter_list: AdapterListFile | None,
    prepared: PreparedModel,
    workers: Workers | None,
    started: float,
    publisher: CacheEventPublisher | None,
    links: StageLinks | None,
) -> Assembly:
    loaded, device = prepared.loaded, prepared.runner.kv.device
    blocks = _block_manager(config, prepared, publisher.events.append if publisher else None)
    limits = _limits(config, loaded, blocks)
    launch = FirstStage(prepared.runner, links).launch if links else None
    runner = ParallelRunner(prepared.runner, workers, launch) if workers else prepared.runner
    memory = ParallelMemory(prepared.memory, workers) if workers else prepared.memory
    scheduler = Scheduler(
        blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        costs=prepared.costs,
        preemption=config.preemption_mode,
        session_pages=int(blocks.num_pages * config.session_memory),
        proposer=_proposer(config),
        max_draft_tokens=config.num_speculative_tokens,
        prefill_budget=_prefill_budget(config, prepared),
        max_loras=config.max_loras if config.enable_lora else 0,
        fair_tenants=config.fair_tenants,
        stages=config.pipeline_parallel_size,
        whole_prompts=loaded.spec.pooling is not None,
    )
    if device.type == "cuda":
        after_ready.watch()
    log_startup(config, prepared, time.monotonic() - started)
    log.info(
        "computing a token takes %.3g ms, copying a block %.3g ms, swapping a block %.3g ms",
        *(1e3 * cost for cost in (prepared.costs.token, prepared.costs.copy, prepared.costs.move)),
    )
    overlap = config.async_scheduling
    if overlap is None:
        overlap = device.type != "cpu" and config.pipeline_parallel_size == 1
    stores, adapters = build_stores(config, prepared, runner), _adapters(config, loaded, adapter_list)
    return Assembly(
        loaded,
        limits,
        scheduler,
        runner,
        device,
        memory,
        stores,
        overlap,
        workers,
        adapters,
        publisher,
        prepared.shares,
    )


def _block_manager(config: EngineConfig, prepared: PreparedModel, listener: Listener | None) -> BlockManager:
    """Return the block manager of the device pool and the host pool."""
    caching = config.enable_prefix_caching and not prepared.loaded.spec.pooling
    pools = prepared.pools
    return BlockManager(
        pools.num_pages,
        pools.layout.blocks,
        caching=caching,
        num_host_pages=pools.num_host_pages,
        keeps_scores=config.batch_invariant,
        listener=listener,
    )


def _limits(config: EngineConfig, loaded: LoadedModel, blocks: BlockManager) -> EngineLimits:
    return EngineLimits(
        max_model_len=loaded.spec.max_model_len,
        vocab_size=loaded.spec.vocab_size,
        num_pages=blocks.num_pages,
        layout=blocks.layout,
        max_num_seqs=config.max_num_seqs,
        embedding=loaded.spec.embedding,
        classification=loaded.spec.classification,
        generates=loaded.spec.generates,
        input_limits=config.limits,
        sampling_defaults=loaded.spec.sampling_defaults,
    )


def _prefill_budget(config: EngineConfig, prepared: PreparedModel) -> PrefillBudget:
    """Return the limit of prompt tokens beside decode, for the target of the options or the device's default."""
    make = partial(PrefillBudget, seconds_per_token=prepared.costs.token, max_tokens=config.max_num_batched_tokens)
    if config.target_step_ms is not None:
        return make(config.target_step_ms / 1e3)
    if prepared.runner.kv.device.type == "cpu":
        return make(CPU_STEP_SECONDS)
    seconds = GPU_DECODE_RATIO * prepared.decode_seconds
    return make(seconds, min_tokens=GPU_MIN_PREFILL, decode_ratio=GPU_DECODE_RATIO)


def _proposer(config: EngineConfig) -> Proposer:
    if config.speculative_model:
        return propose_placeholders
    return PromptLookup(shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max)


def _adapters(
    config: EngineConfig, loaded: LoadedModel, adapter_list: AdapterListFile | None
) -> AdapterRegistry | None:
    if adapter_list is None:
        return None
    assert loaded.lora
    log.info(
        "%d adapter slots of rank %d take %.2f GiB on the device; adaptable layers: %s",
        loaded.lora.slots,
        loaded.lora.rank,
        loaded.lora.nbytes / GIB,
        ", ".join(sorted({name.rpartition(".")[2] for name in loaded.lora.shapes})),
    )
    max_cached = config.max_cpu_loras or config.max_loras
    return AdapterRegistry(
        adapter_list, loaded.lora.shapes, loaded.lora.dtype, max_rank=config.max_lora_rank, max_cached=max_cached
    )
