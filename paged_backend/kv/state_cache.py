"""The states of recurrent layers: a slot per sequence, and what is copied when a sequence forks or is swapped.

A layer with attention stores keys and values for every token, in blocks. A recurrent layer (Mamba, a gated delta net, a
short convolution) stores the same few tensors however long the sequence is:

    slot           0         1         2       first dimension of every tensor
    layer 0     conv state, recurrent state    the last inputs of its convolution; the state of its scan
    layer 1     conv state                     a layer that is only a convolution
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paged_backend.kv.cache import pinned_tensors


@dataclass(frozen=True)
class TensorShape:
    """The shape and dtype of a state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


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
            ((num_slots, *part.shape), part.dtype) for one in layers for part in (one.conv, one.recurrent) if part
        ]
        tensors = iter(
            pinned_tensors(shapes)
            if pinned
            else [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        )
        return cls(tuple(LayerState(next(tensors), next(tensors) if one.recurrent else None) for one in layers))

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
        """Copy slots (source, destination) to others, as if all at once: to fork a sequence, or to keep its state at
        this position."""
        copies = list(pairs)
        if not copies:
            return
        sources, destinations = (list(slots) for slots in zip(*copies, strict=True))
        for tensor in self.tensors:
            tensor[destinations] = tensor[sources]

    def copy_to(self, other: StateCache, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy slots (source, destination) to a cache of the same layers on another device. Returns before a GPU has
        copied them; copies are made in order with other work of the current stream."""
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
