"""Copies the tensors of a batch to the device in one transfer from pinned memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

ALIGNMENT = 16  # in bytes: enough for the widest type and for vector loads of kernels

T = TypeVar("T")


class _PinnedBuffer:
    """Pinned host memory, with an event that is reached when the device has read the contents."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.consumed = torch.cuda.Event()

    def reserve(self, size: int) -> Tensor:
        """Return `size` bytes that may be overwritten, waiting for the device if it still reads them."""
        self.consumed.synchronize()
        if len(self.bytes) < size:
            self.bytes = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        return self.bytes[:size]


class DeviceUpload:
    """Copies the tensors of a dataclass, and of the dataclasses in it, to the device.

    To a GPU, all tensors go in one asynchronous copy from pinned memory. Two buffers alternate, so that one is filled
    while the device reads the other.
    """

    def __init__(self, device: torch.device | None):
        """device: None if the tensors are on the device already."""
        self._device = device
        self._buffers = [_PinnedBuffer(), _PinnedBuffer()] if device is not None and device.type == "cuda" else []

    def __call__(self, tree: T, head: Tensor | None = None) -> T:
        """Return the same dataclass with its tensors on the device. head: [bytes] uint8, fixed device memory for the
        first tensors, such as a CUDA graph's inputs. The others, if there are any, are copied separately."""
        if not self._buffers:
            if head is not None:
                _fill(head, tensors_of(tree))
            return tree
        self._buffers.reverse()
        tensors, fixed = tensors_of(tree), 0 if head is None else len(head)
        staged = self._buffers[0].reserve(_ends(tensors)[-1])
        _fill(staged, tensors)
        if head is not None:
            head.copy_(staged[:fixed], non_blocking=True)
        rest = staged[fixed:]
        uploaded = rest.to(self._device, non_blocking=True) if len(rest) else rest
        self._buffers[0].consumed.record()
        return self.views(tree, uploaded, fixed)

    @staticmethod
    def size_of(tree: Any) -> int:
        """Return the size in bytes of a dataclass's tensors in a buffer, with alignment."""
        return _ends(tensors_of(tree))[-1]

    @staticmethod
    def views(tree: T, memory: Tensor, skipped: int = 0) -> T:
        """Return the dataclass with its tensors replaced by views into `memory` [bytes] uint8, one after the other.
        Tensors within the first `skipped` bytes are elsewhere and stay as they are."""
        starts = iter([0, *_ends(tensors_of(tree))])

        def view(tensor: Tensor) -> Tensor:
            start = next(starts) - skipped
            if start < 0:
                return tensor
            return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        return map_tensors(tree, view)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return all tensors of a dataclass, in the order of `map_tensors`."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(tree, collect)
    return tensors


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor of a dataclass and of the dataclasses and tuples in it, always in one order. A
    tensor that occurs several times is changed once, and shared by the result as well."""
    changed: dict[int, Tensor] = {}

    def visit(part: Any) -> Any:
        if isinstance(part, Tensor):
            if id(part) not in changed:
                changed[id(part)] = change(part)
            return changed[id(part)]
        if type(part) is tuple:
            return tuple(map(visit, part))
        if not is_dataclass(part):
            return part
        return replace(part, **{field.name: visit(getattr(part, field.name)) for field in fields(part)})  # type: ignore[type-var]

    return visit(tree)


def _ends(tensors: list[Tensor]) -> list[int]:
    return list(itertools.accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors))


def _fill(memory: Tensor, tensors: list[Tensor]) -> None:
    """Write tensors one after the other, until `memory` is full."""
    for tensor, start in zip(tensors, [0, *_ends(tensors)], strict=False):
        if start == len(memory):
            break
        memory[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
