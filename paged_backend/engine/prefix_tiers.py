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
from dataclasses import dataclass, field

from torch import Tensor

from paged_backend.api.request import GenerateRequest
from paged_backend.engine.prefill_transfers import PrefillTransfers
from paged_backend.execution.runner import StepRunner
from paged_backend.memory.tier_chain import TierChain
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import Chain, Entry, PrefixParent
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
    blocks: Sequence[tuple[int, list[Tensor]]]  # (index of the block in the prompt, its tensors)
    stored: threading.Event = field(default_factory=threading.Event)  # set when they are in the host pool


class PrefixTiers:
    """Moves cached blocks between the pools and the tiers behind them. Only `can_prefetch` and `prefetch` may be called
    from other threads than the engine's."""

    def __init__(self, tiers: TierChain, blocks: BlockManager, runner: StepRunner, stored: Callable[[int], object]):
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
                self._tiers.shared.refresh(list(self._entries(request)))
        except Exception:  # computes the request without them
            log.exception("request %d: could not read its prefix from a tier", request.key)
        done(request)

    def _read(self, request: GenerateRequest) -> Iterator[PrefetchedBlocks]:
        """Yield the blocks of the prompt's prefix that are in neither pool, up to the first one that no tier has.

        The pools' indexes belong to the engine's thread and may change meanwhile. That costs a read or a hit, but never
        gives a wrong block, because every block is looked up by its content.
        """
        blocks = self._blocks
        indexed: PrefixParent | None = request.origin  # the interned entry of the prefix, while there is one
        missing: list[tuple[int, Entry]] = []
        for index, entry in enumerate(self._entries(request)):
            if (index + 1) * blocks.block_size == len(request.prompt_token_ids):
                break  # the last token is always computed
            indexed = known = None if indexed is None else blocks.cache.contents.find(indexed, entry.tokens)
            if known is None or blocks.cache.find(known) is None:
                missing.append((index, entry))
        chain, indices = Chain(request.origin), iter([index for index, _ in missing])
        for found in self._tiers.read([entry for _, entry in missing[: self._host_blocks.num_available]]):
            yield PrefetchedBlocks(request, chain, [(next(indices), block) for block in found])

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
        for index, content in prefetched.blocks:
            entry = self._blocks.cache.entry(prefetched.chain, prefetched.request.prompt_token_ids, index)
            tensors_per_page = len(self._host_cache.tensors)
            trimmed = len(content) < self._blocks.layout.pages * tensors_per_page
            block = self._blocks.offload.add_host_block(entry, trimmed=trimmed)
            if block is not None:
                self._host_cache.write_block(self._host_blocks.pages_of(block), content)

    def write_moved_out(self, plan: Plan) -> None:
        """Also write the blocks that a step moved to the host pool to the tiers. Called after the step."""
        for move in plan.moves_out:
            if self.transfers and move.entry and self.transfers.stages(move.entry):
                continue
            if move.entry and self._tiers.should_write(move.entry):
                self._tiers.put(move.entry, self._host_cache.read_block(move.target_pages))

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
        return 0 if self._tiers.free_queue_slots and self._blocks.offload.has_unspilled else SPILL_SECONDS

    def spill(self) -> bool:
        """Write a few cached blocks that a tier lacks, as many as the write queues take. Called only while no step is
        in flight. Return whether none are left."""
        slots, offload = self._tiers.free_queue_slots, self._blocks.offload
        if not slots and not offload.has_moves_out:
            return False
        limit = 0 if offload.has_moves_out else min(SPILL_BLOCKS, slots)  # planned moves have the slots
        plan = Plan((), moves_out=offload.spill(self._tiers.should_write, limit))
        self._runner.move(plan)
        self._runner.transfers.settle()
        self.write_moved_out(plan)
        self._blocks.offload.finish_moves_out(plan.moves_out)
        self._all_spilled = not plan.moves_out and self._tiers.is_idle
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
        return self._tiers.add_stats(stats)
