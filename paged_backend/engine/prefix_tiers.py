"""The engine's side of the tiers behind the host pool: prefetches cached prefixes for new requests, and spills cached
blocks.

tier ── prefetch (own thread) ──▶ blocks in memory ── store (engine's thread) ──▶ host pool ──▶ device pool
device pool ── swap-out, spill while idle, or transfer (engine's thread) ──▶ host pool ──▶ tiers (a thread of each)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from torch import Tensor

from paged_backend.api.request import GenerateRequest
from paged_backend.engine.prefill_transfers import PrefillTransfers
from paged_backend.execution.runner import StepRunner
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.content import BlockKey, Chain, Entry, PrefixParent
from paged_backend.kv.ledger import Transfers
from paged_backend.kv.stores.chain import StoreChain
from paged_backend.scheduling.plan import Plan
from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.utils.machine import use_single_thread
from paged_backend.utils.worker import BackgroundWorker

log = logging.getLogger("paged_llm")

SPILL_BLOCKS = 4  # blocks copied at a time while the engine is idle; a new request waits for these at most
TRANSFER_SECONDS = 0.002  # the same, while a request waits for its blocks to be written
STORE_SECONDS = 0.1  # maximum time that the prefetch thread waits for the engine to store what it has read
SPILL_SECONDS = 0.05  # time between two attempts while a tier's write queue is full


@dataclass(frozen=True)
class PrefetchedBlocks:
    """Some blocks of a prompt that were read from a tier."""

    request: GenerateRequest
    chain: Chain  # of the prompt, for the engine's thread, so that no block of it is looked up twice
    blocks: Sequence[tuple[int, int, list[Tensor]]]  # (index of the block in the prompt, kind of layer, tensors)
    stored: threading.Event = field(default_factory=threading.Event)  # set when they are in the host pool


class PrefixTiers:
    """Moves cached blocks between the pools and the tiers behind them. Only `can_prefetch` and `prefetch` may be called
    from other threads than the engine's."""

    def __init__(self, tiers: StoreChain, blocks: BlockManager, runner: StepRunner, stored: Callable[[int], object]):
        """Start the prefetch thread. blocks: the block manager of the device pool and a host pool. stored: see
        `PrefillTransfers`."""
        assert blocks.host and runner.host
        self._tiers = tiers
        self._blocks = blocks
        self._host_blocks = blocks.host
        self._host_cache = runner.host
        self._runner = runner
        self.transfers = PrefillTransfers(tiers, blocks, runner.host, stored) if tiers.shared else None
        self._fetcher = BackgroundWorker("fetch", use_single_thread)
        self._all_spilled = False  # whether every cached block is in the tiers or cannot be written there

    def can_prefetch(self, request: GenerateRequest) -> bool:
        """Return whether blocks of the prompt may be in a tier. False for a request with prompt log probabilities,
        whose prompt must be computed."""
        return self._tiers.up and request.sampling.prompt_logprobs is None

    def prefetch(
        self,
        request: GenerateRequest,
        deliver: Callable[[PrefetchedBlocks], None],
        done: Callable[[GenerateRequest], None],
    ) -> None:
        """Read the prompt's cached prefix on the prefetch thread. On that thread, call `deliver` with a few blocks at a
        time, and `done` at the end."""
        self._fetcher.submit(self._prefetch, request, deliver, done)

    def _prefetch(
        self,
        request: GenerateRequest,
        deliver: Callable[[PrefetchedBlocks], None],
        done: Callable[[GenerateRequest], None],
    ) -> None:
        try:
            for found in self._read(request):
                deliver(found)
                found.stored.wait(STORE_SECONDS)  # so that this thread does not slow down the engine's
            if request.sampling.prefill_only and self._tiers.shared:
                self._tiers.shared.refresh(self._keys_to_transfer(request))
        except Exception:  # computes the request without them
            log.exception("request %d: could not read its prefix from a tier", request.key)
        done(request)

    def _read(self, request: GenerateRequest) -> Iterator[PrefetchedBlocks]:
        """Yield the blocks of the prompt's prefix that are in neither pool, up to the first one that no tier has, and
        then those of the other kinds of layers that a hit of this length needs.

        The pools' indexes belong to the engine's thread and may change meanwhile. That costs a read or a hit, but never
        gives a wrong block, because every block is looked up by its content.
        """
        blocks, size = self._blocks, self._blocks.block_size
        count = (len(request.prompt_token_ids) - 1) // size  # the last token is always computed
        entries = list(islice(self._entries(request), count))
        known: list[Entry | None] = []  # their interned entries, as far as there are some
        indexed: PrefixParent | None = request.origin
        for entry in entries:
            indexed = None if indexed is None else blocks.contents.find(indexed, entry.tokens)
            known.append(indexed)
        chain = Chain(request.origin)
        for place, kind in enumerate(blocks.layout.kinds):
            missing = [
                index
                for index in kind.needed(count, size)
                if (interned := known[index]) is None or blocks.locate(BlockKey(interned, place)) is None
            ]
            wanted, read = missing[: self._host_blocks.num_available // kind.pages], 0
            for found in self._tiers.read([BlockKey(entries[index], place) for index in wanted]):
                indices = missing[read : read + len(found)]
                yield PrefetchedBlocks(
                    request, chain, [(index, place, block) for index, block in zip(indices, found, strict=True)]
                )
                read += len(found)
            if kind.keeps_all and read < len(missing):
                count = missing[read]

    def _keys_to_transfer(self, request: GenerateRequest) -> list[BlockKey]:
        """Return the blocks that another server needs to continue after the prompt."""
        entries = list(self._entries(request))
        return [
            BlockKey(entries[index], place)
            for place, kind in enumerate(self._blocks.layout.kinds)
            for index in kind.needed(len(entries), self._blocks.block_size)
        ]

    def _entries(self, request: GenerateRequest) -> Iterator[Entry]:
        """Yield the contents of the prompt's full blocks."""
        size, tokens = self._blocks.block_size, request.prompt_token_ids
        parent: PrefixParent = request.origin
        for start in range(0, len(tokens) // size * size, size):
            parent = entry = Entry(parent, tokens[start : start + size])
            yield entry

    def store(self, prefetched: PrefetchedBlocks) -> None:
        """Put prefetched blocks into the host pool, where the scheduler finds them as cache hits."""
        try:
            self._store(prefetched)
        finally:
            prefetched.stored.set()

    def _store(self, prefetched: PrefetchedBlocks) -> None:
        tokens = prefetched.request.prompt_token_ids
        for index, kind, content in prefetched.blocks:
            entry = self._blocks.contents.extend(prefetched.chain, tokens, index + 1, self._blocks.block_size)
            block = self._blocks.add_to_host(BlockKey(entry, kind))
            if block is not None:
                self._host_cache.write_block(self._host_blocks.pages_of(block), content)

    def write_moved_out(self, transfers: Transfers) -> None:
        """Also write the blocks that a step moved to the host pool to the tiers. Called after the step."""
        for move in transfers.moves_out:
            if move.entry:
                key = BlockKey(move.entry, self._host_blocks.kind_of(move.target))
                staged = self.transfers is not None and self.transfers.stages(key)
                if not staged and self._tiers.should_write(key):
                    self._tiers.put(key, self._host_cache.read_block([target for _, target in move.pages]))

    def hand_over(self) -> None:
        """Hand the next blocks of `prefill_only` requests to the shared tier. Called between two steps."""
        if self.transfers and self.transfers.hand_over():
            self.mark_changed()

    def mark_changed(self) -> None:
        """Record that a step ran, so there may be cached blocks that are in no tier."""
        self._all_spilled = False

    @property
    def all_spilled(self) -> bool:
        """Whether every cached block is in the tiers or cannot be written there."""
        return self._all_spilled

    @property
    def poll_timeout(self) -> float | None:
        """Seconds that an idle engine may wait for a message before it calls `spill`; None: no limit."""
        if self.transfers and self.transfers.needs_hand_over:
            return 0 if self._tiers.free_queue_slots else TRANSFER_SECONDS
        if self._all_spilled:
            return None
        return 0 if self._tiers.free_queue_slots and self._blocks.has_unspilled else SPILL_SECONDS

    def spill(self) -> bool:
        """Write a few cached blocks that a tier lacks, as many as the write queues take. Called only while no step is
        in flight. Return whether none are left."""
        slots, blocks = self._tiers.free_queue_slots, self._blocks
        if not slots and not blocks.ledger.has_moves_out:
            return False
        limit = 0 if blocks.ledger.has_moves_out else min(SPILL_BLOCKS, slots)  # planned moves have the slots
        transfers = blocks.spill(self._tiers.should_write, limit)
        self._runner.move(Plan(transfers=transfers))
        self._runner.copier.settle()
        self.write_moved_out(transfers)
        blocks.ledger.finish(transfers)
        self._all_spilled = not transfers.moves_out and self._tiers.is_idle
        return self._all_spilled

    def spill_rest(self, deadline: float) -> bool:
        """Write cached blocks until all are in the tiers or `deadline` (time.monotonic()) has passed. Called on the
        engine's thread, or after it has ended. Return whether this wrote the last ones."""
        while not self._all_spilled and (left := deadline - time.monotonic()) > 0:
            self._tiers.settle(left)
            if self.spill():
                return True
        return False

    def close(self, deadline: float) -> None:
        """End the tiers' threads and the prefetch thread, at the latest at `deadline` (time.monotonic())."""
        self._tiers.close(deadline - time.monotonic())
        self._fetcher.stop(deadline - time.monotonic())

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """Return the statistics with those of the tiers added."""
        return replace(stats, **self._tiers.named_stats())  # type: ignore[arg-type]  # names are checked at run time
