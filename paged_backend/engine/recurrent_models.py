"""Serves models with recurrent layers: the options that they exclude, and the memory of their states.

A state belongs to one position of one sequence. It cannot go back by a token, so there are no draft tokens. It is not
moved to the host: preempted requests are computed again, from their last checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.options import invalid_option
from paged_backend.api.sizes import GIB
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.memory.state_cache import bytes_per_slot

log = logging.getLogger("paged_llm")

MAX_FREE_BLOCKS = 1 << 18  # blocks of a pool that takes no memory

# Options that cannot be honored, and when they ask for something.
EXCLUDED: dict[str, Callable[[EngineConfig], bool]] = {
    "num_speculative_tokens": lambda config: config.num_speculative_tokens > 0,
    "enable_lora": lambda config: config.enable_lora,
    "swap_space": lambda config: bool(config.swap_space),
    "preemption_mode": lambda config: config.preemption_mode == "swap",
    "disk_cache_dir": lambda config: config.disk_cache_dir is not None,
    "tensor_parallel_size": lambda config: config.tensor_parallel_size > 1,
    "remote_cache_url": lambda config: config.remote_cache_url is not None,
}


def restrict_options(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """Return the options that a model is served with. A model with recurrent layers is not swapped out.

    Raises ConfigError for an option that was set and that recurrent layers do not support.
    """
    if not loaded.spec.states:
        return config
    name = type(loaded.model).__name__
    for option, is_set in EXCLUDED.items():
        if is_set(config):
            problem = f"not supported for {name}, which has recurrent layers; leave it out"
            raise invalid_option(option, getattr(config, option), problem)
    return replace(config, swap_space=0, preemption_mode="recompute")


def num_state_slots(config: EngineConfig) -> int:
    """Return the number of state slots: one per sequence, and those of checkpoints if prefixes are cached."""
    checkpoints = config.max_num_seqs if config.max_state_checkpoints is None else config.max_state_checkpoints
    return config.max_num_seqs + checkpoints * config.enable_prefix_caching


def log_restrictions(loaded: LoadedModel) -> None:
    """Log what a model with recurrent layers is served without."""
    if loaded.spec.states:
        log.warning(
            "%s has recurrent layers: served without swapping, draft tokens and CUDA graphs",
            type(loaded.model).__name__,
        )


def state_bytes(config: EngineConfig, loaded: LoadedModel, free: int) -> int:
    """Return the bytes of the states of all sequences that may run, and of checkpoints. free: bytes that are available.
    Raises ConfigError if the states take more."""
    slot = bytes_per_slot(loaded.spec.states)
    total = num_state_slots(config) * slot if slot else 0
    if total > free:
        raise ConfigError(
            f"max_num_seqs={config.max_num_seqs}: the recurrent layers keep {slot} bytes for each sequence and for each"
            f" of {num_state_slots(config) - config.max_num_seqs} checkpoints (max_state_checkpoints),"
            f" {total / GIB:.1f} GiB in all; must fit into the {free / GIB:.1f} GiB that are free; lower it"
        )
    return total


def blocks_without_memory(config: EngineConfig, max_model_len: int) -> int:
    """Return the number of blocks of a model without attention, whose blocks hold nothing: enough for all sequences,
    but not more than the scheduler should list."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    per_sequence = -(-max_model_len // config.block_size)
    return max(per_sequence, min(config.max_num_seqs * per_sequence, MAX_FREE_BLOCKS))
