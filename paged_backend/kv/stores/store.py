"""The interface of the stores that keep cached blocks outside of the pools, and the parts that they share."""

from __future__ import annotations

import contextlib
import statistics
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from queue import Full, Queue
from typing import TypeAlias

from torch import Tensor

from paged_backend.kv.content import BlockKey
from paged_backend.utils.machine import use_single_thread

MAX_QUEUED_BLOCKS = 64  # maximum blocks that wait to be written; more are dropped
COST_SAMPLES = 16  # number of reads whose median is the cost of a store


class ReadCost:
    """The measured duration of reads of one store. Safe to use from any thread."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=COST_SAMPLES)

    @property
    def seconds_per_block(self) -> float:
        """The median of the last reads, in seconds per block; 0 before the first one."""
        seconds = list(self._seconds)
        return statistics.median(seconds) if seconds else 0.0

    def record(self, seconds: float, blocks: int) -> None:
        """Record a read of `blocks` blocks, or a search for that many that found none. blocks: at least 1."""
        self._seconds.append(seconds / blocks)

    def reset(self) -> None:
        """Forget all reads, so that the next one is measured on its own."""
        self._seconds.clear()


# A block to write, a callback, or the end.
_Item: TypeAlias = tuple[BlockKey, Tensor] | Callable[[], object] | None


class BlockWriter:
    """Writes queued blocks one after the other on a thread of its own."""

    def __init__(self, name: str, write: Callable[[BlockKey, Tensor], None]):
        """Start the thread. name: name of the thread. write: writes a block; must not raise."""
        self._write = write
        self._queue: Queue[_Item] = Queue(MAX_QUEUED_BLOCKS)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def free_slots(self) -> int:
        """The number of blocks that the queue can still take."""
        return MAX_QUEUED_BLOCKS - self._queue.qsize()

    @property
    def is_idle(self) -> bool:
        """Whether every queued block is written."""
        return not self._queue.unfinished_tasks

    def put(self, key: BlockKey, block: Tensor) -> None:
        """Queue a block, unless the queue is full."""
        with contextlib.suppress(Full):
            self._queue.put_nowait((key, block))

    def call_when_written(self, callback: Callable[[], object]) -> bool:
        """Call `callback` on the thread once every block that is queued now is written. Return False, with nothing
        changed, if the queue is full."""
        try:
            self._queue.put_nowait(callback)
        except Full:
            return False
        return True

    def settle(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until every queued block is written."""
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, timeout)

    def close(self, seconds: float | None = None) -> None:
        """Write all queued blocks and end the thread. Wait at most `seconds`; None: without limit."""
        timeout = None if seconds is None else max(0.0, seconds)
        with contextlib.suppress(Full):
            self._queue.put(None, timeout=timeout)
            self._thread.join(timeout)

    def _run(self) -> None:
        use_single_thread()
        while (item := self._queue.get()) is not None:
            if callable(item):
                item()
            else:
                self._write(*item)
            self._queue.task_done()


class BlockStore(ABC):
    """Keeps copies of cached blocks, [pages, page_bytes] uint8, which are addressed by their content. Safe to use from
    any thread.

    Reads run on the caller's thread, writes on the store's own thread. A store never raises an error of its medium: it
    is disabled instead, and then has no block. It returns a block only if its origin and all tokens of its prefix match
    the requested key.
    """

    def __init__(self, name: str):
        """Start the thread that writes. name: name of the thread."""
        self.cost = ReadCost()
        self._up = True
        self._changed: Callable[[], object] = lambda: None
        self._writer = BlockWriter(name, self._write)

    @property
    def up(self) -> bool:
        """Whether the store is in use."""
        return self._up

    @property
    def free_queue_slots(self) -> int:
        """The number of blocks that the write queue can still take."""
        return self._writer.free_slots

    @property
    def is_idle(self) -> bool:
        """Whether every queued block is written."""
        return self._writer.is_idle

    def put(self, key: BlockKey, block: Tensor) -> None:
        """Queue a block to be written, unless the queue is full. `block` must not change afterwards."""
        self._writer.put(key, block)

    def call_when_written(self, callback: Callable[[], object]) -> bool:
        """Call `callback` on the store's thread once every block that is queued now is written. Return False, with
        nothing changed, if the queue is full."""
        return self._writer.call_when_written(callback)

    def on_change(self, changed: Callable[[], object]) -> None:
        """From now on, call `changed`, on any thread, whenever the store is disabled or enabled."""
        self._changed = changed

    def settle(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until every queued block is written."""
        self._writer.settle(timeout)

    def close(self, seconds: float | None = None) -> None:
        """Write all queued blocks and end the store's threads. Wait at most `seconds`; None: without limit."""
        self._writer.close(seconds)

    @abstractmethod
    def should_write(self, key: BlockKey) -> bool:
        """Return whether the store is in use and is not known to have the block."""

    @abstractmethod
    def read(self, keys: Sequence[BlockKey]) -> list[Tensor]:
        """Return the first of the blocks, up to the first one that the store does not have."""

    @property
    @abstractmethod
    def stats(self) -> dict[str, float]:
        """The statistics of the store, by names that begin with the store's. Counters count since the start."""

    @abstractmethod
    def _write(self, key: BlockKey, block: Tensor) -> None:
        """Write a block if `should_write`. Called on the store's thread; must not raise."""
