"""Several stores of cached blocks behind one interface: each read goes to the cheapest one that has the block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from paged_backend.kv.content import BlockKey
from paged_backend.kv.stores.remote import RemoteStore
from paged_backend.kv.stores.store import MAX_QUEUED_BLOCKS, BlockStore

READ_BLOCKS = 8  # blocks that are read before stores are compared again
MEASURE_SECONDS = 30.0  # time after which a store that was too slow is measured again


class StoreChain:
    """The stores behind the host pool. Safe to use from any thread, but `read` from one thread at a time."""

    def __init__(self, stores: Sequence[BlockStore], max_seconds: float, *, shared: RemoteStore | None = None):
        """stores: the stores to use; of stores of equal cost, the first is preferred. max_seconds: cost per block above
        which a store is not read. shared: the store that other servers read as well, if there is one."""
        self.shared = shared
        self._stores = list(stores)
        self._max_seconds = max_seconds
        self._measured_at = [0.0] * len(self._stores)  # time.monotonic() when the cost was not known yet

    @property
    def up(self) -> bool:
        """Whether any store is in use."""
        return any(store.up for store in self._stores)

    @property
    def free_queue_slots(self) -> int:
        """The number of blocks that the write queues of all stores in use can still take."""
        return min((store.free_queue_slots for store in self._stores if store.up), default=MAX_QUEUED_BLOCKS)

    @property
    def is_idle(self) -> bool:
        """Whether every queued block is written."""
        return all(store.is_idle for store in self._stores)

    def should_write(self, key: BlockKey) -> bool:
        """Return whether a store should get the block."""
        return any(store.should_write(key) for store in self._stores)

    def put(self, key: BlockKey, block: Tensor) -> None:
        """Queue a block to be written to every store that should get it. `block` must not change afterwards."""
        for store in self._stores:
            if store.should_write(key):
                store.put(key, block)

    def read(self, keys: Sequence[BlockKey]) -> Iterator[list[Tensor]]:
        """Yield the first of the blocks, up to READ_BLOCKS at a time, up to the first one that no store
        has, or that is faster to compute."""
        count = 0
        while count < len(keys) and (blocks := self._read_next(keys[count : count + READ_BLOCKS])):
            count += len(blocks)
            yield blocks

    def on_change(self, changed: Callable[[], object]) -> None:
        """Call `changed`, on any thread, when a store is disabled or enabled from now on."""
        for store in self._stores:
            store.on_change(changed)

    def settle(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until every queued block is written."""
        deadline = time.monotonic() + timeout
        for store in self._stores:
            store.settle(max(0.0, deadline - time.monotonic()))

    def close(self, seconds: float | None = None) -> None:
        """Write all queued blocks and end the stores' threads. Wait at most `seconds`; None: without limit."""
        deadline = None if seconds is None else time.monotonic() + seconds
        for store in self._stores:
            store.close(None if deadline is None else deadline - time.monotonic())

    @property
    def stats(self) -> dict[str, float]:
        """The statistics of all stores, by name."""
        return {name: value for store in self._stores for name, value in store.stats.items()}

    def _read_next(self, keys: Sequence[BlockKey]) -> list[Tensor]:
        """Return the first blocks of the cheapest store that has any."""
        for index in sorted(range(len(self._stores)), key=lambda index: self._stores[index].cost.seconds_per_block):
            if self._is_worth_reading(index) and (blocks := self._stores[index].read(keys)):
                return blocks
        return []

    def _is_worth_reading(self, index: int) -> bool:
        """Return whether a store is in use and not too slow. A slow one is measured again from time to time."""
        store, now = self._stores[index], time.monotonic()
        if store.cost.seconds_per_block > self._max_seconds:
            if now - self._measured_at[index] < MEASURE_SECONDS:
                return False
            store.cost.reset()
        if not store.cost.seconds_per_block:
            self._measured_at[index] = now
        return store.up
