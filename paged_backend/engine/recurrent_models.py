"""Serves models with recurrent layers: the options that they exclude, and the memory of their states."""

from __future__ import annotations

import logging

import torch

from paged_backend.api.config import STORES, EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.sizes import GIB
from paged_backend.kv.cache import bytes_per_block, host_bytes
from paged_backend.kv.cache_layout import CacheSpec
from paged_backend.kv.state_cache import bytes_per_slot
from paged_backend.kv.states import num_draft_slots
from paged_backend.loading.model_loader import LoadedModel

log = logging.getLogger("paged_llm")

MAX_FREE_BLOCKS = 1 << 18  # blocks of a pool that takes no memory

# Options that cannot be honored.
EXCLUDED = ("enable_lora", "tensor_parallel_size", *STORES)


def check_options(config: EngineConfig, name: str, *, has_states: bool) -> None:
    """Raise ConfigError for an option that was set and that the model's recurrent layers do not support.

    Logs an option that has no effect without recurrent layers. name: of the model's class.
    """
    if not has_states:
        if config.max_state_checkpoints is not None:
            count = config.max_state_checkpoints
            log.warning("max_state_checkpoints=%d has no effect: %s has no recurrent layers", count, name)
        return
    config.reject(EXCLUDED, f"not supported for {name}, which has recurrent layers; leave it out")


def num_state_slots(config: EngineConfig) -> int:
    """Return the number of state slots: one per sequence, those of the draft tokens of a step, and those of checkpoints
    if prefixes are cached."""
    checkpoints = config.max_num_seqs if config.max_state_checkpoints is None else config.max_state_checkpoints
    return config.max_num_seqs + _num_draft_slots(config) + checkpoints * config.enable_prefix_caching


def _num_draft_slots(config: EngineConfig) -> int:
    return num_draft_slots(config.max_num_seqs, config.max_num_batched_tokens, config.num_speculative_tokens)


def num_host_state_slots(config: EngineConfig, cache: CacheSpec, device: torch.device) -> int:
    """Return the number of state slots on the host: at most one per sequence that may run. They take at most half of
    the host's memory, or all of it if the model has no attention, whose keys and values would need the other half.
    Raises ConfigError if the requested memory cannot hold one."""
    slot, total = bytes_per_slot(cache.states), host_bytes(config, device)
    if not slot or not total:
        return 0
    if total < slot and config.swap_space:
        raise ConfigError(
            f"swap_space={config.swap_space}: the recurrent layers keep {slot} bytes for a sequence; give it more, or 0"
        )
    has_blocks = bytes_per_block(cache.layers, config.block_size, cache.kv_dtype) > 0
    return min(config.max_num_seqs, max(total // (1 + has_blocks) // slot, min(1, total // slot)))


def log_restrictions(loaded: LoadedModel, device: torch.device) -> None:
    """Log what a model with recurrent layers is served without."""
    if loaded.spec.states and device.type == "cuda":
        log.warning("%s has recurrent layers: served without CUDA graphs", type(loaded.model).__name__)


def state_bytes(config: EngineConfig, cache: CacheSpec, free: int) -> int:
    """Return the bytes of the states of all sequences that may run, of draft tokens, and of checkpoints. free: bytes
    that are available. Raises ConfigError if the states take more, or more than the pool that was asked for."""
    slot = bytes_per_slot(cache.states)
    total = num_state_slots(config) * slot if slot else 0
    limit, limited_by = free, f"the {free / GIB:.1f} GiB that are free"
    pool = None if config.num_gpu_blocks_override else config.kv_cache_memory_bytes
    if pool is not None and pool < free:
        limit, limited_by = pool, f"kv_cache_memory_bytes={pool}"
    if total > limit:
        drafts = _num_draft_slots(config)
        checkpoints = num_state_slots(config) - config.max_num_seqs - drafts
        for_drafts = f", for each of {drafts} draft tokens (num_speculative_tokens)" if drafts else ""
        raise ConfigError(
            f"max_num_seqs={config.max_num_seqs}: the recurrent layers keep {slot} bytes for each sequence{for_drafts}"
            f" and for each of {checkpoints} checkpoints (max_state_checkpoints),"
            f" {total} bytes in all; must fit into {limited_by}; lower one of these numbers"
        )
    return total


def blocks_without_memory(config: EngineConfig, max_model_len: int) -> int:
    """Return the number of blocks of a pool for a model without attention, whose blocks hold nothing: enough for all
    sequences, but not more than the scheduler should list."""
    per_sequence = -(-max_model_len // config.block_size)
    return max(per_sequence, min(config.max_num_seqs * per_sequence, MAX_FREE_BLOCKS))
