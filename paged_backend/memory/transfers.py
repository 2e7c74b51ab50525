"""Copies of whole blocks: within the pool, and between it and the host's, which wait for as little as they can.

                compute queue                          swap queue
swap(outs, ins)  steps before ────────────────────────▶ outs   have read what those steps wrote,
                 waits for outs  ◀───────────────────── │      before a later step writes there
                                                        ins    have read the host's blocks; they may go to blocks
                                                        │      that outs left, or that a step before still read
arrive()         waits for ins   ◀───────────────────── ┘      before the step that reads them; others go on
copy(copies)     after arrive(), in line with the steps
settle()         the host waits for outs and ins: only then may it look at its own blocks, or write them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from paged_kernels import ops
from paged_kernels.block_pair import BlockPair

from paged_backend.memory.kv_cache import KVCache
from paged_backend.scheduling.block_manager import Copy, Move

SWAP_PROGRAMS = 16  # of a GPU at once: more would not make the bus faster, and take the room of the step beside them

Queue = Literal["compute", "swap"]
Blocks = Sequence[Copy] | Sequence[Move]


class Queues(Protocol):
    """What runs in order in each of two queues, and when one waits for the other."""

    def launch(self, queue: Queue, pair: BlockPair, moves: Blocks) -> None:
        """Enqueue a copy of blocks."""

    def record(self, queue: Queue) -> Any:
        """An event: all that is in the queue by now is done."""

    def wait(self, queue: Queue, event: Any) -> None:
        """Nothing that is enqueued from now on begins before the event."""

    def block(self, event: Any) -> None:
        """Wait for the event on the host."""


class Streams:
    """The caller's stream of a GPU, and one beside it for swaps."""

    def __init__(self, device: torch.device):
        self._device = device
        self._swap = torch.cuda.Stream(device)

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return self._swap if queue == "swap" else torch.cuda.current_stream(self._device)

    def launch(self, queue: Queue, pair: BlockPair, moves: Blocks) -> None:
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


class SynchronousTransfers:
    """On a CPU: whatever is enqueued is done."""

    def launch(self, queue: Queue, pair: BlockPair, moves: Blocks) -> None:
        ops.block_copy(pair, _list(moves))

    def record(self, queue: Queue) -> None:
        pass

    def wait(self, queue: Queue, event: None) -> None:
        pass

    def block(self, event: None) -> None:
        pass


def _list(moves: Blocks) -> torch.Tensor:  # [num_moves, 2] int64
    return torch.tensor([(move.source, move.target) for move in moves], dtype=torch.int64)


class Transfers:
    """The copies of a pool and, if there is one, of the host's. No target of one call is a source of it in the same
    pool, and none is there twice. Returns before the device is done; but `settle`."""

    def __init__(self, kv: KVCache, host: KVCache | None = None, queues: Queues | None = None):
        self._queues = queues or (Streams(kv.device) if kv.device.type == "cuda" else SynchronousTransfers())
        self._within = BlockPair.of(kv.tensors, kv.tensors)
        self._out = BlockPair.of(kv.tensors, host.tensors) if host else None
        self._in = BlockPair.of(host.tensors, kv.tensors) if host else None
        self._arriving: list[Any] = []  # events of ins that no step has waited for
        self._swapping: list[Any] = []  # the last event that the host has not waited for

    def move(self, moves_out: Sequence[Move], moves_in: Sequence[Move], copies: Sequence[Copy]) -> None:
        """All that a step wants which reads the ins and the copies: outs, then ins, then copies."""
        self.swap(moves_out, moves_in)
        self.arrive()
        self.copy(copies)

    def swap(self, moves_out: Sequence[Move], moves_in: Sequence[Move]) -> None:
        """Blocks to the host, then blocks from there. What is enqueued next may write where outs were, and may not read
        where ins go before `arrive`."""
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
        """What is enqueued next may read all ins."""
        for event in self._arriving:
            self._queues.wait("compute", event)
        self._arriving = []

    def copy(self, copies: Sequence[Copy]) -> None:
        """Blocks within the pool."""
        self.arrive()
        if copies:
            self._queues.launch("compute", self._within, copies)

    def settle(self) -> None:
        """Wait on the host for all outs and ins. Before its blocks are looked at or written."""
        for event in self._swapping:
            self._queues.block(event)
        self._swapping = []
