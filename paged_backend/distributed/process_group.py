"""The ranks of an engine and their collectives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paged_backend.distributed.group_sockets import group_sockets
from paged_backend.distributed.topology import LOOPBACK, interface_to

_chosen: set[str] = set()  # environment variables that name the network interface, set by `join`
COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # time for the slowest rank to load its weights or run a step


@dataclass(frozen=True, eq=False)
class ProcessGroup:
    """One rank of an engine. All ranks must call the same collectives in the same order."""

    device: torch.device
    rank: int = 0
    size: int = 1
    key: bytes = field(default=b"", repr=False)  # authenticates messages between the ranks

    def join(self, store: dist.Store, address: str = LOOPBACK) -> None:
        """Join the other ranks through a store, with the network interface that reaches `address`. Raises RuntimeError
        if a rank does not join in time."""
        interface = interface_to(address)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if interface and name not in os.environ:
                os.environ[name] = interface
                _chosen.add(name)
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.set_device(self.device)
        with group_sockets(gloo=not gpu):
            dist.init_process_group(
                "nccl" if gpu else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=COLLECTIVE_TIMEOUT,
                device_id=self.device if gpu else None,
            )

    def leave(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
        while _chosen:  # a later group may need another interface, and so may processes that are started from now on
            os.environ.pop(_chosen.pop(), None)

    def abort(self) -> None:
        """Make collectives that wait for a dead rank fail. May be called from any thread."""
        if self.device.type == "cuda" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()  # used by NCCL; gloo fails by itself on a closed connection

    def all_reduce_min(self, number: int) -> int:
        """Return the minimum of all ranks' numbers."""
        if self.size == 1:
            return number
        minimum = torch.tensor(number, device=self.device)
        dist.all_reduce(minimum, dist.ReduceOp.MIN)
        return int(minimum)

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank. All ranks must give the same count."""
        if self.size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, device=self.device)
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own)
        return [numbers.tolist() for numbers in gathered]

    def broadcast_tokens(self, tokens: Tensor) -> None:
        """Overwrite `tokens`, on the device, with the tokens of rank 0. Asynchronous on a GPU."""
        if self.size > 1 and tokens.numel():
            dist.broadcast(tokens, 0)
