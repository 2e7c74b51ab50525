"""Moves the memory of device tensors to the host and back, while the tensors stay the same objects.

    awake    parameter, fused view, tied weight ──▶ storage ──▶ device memory
    asleep   parameter, fused view, tied weight ──▶ storage ──▶ nothing          pinned chunks hold its bytes

What is freed is the storage behind the tensors, so every view of it, wherever it is referenced, is valid again after
`restore`. Only addresses may change: those that were recorded in a CUDA graph or in a table have to be recorded again.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paged_kernels.cpu.huge_pages import release_pages

# PyTorch rounds each pinned allocation up to a power of two, so chunks of one waste at most a part of the last.
CHUNK_BYTES = 1 << 28
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, types.GeneratorType)


def find_tensors(*roots: object) -> Iterator[Tensor]:
    """Yield every tensor that Python objects reach from `roots`: parameters, buffers, and tensors in attributes,
    containers, closures and partial functions. Classes, modules and the globals of functions are not followed."""
    pending: list[Any] = list(roots)
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value):
            yield value
        if isinstance(value, types.FunctionType):
            pending += [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
        elif not (isinstance(value, dict) and "__builtins__" in value):
            pending += gc.get_referents(value)


def distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the storages of these tensors that have memory, each once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in storages.values() if storage.nbytes()]


def release(storages: Iterable[UntypedStorage]) -> None:
    """Free the memory of storages, whose contents are lost. Memory that PyTorch did not allocate, such as the
    KV cache on a CPU, keeps its addresses and gives its pages back to the system."""
    for storage in storages:
        if storage.resizable():
            storage.resize_(0)
        else:
            release_pages(_bytes_of(storage))


def allocate(storages: Sequence[UntypedStorage], sizes: Sequence[int]) -> None:
    """Give storages that were released memory again, with undefined content. Raises RuntimeError, with nothing
    allocated, if there is not enough."""
    try:
        for storage, size in zip(storages, sizes, strict=True):
            if storage.resizable():
                storage.resize_(size)
    except RuntimeError:
        release(storage for storage in storages if storage.resizable())
        raise


class HostCopy:
    """The bytes of some storages in host memory."""

    def __init__(self, storages: Sequence[UntypedStorage]):
        """Copy the storages, which are on a GPU or on the CPU. For a GPU the copy is pinned memory. Raises RuntimeError
        if the host has not enough of it."""
        self.storages = storages
        self.sizes = [storage.nbytes() for storage in storages]
        pinned = any(storage.device.type == "cuda" for storage in storages)
        lengths = [min(CHUNK_BYTES, self.nbytes - start) for start in range(0, self.nbytes, CHUNK_BYTES)]
        self._chunks = [torch.empty(length, dtype=torch.uint8, pin_memory=pinned) for length in lengths]
        for device, host in self._parts():
            host.copy_(device, non_blocking=pinned)
        self._synchronize()

    @property
    def nbytes(self) -> int:
        """The size of the copy in bytes."""
        return sum(self.sizes)

    def write_back(self) -> None:
        """Copy the bytes to the storages, which have memory again."""
        for device, host in self._parts():
            device.copy_(host, non_blocking=True)
        self._synchronize()

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the same bytes of a storage and of a chunk."""
        position = 0
        for storage in self.storages:
            left = _bytes_of(storage)
            while len(left):
                chunk = self._chunks[position // CHUNK_BYTES][position % CHUNK_BYTES :]
                count = min(len(left), len(chunk))
                yield left[:count], chunk[:count]
                left, position = left[count:], position + count

    def _synchronize(self) -> None:
        for device in {storage.device for storage in self.storages if storage.device.type == "cuda"}:
            torch.cuda.synchronize(device)


def fill_zeros(storages: Iterable[UntypedStorage]) -> None:
    """Overwrite storages that PyTorch allocated with zeros. Pages that the system provides again are zeros already."""
    for storage in storages:
        if storage.resizable():
            _bytes_of(storage).zero_()


def _bytes_of(storage: UntypedStorage) -> Tensor:  # [nbytes] uint8
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
