"""Sizes the pools of a rank: pages of the KV cache and states of recurrent layers, on the device and on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.sizes import GIB
from paged_backend.kv.cache import CacheLayout, CacheSpec, bytes_per_slot
from paged_backend.kv.states import num_draft_slots
from paged_backend.utils.machine import available_memory

CPU_POOL_LIMIT = 4 * GIB
DEFAULT_SWAP_SPACE = 4  # size in GiB of the host pool with a GPU
MAX_FREE_BLOCKS = 1 << 18  # blocks of a pool that takes no memory


class Pools(NamedTuple):
    """The sizes of a rank's pools, which are the same on all ranks."""

    layout: CacheLayout
    num_pages: int
    num_host_pages: int = 0
    num_state_slots: int = 0
    num_host_state_slots: int = 0


def free_bytes(config: EngineConfig, device: torch.device, reserved: int = 0) -> int:
    """Return the bytes that a rank may allocate on the device, within the allowed share of a GPU, beside `reserved`
    bytes."""
    if device.type != "cuda":
        return max(0, available_memory() // config.ranks_per_node - reserved)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * config.gpu_memory_utilization) - (total - free) - reserved)


def state_slots(config: EngineConfig) -> tuple[int, int]:
    """Return the number of state slots of a model with recurrent layers: all slots, and the slots for draft
    tokens.

    There is a slot for each sequence, for each draft token of a step, and for each checkpoint if prefixes are cached.
    """
    drafts = num_draft_slots(config.max_num_seqs, config.max_num_batched_tokens, config.num_speculative_tokens)
    checkpoints = config.max_num_seqs if config.max_state_checkpoints is None else config.max_state_checkpoints
    return config.max_num_seqs + drafts + checkpoints * config.enable_prefix_caching, drafts


class PoolSizing:
    """Computes the sizes of the pools of a model that keeps `cache` of its sequences."""

    def __init__(self, config: EngineConfig, cache: CacheSpec, device: torch.device):
        layers = cache.layers
        if config.pipeline_parallel_size > 1:  # all stages have the same blocks, even if their windows differ
            layers = tuple(replace(layer, window=None) for layer in layers)
        self.layout = CacheLayout.of(
            layers,
            config.block_size,
            cache.kv_dtype,
            max_model_len=cache.max_model_len,
            max_pending=2 * config.max_num_batched_tokens,  # a step may be planned while another is in flight
        )
        self.page_bytes = self.layout.page_bytes
        self.slot_bytes = bytes_per_slot(cache.states)
        self.num_state_slots = state_slots(config)[0] if cache.states else 0
        self._config, self._device, self._max_model_len = config, device, cache.max_model_len

    @property
    def block_bytes(self) -> int:
        """The bytes of a block in all kinds of layers."""
        return self.page_bytes * self.layout.blocks.pages

    def sizes(self, reserved: int) -> Pools:
        """Return the sizes beside `reserved` bytes of the device. Raises ConfigError if a pool does not fit."""
        states = self.state_bytes(free_bytes(self._config, self._device, reserved))
        host = self._host_bytes()
        host_slots = self._num_host_state_slots(host)
        if self.page_bytes:
            pages = self._num_pages(reserved, states)
            host_pages = self._num_host_pages(host, host_slots * self.slot_bytes)
        else:
            enough = self._pages_without_memory()
            pages, host_pages = self._config.num_gpu_blocks_override or enough, enough if host_slots else 0
        return Pools(self.layout, pages, host_pages, self.num_state_slots, host_slots)

    def check_longest(self, num_pages: int) -> None:
        """Raise ConfigError if the device pool cannot hold max_model_len tokens."""
        longest, blocks = self._config.max_model_len, self.layout.blocks
        if longest is not None and blocks.pages_for([longest], [longest], 0) > num_pages:
            raise ConfigError(
                f"max_model_len={longest}: the KV cache holds only {blocks.max_tokens(num_pages)} tokens"
                f" ({num_pages} blocks of {blocks.block_size}); shorten it or give the pool more memory"
            )

    def state_bytes(self, free: int) -> int:
        """Return the bytes of all state slots on the device. free: bytes that are available.

        Raises ConfigError if the states take more than that, or more than the configured size of the pool.
        """
        config, total = self._config, self.num_state_slots * self.slot_bytes
        limit, limited_by = free, f"the {free / GIB:.1f} GiB that are free"
        pool = None if config.num_gpu_blocks_override else config.kv_cache_memory_bytes
        if pool is not None and pool < free:
            limit, limited_by = pool, f"kv_cache_memory_bytes={pool}"
        if total > limit:
            drafts = state_slots(config)[1]
            checkpoints = self.num_state_slots - config.max_num_seqs - drafts
            for_drafts = f", for each of {drafts} draft tokens (num_speculative_tokens)" if drafts else ""
            raise ConfigError(
                f"max_num_seqs={config.max_num_seqs}: the recurrent layers keep {self.slot_bytes} bytes for each"
                f" sequence{for_drafts} and for each of {checkpoints} checkpoints (max_state_checkpoints),"
                f" {total} bytes in all; must fit into {limited_by}; lower one of these numbers"
            )
        return total

    def pool_bytes(self, states: int, free: int) -> int:
        """Return the bytes of the device pool: the configured size, even if it does not fit, or the default.

        Args:
            states: bytes of recurrent states, which `kv_cache_memory_bytes` includes.
            free: bytes that are available beside them.
        """
        if self._config.num_gpu_blocks_override is not None:
            return self._config.num_gpu_blocks_override * self.block_bytes
        if self._config.kv_cache_memory_bytes is not None:
            return self._config.kv_cache_memory_bytes - states
        return free if self._device.type == "cuda" else min(CPU_POOL_LIMIT, free // 2)

    def _num_pages(self, reserved: int, states: int) -> int:
        free = free_bytes(self._config, self._device, reserved + states)
        budget = self.pool_bytes(states, free)
        if budget > free:
            asked = "num_gpu_blocks_override" if self._config.num_gpu_blocks_override else "kv_cache_memory_bytes"
            raise ConfigError(
                f"{asked}={getattr(self._config, asked)}: a pool of {budget / GIB:.1f} GiB, with blocks of"
                f" {self.block_bytes} bytes; must fit into the {free / GIB:.1f} GiB that are free"
            )
        if budget < self.block_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes={budget + states}: one block of {self._config.block_size} tokens takes"
                f" {self.block_bytes} bytes{f', and the recurrent states take {states}' if states else ''}; give the"
                " pool more memory"
            )
        return budget // self.page_bytes

    def _pages_without_memory(self) -> int:
        """Return the number of pages for a model without attention, whose blocks hold nothing: enough for all
        sequences, but not more than the scheduler should list."""
        per_sequence = -(-self._max_model_len // self._config.block_size)
        return max(per_sequence, min(self._config.max_num_seqs * per_sequence, MAX_FREE_BLOCKS))

    def _host_bytes(self) -> int:
        """Return the bytes of host memory for swapping, for all ranks of this machine together; 0 if there is no
        swapping."""
        wanted, free = self._config.swap_space, available_memory()
        if wanted is None:
            wanted = min(DEFAULT_SWAP_SPACE if self._device.type == "cuda" else 0, free / 2 / GIB)
        elif wanted * GIB > free:
            raise ConfigError(f"swap_space={wanted}: must fit into the {free / GIB:.1f} GiB that are free")
        return int(wanted * GIB)

    def _num_host_state_slots(self, total: int) -> int:
        """Return the number of state slots on the host: at most one per sequence that may run. They take at most half
        of the `total` bytes, or all if the model has no attention, whose keys and values would need the other half."""
        slot, swap_space = self.slot_bytes, self._config.swap_space
        if not slot or not total:
            return 0
        if total < slot and swap_space:
            raise ConfigError(
                f"swap_space={swap_space}: the recurrent layers keep {slot} bytes for a sequence; give it more, or 0"
            )
        share = total // 2 if self.page_bytes else total
        return min(self._config.max_num_seqs, max(share // slot, min(1, total // slot)))

    def _num_host_pages(self, total: int, states: int) -> int:
        """Return the size of the host pool in pages; 0 without a host pool. Each rank holds its share of every block.

        total: bytes of host memory. states: how many of them are for the states of recurrent layers.
        """
        config, ranks = self._config, self._config.ranks_per_node
        if config.swap_space and total < self.page_bytes * ranks + states:
            taken = f"{self.page_bytes * ranks} bytes" + (f" and a recurrent state {states} bytes" if states else "")
            raise ConfigError(
                f"swap_space={config.swap_space}: one block of {config.block_size} tokens takes {taken}; give it more,"
                " or 0"
            )
        return max(0, total - states) // ranks // self.page_bytes
