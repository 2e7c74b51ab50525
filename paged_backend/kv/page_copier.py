"""Copies whole blocks within the device pool, and between device and host pool, with the fewest possible waits.

                compute queue                          swap queue
swap(outs, ins)  earlier steps ───────────────────────▶ outs   read what those steps wrote,
                 waits for outs  ◀───────────────────── │      before a later step writes there
                                                        ins    read the host's blocks; their targets may be blocks
                                                        │      that outs left, or that an earlier step still reads
arrive()         waits for ins   ◀───────────────────── ┘      before the step that reads them; other steps go on
copy(copies)     after arrive(), in order with the steps
settle()         the host waits for outs and ins; only then may it read or write its own blocks

"out": a block that is copied from the device to the host. "in": from the host to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch

from paged_backend.kv.cache import KVCache
from paged_backend.kv.ledger import Transfer, Transfers, page_pairs
from paged_kernels import ops
from paged_kernels.layer_cache import BlockPair

SWAP_PROGRAMS = 16  # GPU programs per swap: more do not increase PCIe throughput and take SMs from the step

Queue: TypeAlias = Literal["compute", "swap"]


class Queues(Protocol):
    """Two queues of copies, each run in order, that can wait for each other."""

    def launch(self, queue: Queue, pair: BlockPair, moves: Sequence[Transfer]) -> None:
        """Enqueue a copy of blocks."""

    def record(self, queue: Queue) -> Any:
        """Return an event that is reached when everything in the queue so far is done."""

    def wait(self, queue: Queue, event: Any) -> None:
        """Make everything that is enqueued from now on wait for the event."""

    def block(self, event: Any) -> None:
        """Block the host until the event is reached."""

    def finish(self) -> None:
        """Block the host until both queues are empty. Raises the device's error."""


class StreamQueues:
    """The queues of a GPU: the caller's CUDA stream for compute, and a separate stream for swaps."""

    def __init__(self, device: torch.device):
        self._device = device
        self._swap = torch.cuda.Stream(device)

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return self._swap if queue == "swap" else torch.cuda.current_stream(self._device)

    def launch(self, queue: Queue, pair: BlockPair, moves: Sequence[Transfer]) -> None:
        with torch.cuda.stream(self._stream(queue)):
            listed = _list(moves).pin_memory().to(self._device, non_blocking=True)
            ops.block_copy(pair, listed, programs=SWAP_PROGRAMS if queue == "swap" else None)

    def record(self, queue: Queue) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(queue))
        return event

    def wait(self, queue: Queue, event: torch.cuda.Event) -> None:
        self._stream(queue).wait_event(event)

    def block(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


class SynchronousQueues:
    """The queues of a CPU: every copy is done when `launch` returns, so waiting does nothing."""

    def launch(self, queue: Queue, pair: BlockPair, moves: Sequence[Transfer]) -> None:
        ops.block_copy(pair, _list(moves))

    def record(self, queue: Queue) -> None:
        pass

    def wait(self, queue: Queue, event: None) -> None:
        pass

    def block(self, event: None) -> None:
        pass

    def finish(self) -> None:
        pass


def _list(moves: Sequence[Transfer]) -> torch.Tensor:  # [num_pages, 2] int64
    return torch.tensor(page_pairs(moves), dtype=torch.int64).view(-1, 2)


class PageCopier:
    """The copies of a device pool and, if there is one, its host pool. Within one call, no block is a target twice, and
    no target is also a source in the same pool. Every method except `settle` and `finish` returns before the device is
    done."""

    def __init__(self, kv: KVCache, host: KVCache | None = None, queues: Queues | None = None):
        """queues: by default the queues of the pool's device."""
        self._queues = queues or (StreamQueues(kv.device) if kv.device.type == "cuda" else SynchronousQueues())
        self._kv, self._host = kv, host
        self.update_addresses()
        self._arriving: list[Any] = []  # events of swap-ins that no step has waited for
        self._swapping: list[Any] = []  # event of the last swap, if the host has not waited for it

    def update_addresses(self) -> None:
        """Record the addresses of both pools, after their memory was allocated again."""
        kv, host = self._kv, self._host
        self._within = BlockPair.of([kv.memory], [kv.memory])
        self._out = BlockPair.of([kv.memory], [host.memory]) if host else None
        self._in = BlockPair.of([host.memory], [kv.memory]) if host else None

    def move(self, transfers: Transfers) -> None:
        """Enqueue the transfers of a step, before the step itself: outs, then ins, then copies."""
        self.swap(transfers.moves_out, transfers.moves_in)
        self.arrive()
        self.copy(transfers.copies)

    def swap(self, moves_out: Sequence[Transfer], moves_in: Sequence[Transfer]) -> None:
        """Enqueue swap-outs, then swap-ins. Work that is enqueued next may write to the sources of outs, but may not
        read the targets of ins before `arrive`."""
        queues = self._queues
        if not moves_out and not moves_in:
            return
        queues.wait("swap", queues.record("compute"))
        if moves_out:
            assert self._out
            queues.launch("swap", self._out, moves_out)
            self._swapping = [queues.record("swap")]
            queues.wait("compute", self._swapping[0])
        if moves_in:
            assert self._in
            queues.launch("swap", self._in, moves_in)
            self._swapping = [queues.record("swap")]
            self._arriving = self._swapping

    def arrive(self) -> None:
        """Make work that is enqueued next wait for all swap-ins."""
        for event in self._arriving:
            self._queues.wait("compute", event)
        self._arriving = []

    def copy(self, copies: Sequence[Transfer]) -> None:
        """Enqueue copies within the device pool."""
        self.arrive()
        if copies:
            self._queues.launch("compute", self._within, copies)

    def settle(self) -> None:
        """Block the host until all swaps are done. Called before the host reads or writes blocks of the host pool."""
        for event in self._swapping:
            self._queues.block(event)
        self._swapping = []

    def finish(self) -> None:
        """Block the host until the device has done all of its work, steps included. Raises the device's error. After a
        "sticky" error, such as an illegal address, every later operation raises it too."""
        self._queues.finish()
        self._arriving, self._swapping = [], []
