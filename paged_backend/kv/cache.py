"""The KV cache: the tensors of a pool of blocks, and how many blocks fit into memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice

import numpy as np
import torch
from torch import Tensor

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.sizes import GIB
from paged_backend.utils.machine import available_memory
from paged_kernels.cpu.huge_pages import request_huge_pages
from paged_kernels.layer_cache import FORMATS, LayerCache

CPU_POOL_LIMIT = 4 * GIB
SCALE = torch.float32
DEFAULT_SWAP_SPACE = 4  # size in GiB of the host pool with a GPU
ALIGNMENT = 16  # bytes that a copy kernel moves at a time

TensorShape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class LayerShape:
    """The shape of the keys and values that one attention layer stores for a token."""

    num_kv_heads: int
    head_dim: int  # elements of a key
    value_dim: int | None = None  # elements of a value; None: head_dim
    latent: bool = False  # whether values are the first elements of keys, and are not stored a second time
    window: int | None = None  # tokens that a query sees; None: all
    batch_invariant: bool = False  # whether a GPU computes the attention of each query by itself

    def tensors(self, num_pages: int, block_size: int, dtype: torch.dtype) -> list[TensorShape]:
        """Return shapes and types of the tensors of a pool, in the order of `LayerCache.tensors`."""
        slots = (num_pages, self.num_kv_heads, block_size)
        sizes = [self.head_dim] if self.latent else [self.head_dim, self.value_dim or self.head_dim]
        stored: list[TensorShape] = [((*slots, size), dtype) for size in sizes]
        scales: list[TensorShape] = [(slots, SCALE)] * len(sizes) if dtype in FORMATS else []
        return stored + scales

    def cache(self, tensors: Sequence[Tensor]) -> LayerCache:
        """Return the cache of these tensors."""
        if self.latent:
            cache = LayerCache.latent(tensors[0], self.value_dim or self.head_dim, *tensors[1:])
        else:
            cache = LayerCache(*tensors)
        return replace(cache, batch_invariant=self.batch_invariant)


NO_ATTENTION = LayerShape(0, 0)  # the shape of a layer that stores no keys and values


@dataclass(frozen=True, eq=False)
class KVCache:
    """The keys and values of every layer, in pages; see `CacheLayout`. With one kind of layer a block is one page, and
    one block table serves the whole model. The tensors of a layer without attention are empty."""

    layers: tuple[LayerCache, ...]  # layers in different pages of a block share their tensors
    pages: tuple[int, ...] = ()  # of each layer, among the pages of the blocks of all kinds; empty: all in the first

    @classmethod
    def allocate(
        cls,
        layers: Sequence[LayerShape],
        *,
        num_pages: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        pinned: bool = False,
        places: Sequence[tuple[int, int]] | None = None,
    ) -> KVCache:
        """Return a cache filled with zeros.

        Args:
            layers: shapes of the layers in a page.
            block_size: tokens of a page.
            dtype: a quantized type, or the type of the model's keys and values.
            device: where to allocate it.
            pinned: whether to allocate host memory that a GPU can access directly.
            places: see `CacheLayout`; by default all layers are in one page. With places a page is added, which stays
                zero: the one that stands for NULL in block tables.
        """
        if places is not None:
            pages = tuple(page for page, _ in places)
            cache = cls.allocate(
                layers,
                num_pages=num_pages + 1,
                block_size=block_size,
                dtype=dtype,
                device=device,
                pinned=pinned,
            )
            return cls(tuple(cache.layers[index] for _, index in places), pages)

        shapes = [layer.tensors(num_pages, block_size, dtype) for layer in layers]
        if not pinned:
            pools = [[_zeros(*shape, device) for shape in of_layer] for of_layer in shapes]
            return cls(tuple(layer.cache(pool) for layer, pool in zip(layers, pools, strict=True)))
        tensors = iter(pinned_tensors([shape for of_layer in shapes for shape in of_layer]))
        parts = (tuple(islice(tensors, len(of_layer))) for of_layer in shapes)
        return cls(tuple(layer.cache(part) for layer, part in zip(layers, parts, strict=True)))

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.layers[0].keys.device

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of all layers with attention. The first dimension of each is the block."""
        distinct = {id(layer): layer for layer in self.layers}.values()
        return tuple(tensor for layer in distinct for tensor in layer.tensors if tensor.numel())

    def layer_range(self, start: int, end: int) -> KVCache:
        """Return a view of some of the layers, in the same memory."""
        return KVCache(self.layers[start:end], self.pages[start:end])

    def page_of(self, layer: int) -> int:
        """Return the page of a block that holds a layer."""
        return self.pages[layer] if self.pages else 0

    def read_block(self, pages: Sequence[int]) -> list[Tensor]:
        """Return a copy of a block on the host: for each of its pages a tensor for each of `tensors`."""
        return [tensor[page].to("cpu", copy=True) for page in pages for tensor in self.tensors]

    def write_block(self, pages: Sequence[int], content: Sequence[Tensor]) -> None:
        """Overwrite a block with what `read_block` returned."""
        targets = [tensor[page] for page in pages for tensor in self.tensors]
        for target, value in zip(targets, content, strict=True):
            target.copy_(value)


def pinned_zeros(nbytes: int) -> Tensor:
    """Return zeros in pinned memory. A pool is a single pinned allocation, because PyTorch rounds each up to a power of
    two, and one per tensor could take twice the memory."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).zero_()


def pinned_tensors(shapes: Sequence[TensorShape]) -> list[Tensor]:
    """Return tensors filled with zeros, one after the other in one allocation of pinned memory."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    memory = pinned_zeros(ends[-1])
    return [
        memory[start : start + size].view(dtype).view(shape)
        for (shape, dtype), size, start in zip(shapes, sizes, [0, *ends], strict=False)
    ]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, because attention multiplies slots that were never written by a weight of 0, which NaN would
    survive. On a CPU, NumPy's zeros come from calloc: the pages are provided later, by page_population.py or by the
    first use of a block."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not nbytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
    request_huge_pages(zeros)
    return zeros.view(dtype).view(shape)


def bytes_per_block(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block in all layers: keys, values, and the scales of a quantized `dtype`."""
    tensors = (tensor for layer in layers for tensor in layer.tensors(1, block_size, dtype))
    return sum(math.prod(shape) * stored.itemsize for shape, stored in tensors)


def num_pages(
    config: EngineConfig,
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    device: torch.device,
    reserved: int = 0,
    *,
    states: int = 0,
    pages: int = 1,
) -> int:
    """Return the size of the device pool in pages of these layers.

    Args:
        reserved: bytes of the device for other purposes.
        states: bytes of recurrent states, which `kv_cache_memory_bytes` includes.
        pages: pages of a block.

    Raises ConfigError if no block fits or the requested pool does not fit.
    """
    page = bytes_per_block(layers, config.block_size, dtype)
    block = page * pages
    wanted = _wanted_bytes(config, block, states)
    free = free_bytes(config, device, reserved + states)
    if wanted is not None and wanted > free:
        asked = "num_gpu_blocks_override" if config.num_gpu_blocks_override else "kv_cache_memory_bytes"
        raise ConfigError(
            f"{asked}={getattr(config, asked)}: a pool of {wanted / GIB:.1f} GiB, with blocks of {block} bytes; must"
            f" fit into the {free / GIB:.1f} GiB that are free"
        )
    budget = pool_bytes(config, device, block, states, free)
    if budget < block:
        raise ConfigError(
            f"kv_cache_memory_bytes={budget + states}: one block of {config.block_size} tokens takes {block} bytes"
            f"{f', and the recurrent states take {states}' if states else ''}; give the pool more memory"
        )
    return budget // page


def pool_bytes(config: EngineConfig, device: torch.device, block: int, states: int, free: int) -> int:
    """Return the bytes of the device pool, of blocks of `block` bytes: those that were asked for, or the default.

    states: bytes of recurrent states, which `kv_cache_memory_bytes` includes. free: bytes beside them.
    """
    wanted = _wanted_bytes(config, block, states)
    if wanted is not None:
        return wanted
    return free if device.type == "cuda" else min(CPU_POOL_LIMIT, free // 2)


def host_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes of host memory for swapping, of all ranks of this machine; 0: none. Raises ConfigError if the
    requested memory is not free."""
    wanted = config.swap_space
    if wanted is None:
        wanted = DEFAULT_SWAP_SPACE if device.type == "cuda" else 0
        wanted = min(wanted, available_memory() / 2 / GIB)
    elif wanted * GIB > available_memory():
        raise ConfigError(f"swap_space={wanted}: must fit into the {available_memory() / GIB:.1f} GiB that are free")
    return int(wanted * GIB)


def num_host_blocks(
    config: EngineConfig, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, states: int = 0
) -> int:
    """Return the size of the host pool in blocks; 0: no host pool. Each rank holds its share of every block. states:
    bytes of host memory for the states of recurrent layers. Raises ConfigError if the requested pool does not fit."""
    total, ranks = host_bytes(config, device), config.ranks_per_node
    block = bytes_per_block(layers, config.block_size, dtype)
    if config.swap_space and total < block * ranks + states:
        taken = f"{block * ranks} bytes" + (f" and a recurrent state {states} bytes" if states else "")
        raise ConfigError(
            f"swap_space={config.swap_space}: one block of {config.block_size} tokens takes {taken}; give it more, or 0"
        )
    return max(0, total - states) // ranks // block if block else 0


def free_bytes(config: EngineConfig, device: torch.device, reserved: int = 0) -> int:
    """Return the bytes that a rank may allocate on the device, within the allowed share of a GPU, beside `reserved`
    bytes."""
    if device.type == "cuda":
        return max(0, _free_on_gpu(config.gpu_memory_utilization, device) - reserved)
    return max(0, available_memory() // config.ranks_per_node - reserved)


def _wanted_bytes(config: EngineConfig, block: int, states: int) -> int | None:
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override * block
    return None if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes - states


def _free_on_gpu(utilization: float, device: torch.device) -> int:
    """Return the bytes of GPU memory left after the weights, within the allowed share."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free)
