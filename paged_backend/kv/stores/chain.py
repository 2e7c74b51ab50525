"""Several tiers of cached blocks behind one interface: each read goes to the cheapest one that has the block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from paged_backend.kv.content import BlockKey
from paged_backend.kv.stores.remote import RemoteStore
from paged_backend.kv.stores.store import MAX_QUEUED_BLOCKS, BlockStore

READ_BLOCKS = 8  # blocks that are read before tiers are compared again
MEASURE_SECONDS = 30.0  # time after which a tier that was too slow is measured again


class StoreChain:
    """The tiers behind the host pool. Safe to use from any thread, but `read` from one thread at a time."""

    def __init__(self, tiers: Sequence[BlockStore], max_seconds: float, *, shared: RemoteStore | None = None):
        """tiers: among those of equal cost, earlier ones are preferred. max_seconds: cost per block above which a tier
        is not read. shared: the one of the tiers that other servers read; None: there is none."""
        self.shared = shared
        self._tiers = list(tiers)
        self._max_seconds = max_seconds
        self._measured_at = [0.0] * len(self._tiers)  # time.monotonic() when the cost was not known yet

    @property
    def up(self) -> bool:
        """Whether any tier is in use."""
        return any(tier.up for tier in self._tiers)

    @property
    def free_queue_slots(self) -> int:
        """The number of blocks that the write queues of all tiers in use can still take."""
        return min((tier.free_queue_slots for tier in self._tiers if tier.up), default=MAX_QUEUED_BLOCKS)

    @property
    def is_idle(self) -> bool:
        """Whether every queued block is written."""
        return all(tier.is_idle for tier in self._tiers)

    def should_write(self, key: BlockKey) -> bool:
        """Return whether a tier should get the block."""
        return any(tier.should_write(key) for tier in self._tiers)

    def put(self, key: BlockKey, tensors: Sequence[Tensor]) -> None:
        """Queue a block to be written to every tier that should get it. `tensors` must not change afterwards."""
        for tier in self._tiers:
            if tier.should_write(key):
                tier.put(key, tensors)

    def read(self, keys: Sequence[BlockKey]) -> Iterator[list[list[Tensor]]]:
        """Yield the tensors of the first of `keys`, up to READ_BLOCKS at a time, up to the first one that no tier
        has, or that is faster to compute."""
        count = 0
        while count < len(keys) and (blocks := self._read_next(keys[count : count + READ_BLOCKS])):
            count += len(blocks)
            yield blocks

    def on_change(self, changed: Callable[[], object]) -> None:
        """Call `changed`, on any thread, when a tier is disabled or enabled from now on."""
        for tier in self._tiers:
            tier.on_change(changed)

    def settle(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until every queued block is written."""
        deadline = time.monotonic() + timeout
        for tier in self._tiers:
            tier.settle(max(0.0, deadline - time.monotonic()))

    def close(self, seconds: float | None = None) -> None:
        """Write all queued blocks and end the tiers' threads. Wait at most `seconds`; None: without limit."""
        deadline = None if seconds is None else time.monotonic() + seconds
        for tier in self._tiers:
            tier.close(None if deadline is None else deadline - time.monotonic())

    def named_stats(self) -> dict[str, float]:
        """Return the statistics of all stores, by the names of `SchedulerStats`."""
        return {name: value for tier in self._tiers for name, value in tier.named_stats().items()}

    def _read_next(self, keys: Sequence[BlockKey]) -> list[list[Tensor]]:
        """Return the first blocks of the cheapest tier that has any."""
        for index in sorted(range(len(self._tiers)), key=lambda index: self._tiers[index].cost.seconds_per_block):
            if self._is_worth_reading(index) and (blocks := self._tiers[index].read(keys)):
                return blocks
        return []

    def _is_worth_reading(self, index: int) -> bool:
        """Return whether a tier is in use and not too slow. A slow one is measured again from time to time."""
        tier, now = self._tiers[index], time.monotonic()
        if tier.cost.seconds_per_block > self._max_seconds:
            if now - self._measured_at[index] < MEASURE_SECONDS:
                return False
            tier.cost.reset()
        if not tier.cost.seconds_per_block:
            self._measured_at[index] = now
        return tier.up
