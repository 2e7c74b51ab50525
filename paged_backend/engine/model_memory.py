"""The device memory of a model on one rank: released while the model sleeps, and restored when it wakes.

                     released                                      restored
    CUDA graphs      freed, because they contain addresses         captured again
    KV cache, states freed; their contents are lost                allocated again, filled with zeros
    weights          on a GPU: moved to pinned host memory         moved back, bit for bit
                     on a CPU: stay, there is no other memory

Also the weights of a draft model, adapter slots and copies of weights are moved: every tensor on the device that the
runner and the model reach. The CUDA context and the workspaces of libraries stay on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

import torch
from torch import UntypedStorage

from paged_backend.api.sizes import GIB
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.engine.host_copy import HostCopy, allocate, distinct_storages, fill_zeros, find_tensors, release
from paged_backend.execution.cpu_threads import count_threads
from paged_backend.execution.runner import Runner
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.utils.machine import available_memory


class MemoryShortage(RuntimeError):
    """There is not enough memory to put a model to sleep or to wake it. Nothing was changed, on any rank."""


class MemoryCommand(Enum):
    """A message of rank 0 to the other ranks: release or restore the memory."""

    RELEASE = "release"
    RESTORE = "restore"


@dataclass(frozen=True)
class ReleasedMemory:
    """The bytes of one rank that were released."""

    pool: int  # KV cache
    weights: int  # moved to the host; 0 on a CPU
    graphs: int  # CUDA graphs

    @property
    def total(self) -> int:
        return self.pool + self.weights + self.graphs


class ModelMemory:
    """Releases and restores the device memory of a model. Called on the engine's thread while no step is in flight."""

    def __init__(
        self,
        loaded: LoadedModel,
        runner: Runner,
        group: ProcessGroup,
        *,
        ranks_per_node: int,
        capture: Callable[[], None],
    ):
        """ranks_per_node: ranks that share the memory of this machine. capture: captures the graphs of the runner."""
        self._loaded, self._runner, self._group = loaded, runner, group
        self._ranks_per_node = ranks_per_node
        self._capture = capture
        self._pool = distinct_storages([runner.kv.memory])
        self._pool_sizes = [storage.nbytes() for storage in self._pool]
        self._moves_weights = runner.kv.device.type != "cpu"
        self._weights: HostCopy | None = None
        self._released: ReleasedMemory | None = None
        self._had_graphs = False

    @property
    def released(self) -> ReleasedMemory | None:
        """The memory that is released while the model sleeps; None while it is awake."""
        return self._released

    @property
    def host_bytes(self) -> int:
        """The size of the weights in host memory while the model sleeps."""
        return self._weights.nbytes if self._weights else 0

    def run(self, command: MemoryCommand) -> None:
        """Follow a command of rank 0. If there is not enough memory, all ranks agree on it, and rank 0 reports it."""
        with suppress(MemoryShortage):
            if command is MemoryCommand.RELEASE:
                self.release()
            else:
                self.restore()

    def release(self) -> ReleasedMemory:
        """Release the memory. Raises MemoryShortage if the host cannot hold the weights."""
        assert self._released is None
        runner = self._runner
        runner.copier.settle()
        self._had_graphs, reserved = runner.num_graphs > 0, self._reserved_bytes()
        runner.release_graphs()
        graphs = reserved - self._reserved_bytes()
        try:
            self._weights = self._copy_weights()
        except MemoryShortage:
            self._capture_graphs()
            raise
        release((*self._weights.storages, *self._pool))
        self._reserved_bytes()  # returns what was freed to the device
        self._released = ReleasedMemory(sum(self._pool_sizes), self._weights.nbytes, graphs)
        return self._released

    def restore(self) -> ReleasedMemory:
        """Restore the memory, and return what was restored. Raises MemoryShortage if it does not fit."""
        assert self._released and self._weights
        storages, sizes = (*self._weights.storages, *self._pool), (*self._weights.sizes, *self._pool_sizes)
        needed, free = self._released.total, self._free_bytes()
        missing = -self._group.all_reduce_min(free - needed)
        if missing > 0 or not self._allocate(storages, sizes):
            lacking = f"{missing / GIB:.2f} GiB are missing" if missing > 0 else "not all of it could be allocated"
            raise MemoryShortage(
                f"the model needs {needed / GIB:.2f} GiB of {self._runner.kv.device.type.upper()} memory, and"
                f" {free / GIB:.2f} GiB are free: {lacking}. Free it, for example with `paged sleep` for another model,"
                " and wake this one again"
            )
        self._weights.write_back()
        self._weights = None
        if self._runner.kv.device.type == "cuda":
            torch._C._host_emptyCache()  # PyTorch would keep the pinned memory
        fill_zeros(self._pool)
        self._runner.copier.update_addresses()
        if self._runner.kv.device.type == "cpu":
            self._runner.kv.populate(count_threads(self._ranks_per_node))
        self._capture_graphs()
        restored, self._released = self._released, None
        return restored

    def _copy_weights(self) -> HostCopy:
        """Copy the weights to the host. Raises MemoryShortage."""
        weights = self._find_weights()
        nbytes, free = sum(storage.nbytes() for storage in weights), available_memory() // self._ranks_per_node
        copied, fits = None, self._group.all_reduce_min(free - nbytes) >= 0
        if fits:
            with suppress(RuntimeError):  # raised if the memory cannot be pinned
                copied = HostCopy(weights)
        if not fits or not self._group.all_reduce_min(copied is not None):
            raise MemoryShortage(
                f"the weights need {nbytes / GIB:.2f} GiB of pinned host memory, and {free / GIB:.2f} GiB are free"
            )
        assert copied
        return copied

    def _find_weights(self) -> list[UntypedStorage]:
        """Return the storages to move to the host: all on the device but the pool."""
        device, pool = self._runner.kv.device, {storage._cdata for storage in self._pool}
        if not self._moves_weights:
            return []
        tensors = (tensor for tensor in find_tensors(self._runner, self._loaded) if tensor.device.type == device.type)
        return [storage for storage in distinct_storages(tensors) if storage._cdata not in pool]

    def _allocate(self, storages: Sequence[UntypedStorage], sizes: Sequence[int]) -> bool:
        """Allocate the storages on all ranks, or on none. Return whether they fit."""
        fits = True
        try:
            allocate(storages, sizes)
        except RuntimeError:
            fits = False
        if self._group.all_reduce_min(fits):
            return True
        if fits:
            release(storages)
            self._reserved_bytes()
        return False

    def _capture_graphs(self) -> None:
        if self._had_graphs:
            self._capture()

    def _free_bytes(self) -> int:
        device = self._runner.kv.device
        if device.type == "cpu":
            return available_memory() // self._ranks_per_node
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]

    def _reserved_bytes(self) -> int:
        """Return the GPU memory of this process, after unused memory was returned to the device."""
        device = self._runner.kv.device
        if device.type == "cpu":
            return 0
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)
