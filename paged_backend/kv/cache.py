"""The tensors of the pools: keys and values in pages, and states of recurrent layers in slots.

A layer with attention stores keys and values for every token, in blocks. A recurrent layer (Mamba, a gated delta net, a
short convolution) stores the same few tensors however long the sequence is:

    slot           0         1         2       first dimension of every tensor
    layer 0     conv state, recurrent state    the last inputs of its convolution; the state of its scan
    layer 1     conv state                     a layer that is only a convolution
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paged_kernels.cpu.huge_pages import HUGE_PAGE, populate_pages, request_huge_pages
from paged_kernels.layer_cache import FORMATS, LayerCache

SCALE = torch.float32
ALIGNMENT = 16  # bytes that a copy kernel moves at a time

LOWEST_PRIORITY = 19  # nice value
POPULATING_THREAD = "kv-cache-pages"


class TensorShape(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


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
        stored = [TensorShape((*slots, size), dtype) for size in sizes]
        return stored + ([TensorShape(slots, SCALE)] * len(sizes) if dtype in FORMATS else [])

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
    pages: tuple[int, ...] = ()  # page of each layer, counted over the blocks of all kinds; empty: all in page 0

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
            places: see `CacheLayout`; by default all layers are in one page. With places, one more page is allocated,
                which stays zero and stands for NULL in block tables.
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
            pools = [[_zeros(*shape, device) for shape in layer_shapes] for layer_shapes in shapes]
            return cls(tuple(layer.cache(pool) for layer, pool in zip(layers, pools, strict=True)))
        tensors = iter(pinned_tensors([shape for layer_shapes in shapes for shape in layer_shapes]))
        parts = (tuple(islice(tensors, len(layer_shapes))) for layer_shapes in shapes)
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

    @property
    def pages_per_block(self) -> int:
        """The number of pages of a block, in all kinds of layers."""
        return max(self.pages, default=0) + 1

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
    """Return zeros in pinned memory. A pool is a single pinned allocation: PyTorch rounds each allocation up to a power
    of two, so one per tensor could take twice the memory."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).zero_()


def pinned_tensors(shapes: Sequence[TensorShape]) -> list[Tensor]:
    """Return tensors filled with zeros, one after the other in one allocation of pinned memory."""
    sizes = [shape.nbytes for shape in shapes]
    ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    memory = pinned_zeros(ends[-1])
    return [
        memory[start : start + size].view(dtype).view(shape)
        for (shape, dtype), size, start in zip(shapes, sizes, [0, *ends], strict=False)
    ]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. Attention multiplies slots that were never written by a weight of 0, and NaN would
    survive that. On a CPU, NumPy's zeros come from calloc: the system provides the memory later, in
    `populate_in_background` or when a block is first used."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not nbytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
    request_huge_pages(zeros)
    return zeros.view(dtype).view(shape)


def bytes_per_block(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block in all layers: keys, values, and the scales of a quantized `dtype`."""
    return sum(tensor.nbytes for layer in layers for tensor in layer.tensors(1, block_size, dtype))


@dataclass(frozen=True)
class StateShape:
    """The states that one recurrent layer keeps for a sequence."""

    conv: TensorShape  # [channels, kernel_size]: the last inputs of the convolution
    recurrent: TensorShape | None  # None: the layer is only a convolution

    @property
    def nbytes(self) -> int:
        """The size in bytes of both states."""
        return self.conv.nbytes + (self.recurrent.nbytes if self.recurrent else 0)


@dataclass(frozen=True, eq=False)
class LayerState:
    """The states of one recurrent layer. The first dimension is the slot."""

    conv: Tensor  # [num_slots, channels, kernel_size]
    recurrent: Tensor | None  # [num_slots, ...]


@dataclass(frozen=True, eq=False)
class StateCache:
    """The states of every recurrent layer, in slots. A sequence has the same slot in all layers."""

    layers: tuple[LayerState, ...]  # in the order of the model's recurrent layers

    @classmethod
    def allocate(
        cls, layers: Sequence[StateShape], *, num_slots: int, device: torch.device, pinned: bool = False
    ) -> StateCache:
        """Return a cache filled with zeros. pinned: whether to allocate host memory that a GPU can access directly."""

        shapes = [
            TensorShape((num_slots, *part.shape), part.dtype)
            for layer in layers
            for part in (layer.conv, layer.recurrent)
            if part
        ]
        tensors = iter(
            pinned_tensors(shapes)
            if pinned
            else [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        )
        return cls(tuple(LayerState(next(tensors), next(tensors) if layer.recurrent else None) for layer in layers))

    @property
    def num_slots(self) -> int:
        """The number of sequences whose states fit."""
        return len(self.tensors[0])

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of all layers. The first dimension of each is the slot."""
        parts = (part for layer in self.layers for part in (layer.conv, layer.recurrent))
        return tuple(part for part in parts if part is not None)

    def copy_slots(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy slots, given as (source, destination), as if all at once. Forks a sequence, or writes a checkpoint of
        its state."""
        copies = list(pairs)
        if not copies:
            return
        sources, destinations = (list(slots) for slots in zip(*copies, strict=True))
        for tensor in self.tensors:
            tensor[destinations] = tensor[sources]

    def copy_to(self, other: StateCache, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy slots, given as (source, destination), to a cache of the same layers on another device. Returns before a
        GPU has copied them; copies are made in order with other work of the current stream."""
        for source, destination in pairs:
            for tensor, copy in zip(self.tensors, other.tensors, strict=True):
                copy[destination].copy_(tensor[source], non_blocking=True)

    def read_slot(self, slot: int) -> list[Tensor]:
        """Return a copy of one slot on the host: a tensor for each of `tensors`."""
        return [tensor[slot].to("cpu", copy=True) for tensor in self.tensors]

    def write_slot(self, slot: int, content: Sequence[Tensor]) -> None:
        """Overwrite one slot with what `read_slot` returned."""
        for tensor, value in zip(self.tensors, content, strict=True):
            tensor[slot] = value


def bytes_per_slot(layers: Sequence[StateShape]) -> int:
    """Return the bytes of one slot in all layers."""
    return sum(layer.nbytes for layer in layers)


def populate_in_background(cache: KVCache) -> threading.Thread:
    """Start a thread that populates the pages of all blocks, lowest numbers first, and return it.

    Without it, the first write to a page waits until the system has cleared the page: a sixth of the time of a prefill
    (2 cores of an AMD EPYC, Zen 5, in a virtual machine). The thread has the lowest priority, and ends early when the
    cache is no longer referenced.
    """
    thread = threading.Thread(target=_populate, args=[weakref.ref(cache)], name=POPULATING_THREAD, daemon=True)
    thread.start()
    return thread


def wait_until_populated() -> None:
    """Wait until the pages of all caches of this process are populated."""
    for thread in threading.enumerate():
        if thread.name == POPULATING_THREAD:
            thread.join()


def _populate(reference: weakref.ref[KVCache]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    start = 0  # bytes of each tensor that are done
    while (cache := reference()) is not None:
        if start >= max((tensor.nbytes for tensor in cache.tensors), default=0):
            return
        for tensor in cache.tensors:
            populate_pages(tensor, start, min(start + HUGE_PAGE, tensor.nbytes))
        del cache, tensor
        start += HUGE_PAGE
