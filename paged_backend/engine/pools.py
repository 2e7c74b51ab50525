"""Sizes the pools of a rank: pages of the KV cache, on the device and on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.sizes import GIB
from paged_backend.kv.cache import CacheLayout, CacheSpec
from paged_backend.utils.machine import available_memory

CPU_POOL_LIMIT = 4 * GIB
DEFAULT_SWAP_SPACE = 4  # size in GiB of the host pool with a GPU


class Pools(NamedTuple):
    """The sizes of a rank's pools, which are the same on all ranks."""

    layout: CacheLayout
    num_pages: int
    num_host_pages: int = 0


def free_bytes(config: EngineConfig, device: torch.device, reserved: int = 0) -> int:
    """Return the bytes that a rank may allocate on the device, within the allowed share of a GPU, beside `reserved`
    bytes."""
    if device.type != "cuda":
        return max(0, available_memory() // config.ranks_per_node - reserved)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * config.gpu_memory_utilization) - (total - free) - reserved)


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
            states=cache.states,
            max_model_len=cache.max_model_len,
            max_pending=2 * config.max_num_batched_tokens,  # a step may be planned while another is in flight
        )
        self.page_bytes = self.layout.page_bytes
        self._config, self._device = config, device

    @property
    def block_bytes(self) -> int:
        """The bytes of a block in all kinds of layers with attention; without such layers, of a state."""
        return self.page_bytes * self.layout.blocks.token_pages or self.layout.state_bytes

    def sizes(self, reserved: int) -> Pools:
        """Return the sizes beside `reserved` bytes of the device. Raises ConfigError if a pool does not fit."""
        if not self.page_bytes:  # an encoder keeps nothing
            return Pools(self.layout, 1, 0)
        return Pools(self.layout, self._num_pages(reserved), self._num_host_pages(self._host_bytes()))

    def check_longest(self, num_pages: int) -> None:
        """Raise ConfigError if the device pool cannot hold max_model_len tokens."""
        longest, blocks = self._config.max_model_len, self.layout.blocks
        if longest is not None and blocks.pages_for([longest], [longest], 0) > num_pages:
            size = f"blocks of {blocks.block_size}" if blocks.pages == 1 else f"pages of {self.page_bytes} bytes"
            raise ConfigError(
                f"max_model_len={longest}: the KV cache holds only {blocks.max_tokens(num_pages)} tokens"
                f" ({num_pages} {size}); shorten it or give the pool more memory"
            )

    def pool_bytes(self, free: int) -> int:
        """Return the bytes of the device pool: the configured size, even if it does not fit, or the default. free:
        bytes that are available."""
        if self._config.num_gpu_blocks_override is not None:
            return self._config.num_gpu_blocks_override * self.block_bytes
        if self._config.kv_cache_memory_bytes is not None:
            return self._config.kv_cache_memory_bytes
        return free if self._device.type == "cuda" else min(CPU_POOL_LIMIT, free // 2)

    def _num_pages(self, reserved: int) -> int:
        free = free_bytes(self._config, self._device, reserved)
        budget, least = self.pool_bytes(free), self.page_bytes * self.layout.blocks.pages
        asked = "num_gpu_blocks_override" if self._config.num_gpu_blocks_override else "kv_cache_memory_bytes"
        if budget > free:
            raise ConfigError(
                f"{asked}={getattr(self._config, asked)}: a pool of {budget / GIB:.1f} GiB, with blocks of"
                f" {self.block_bytes} bytes; must fit into the {free / GIB:.1f} GiB that are free"
            )
        if budget < least:
            raise ConfigError(
                f"{asked}={getattr(self._config, asked) or budget}: {self._needed()}; give it more memory"
            )
        return budget // self.page_bytes

    def _needed(self, ranks: int = 1) -> str:
        """Return in words what a sequence needs at least. ranks: ranks that share the memory."""
        states = self.layout.state_bytes * ranks
        tokens = self.page_bytes * self.layout.blocks.token_pages * ranks
        parts = [f"one block of {self._config.block_size} tokens takes {tokens} bytes"] if tokens else []
        if states:
            parts.append(f"the recurrent layers keep {states} bytes for a sequence")
        return ", and ".join(parts)

    def _host_bytes(self) -> int:
        """Return the bytes of host memory for swapping, for all ranks of this machine together; 0 if there is no
        swapping."""
        wanted, free = self._config.swap_space, available_memory()
        if wanted is None:
            wanted = min(DEFAULT_SWAP_SPACE if self._device.type == "cuda" else 0, free / 2 / GIB)
        elif wanted * GIB > free:
            raise ConfigError(f"swap_space={wanted}: must fit into the {free / GIB:.1f} GiB that are free")
        return int(wanted * GIB)

    def _num_host_pages(self, total: int) -> int:
        """Return the size of the host pool in pages; 0 without a host pool. Each rank holds its share of every block.

        total: bytes of host memory.
        """
        config, ranks = self._config, self._config.ranks_per_node
        if config.swap_space and total < self.page_bytes * self.layout.blocks.pages * ranks:
            raise ConfigError(f"swap_space={config.swap_space}: {self._needed(ranks)}; give it more, or 0")
        return total // ranks // self.page_bytes
