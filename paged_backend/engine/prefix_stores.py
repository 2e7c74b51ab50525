"""The engine's side of the stores behind the host pool: builds them, prefetches cached prefixes for new requests, and
writes cached blocks.

store -- prefetch (own thread) --> blocks in memory -- store (engine's thread) --> host pool --> device pool
device pool -- swap-out, spill while idle, or handover (engine's thread) --> host pool --> stores (a thread of each)

A handover passes the blocks of a `prefill_only` request's prompt to the shared store while they are computed. The
request ends when its last block is there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.redis_address import RedisAddress
from paged_backend.api.request import GenerateRequest, TokenDelta
from paged_backend.api.secrets import read_key, read_secret
from paged_backend.api.sizes import GIB
from paged_backend.engine.fingerprint import BlockSource
from paged_backend.engine.model_preparation import PreparedModel
from paged_backend.execution.runner import StepRunner
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.cache import KVCache
from paged_backend.kv.content import BlockKey, Chain, Contents, Entry, PrefixParent
from paged_backend.kv.ledger import Transfers
from paged_backend.kv.stores.block_file import BlockFormat
from paged_backend.kv.stores.chain import StoreChain
from paged_backend.kv.stores.disk import DiskStore
from paged_backend.kv.stores.remote import RedisClient, RemoteStore
from paged_backend.kv.stores.store import BlockStore
from paged_backend.scheduling.plan import Plan
from paged_backend.utils.machine import use_single_thread
from paged_backend.utils.worker import BackgroundWorker

log = logging.getLogger("paged_llm")

SPILL_BLOCKS = 4  # blocks copied at a time while the engine is idle; a new request waits for these at most
HANDOVER_SECONDS = 0.002  # time between two attempts while a request waits for its blocks to be written
STORE_SECONDS = 0.1  # maximum time that the prefetch thread waits for the engine to store what it has read
SPILL_SECONDS = 0.05  # time between two attempts while a store's write queue is full
HANDOVER_BLOCKS = 32  # maximum blocks on their way to the stores: 512 tokens, a step's default


@dataclass(frozen=True)
class PrefetchedBlocks:
    """Some blocks of a prompt that were read from a store."""

    request: GenerateRequest
    chain: Chain  # of the prompt; lets the engine's thread look up each of its blocks only once
    blocks: Sequence[tuple[int, int, Tensor]]  # (index of the block in the prompt, kind of layer, content)
    stored: threading.Event = field(default_factory=threading.Event)  # set when they are in the host pool


class PrefixStores:
    """Moves cached blocks between the pools and the stores behind them. Only `can_prefetch` and `prefetch` may be
    called from other threads than the engine's."""

    def __init__(self, stores: StoreChain, blocks: BlockManager, runner: StepRunner, stored: Callable[[int], object]):
        """Start the prefetch thread. blocks: the block manager of the device pool and a host pool. stored: see
        `Handovers`."""
        assert blocks.host and runner.host
        self._stores = stores
        self._blocks = blocks
        self._host_blocks = blocks.host
        self._host_cache = runner.host
        self._runner = runner
        self.handovers = Handovers(stores, blocks, runner.host, stored) if stores.shared else None
        self._fetcher = BackgroundWorker("fetch", use_single_thread)
        self._all_spilled = False  # whether every cached block is in the stores or cannot be written there

    def can_prefetch(self, request: GenerateRequest) -> bool:
        """Return whether blocks of the prompt may be in a store. False for a request with prompt log probabilities,
        whose prompt must be computed."""
        return self._stores.up and request.sampling.prompt_logprobs is None

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
            for prefetched in self._read(request):
                deliver(prefetched)
                prefetched.stored.wait(STORE_SECONDS)  # to not slow down the engine's thread
            if request.sampling.prefill_only and self._stores.shared:
                entries = list(self._entries(request))
                needed = self._blocks.layout.needed(len(entries))
                self._stores.shared.refresh([BlockKey(entries[index], place) for index, place in needed])
        except Exception:  # computes the request without them
            log.exception("request %d: could not read its prefix from a store", request.key)
        done(request)

    def _read(self, request: GenerateRequest) -> Iterator[PrefetchedBlocks]:
        """Yield the blocks of the prompt's prefix that are in neither pool, up to the first block that no store has. Of
        further kinds of layers, yield the blocks that a hit of this length needs.

        The pools' indexes belong to the engine's thread and may change meanwhile. That costs a read or a hit, but never
        gives a wrong block, because every block is looked up by its content.
        """
        blocks, size = self._blocks, self._blocks.block_size
        count = (len(request.prompt_token_ids) - 1) // size  # the last token is always computed
        entries = list(islice(self._entries(request), count))
        known: list[Entry | None] = []  # their interned entries; None where there is none
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
            for contents in self._stores.read([BlockKey(entries[index], place) for index in wanted]):
                indices = missing[read : read + len(contents)]
                yield PrefetchedBlocks(
                    request, chain, [(index, place, block) for index, block in zip(indices, contents, strict=True)]
                )
                read += len(contents)
            if kind.keeps_all and read < len(missing):
                count = missing[read]

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
                self._host_cache.write(self._host_blocks.pages_of(block), content)

    def write_moved_out(self, transfers: Transfers) -> None:
        """Also write the full blocks that a step moved to the host pool to the stores. Called after the step."""
        for move in transfers.moves_out:
            if move.entry and len(move.entry.tokens) == self._blocks.block_size:
                key = BlockKey(move.entry, self._host_blocks.kind_of(move.target))
                staged = self.handovers is not None and self.handovers.stages(key)
                if not staged and self._stores.should_write(key):
                    self._stores.put(key, self._host_cache.read([target for _, target in move.pages]))

    def hand_over(self) -> None:
        """Hand the next blocks of `prefill_only` requests to the shared store. Called between two steps."""
        if self.handovers and self.handovers.hand_over():
            self.mark_changed()

    def mark_changed(self) -> None:
        """Record that a step ran, so there may be cached blocks that are in no store."""
        self._all_spilled = False

    @property
    def all_spilled(self) -> bool:
        """Whether every cached block is in the stores or cannot be written there."""
        return self._all_spilled

    @property
    def poll_timeout(self) -> float | None:
        """Seconds that an idle engine may wait for a message before it calls `spill`; None: no limit."""
        if self.handovers and self.handovers.needs_hand_over:
            return 0 if self._stores.free_queue_slots else HANDOVER_SECONDS
        if self._all_spilled:
            return None
        return 0 if self._stores.free_queue_slots and self._blocks.has_unspilled else SPILL_SECONDS

    def spill(self) -> bool:
        """Write a few cached blocks that a store lacks, as many as the write queues take. Called only while no step is
        in flight. Return `all_spilled`."""
        slots, blocks = self._stores.free_queue_slots, self._blocks
        if not slots and not blocks.ledger.has_moves_out:
            return False
        limit = 0 if blocks.ledger.has_moves_out else min(SPILL_BLOCKS, slots)  # planned moves have the slots
        transfers = blocks.spill(self._stores.should_write, limit)
        self._runner.move(Plan(transfers=transfers))
        self._runner.copier.settle()
        self.write_moved_out(transfers)
        blocks.ledger.finish(transfers)
        self._all_spilled = not transfers.moves_out and self._stores.is_idle
        return self._all_spilled

    def spill_rest(self, deadline: float) -> bool:
        """Write cached blocks until all are in the stores or `deadline` (time.monotonic()) has passed. Called on the
        engine's thread, or after it has ended. Return whether this wrote the last ones."""
        while not self._all_spilled and (left := deadline - time.monotonic()) > 0:
            self._stores.settle(left)
            if self.spill():
                return True
        return False

    def close(self, deadline: float) -> None:
        """End the stores' threads and the prefetch thread, at the latest at `deadline` (time.monotonic())."""
        self._stores.close(deadline - time.monotonic())
        self._fetcher.stop(deadline - time.monotonic())

    @property
    def stats(self) -> dict[str, float]:
        """The statistics of the stores, by name."""
        return self._stores.stats


@dataclass(eq=False)
class _Handover:
    """The handover of one request's prompt."""

    request: GenerateRequest
    wanted: deque[tuple[int, int]]  # (index, kind) of full blocks of the prompt to stage; empty if lost
    entries: list[Entry] = field(default_factory=list)  # contents of the first blocks, as far as they were needed
    keys: list[tuple[int, BlockKey]] = field(default_factory=list)  # (index, block): staged, or in the store before
    staged: deque[BlockKey] = field(default_factory=deque)  # staged blocks that the stores do not have yet
    end: TokenDelta | None = None  # the end of the request, which waits for the handover
    waits_for_store: bool = False  # whether the store has everything, and will call back when it is written

    @property
    def is_handed_over(self) -> bool:
        return not (self.wanted or self.staged)

    @property
    def needs_hand_over(self) -> bool:
        """Whether the prompt is computed, and some of its blocks are not in the store's queue yet."""
        return self.end is not None and not self.waits_for_store

    def next_key(self, contents: Contents, block_size: int) -> BlockKey | None:
        """Return the next block to stage; None if its content is not computed yet, or forgotten."""
        index, kind = self.wanted[0]
        while len(self.entries) <= index:
            start = len(self.entries) * block_size
            parent = self.entries[-1] if self.entries else self.request.origin
            entry = contents.find(parent, self.request.prompt_token_ids[start : start + block_size])
            if entry is None:
                return None
            self.entries.append(entry)
        return BlockKey(self.entries[index], kind)


class Handovers:
    """The open handovers. Belongs to the engine's thread.

    A block that neither pool has any more, or that the store does not take, ends its handover early. The request then
    ends as usual, and its usage says how many tokens are stored.
    """

    def __init__(self, stores: StoreChain, blocks: BlockManager, host_cache: KVCache, stored: Callable[[int], object]):
        """stored: called on any thread, with the key of a request, when `take_end` may be called for it."""
        assert blocks.host and stores.shared
        self._stores = stores
        self._store = stores.shared
        self._blocks = blocks
        self._host = blocks.host
        self._host_cache = host_cache
        self._stored = stored
        self._open: dict[int, _Handover] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._open

    @property
    def num_waiting(self) -> int:
        """The number of requests that are computed and wait for their handovers."""
        return sum(handover.end is not None for handover in self._open.values())

    @property
    def needs_hand_over(self) -> bool:
        """Whether a computed request has blocks to hand over, so that `hand_over` has to be called."""
        return any(handover.needs_hand_over for handover in self._open.values())

    def open(self, request: GenerateRequest) -> None:
        """Begin the handover of a request that is about to be computed."""
        count = len(request.prompt_token_ids) // self._blocks.block_size
        self._open[request.key] = _Handover(request, deque(self._blocks.layout.needed(count)))

    def drop(self, key: int) -> bool:
        """End the handover of a request that has ended early. Return whether there was one."""
        return self._open.pop(key, None) is not None

    def hold(self, deltas: Iterable[TokenDelta]) -> list[TokenDelta]:
        """Return the deltas without the ends of requests whose handovers are open; `take_end` returns these ends."""
        passed = []
        for delta in deltas:
            handover = self._open.get(delta.key)
            if handover is None:
                passed.append(delta)
            elif delta.finish:
                handover.end = delta
            else:
                passed.append(delta)
                if delta.error:
                    self.drop(delta.key)
        return passed

    def stages(self, key: BlockKey) -> bool:
        """Return whether a block is moved to the host for a handover, so that `hand_over` puts it into the stores."""
        return any(key in handover.staged for handover in self._open.values())

    def hand_over(self) -> bool:
        """Put staged blocks that are in the host pool into the stores, then stage more, up to HANDOVER_BLOCKS in all.
        Called between two steps. Return whether the next step has to move blocks."""
        num_moves, slots = self._blocks.ledger.num_moves_out, self._stores.free_queue_slots
        for handover in self._open.values():
            while slots and handover.staged and self._put(handover.staged[0]):
                handover.staged.popleft()
                slots -= 1
        room = HANDOVER_BLOCKS - sum(len(handover.staged) for handover in self._open.values())
        for handover in self._open.values():
            while room > 0 and handover.wanted and self._stage_next(handover):
                room -= 1
            if handover.needs_hand_over and handover.is_handed_over:
                stored = partial(self._stored, handover.request.key)
                handover.waits_for_store = self._store.call_when_written(stored)
        return self._blocks.ledger.num_moves_out > num_moves

    def take_end(self, key: int) -> list[TokenDelta]:
        """Return the end of a request whose blocks are written, or could not be. Empty if it has ended early."""
        handover = self._open.pop(key, None)
        if handover is None:
            return []
        assert handover.end
        usage = handover.end.usage
        if usage:
            lost = (index for index, key in handover.keys if not self._store.has(key))
            num_blocks = next(lost, handover.keys[-1][0] + 1 if handover.keys else 0)
            usage = usage._replace(stored_tokens=num_blocks * self._blocks.block_size)
        return [handover.end._replace(usage=usage)]

    def _stage_next(self, handover: _Handover) -> bool:
        """Make sure that the next block is in the host pool after the next step, unless the store has it. Return False
        if it is not computed yet, or lost."""
        key = handover.next_key(self._blocks.contents, self._blocks.block_size)
        if key and self._store.up:
            is_stored = self._store.has(key)
            if is_stored or self._blocks.copy_to_host(key) is not None:
                handover.keys.append((handover.wanted.popleft()[0], key))
                if not is_stored:
                    handover.staged.append(key)
                return True
        if handover.end and not any(other.staged for other in self._open.values()):
            handover.wanted.clear()  # no staged block will free room on the host
        return False

    def _put(self, key: BlockKey) -> bool:
        """Put a staged block into the stores, unless it was lost or written meanwhile. Return False if it has not
        arrived in the host pool."""
        block = self._blocks.copy_to_host(key)
        if block is not None and self._stores.should_write(key):
            if not self._blocks.ledger.has_arrived(block):
                return False
            self._stores.put(key, self._host_cache.read(self._host.pages_of(block)))
        return True


class RemoteAccess(NamedTuple):
    """Where the remote store is, and what is needed to use it."""

    address: RedisAddress
    password: str | None
    key: bytes | None  # for the authentication of values


def read_remote_access(config: EngineConfig) -> RemoteAccess | None:
    """Return how the remote store is reached; None without one. Raises ConfigError for an unusable password or key."""
    if config.remote_cache_url is None:
        return None
    address = RedisAddress.parse(config.remote_cache_url)
    password = read_secret("PAGED_REMOTE_CACHE_PASSWORD")
    if password and address.password:
        raise ConfigError("remote_cache_url: has a password, as PAGED_REMOTE_CACHE_PASSWORD has; leave one of them out")
    return RemoteAccess(address, password, read_key("PAGED_REMOTE_CACHE_SECRET"))


def build_stores(config: EngineConfig, prepared: PreparedModel, runner: StepRunner) -> StoreChain | None:
    """Return the stores behind the host pool, or None if there are none."""
    if runner.host is None:
        return None
    loaded, layout = prepared.loaded, prepared.pools.layout
    paths = [loaded.path, *([loaded.draft.path] if loaded.draft else [])]
    spec, device = loaded.spec, prepared.runner.kv.device
    source = BlockSource(config, layout.blocks, paths, spec.dtype, spec.kv_dtype, device)
    block_format = BlockFormat([kind.pages for kind in layout.blocks.kinds], layout.page_bytes)
    block_bytes = layout.blocks.pages * layout.page_bytes
    stores: list[BlockStore] = []
    shared = None
    if config.disk_cache_dir is not None:
        directory = Path(config.disk_cache_dir).expanduser()
        budget = _budget(config, "disk_cache_gib", block_bytes)
        stores.append(DiskStore(directory, source.fingerprint, budget, block_format))
    if access := read_remote_access(config):
        shared = RemoteStore(
            RedisClient(access.address, access.password, config.remote_cache_timeout_ms / 1e3),
            source.fingerprint,
            block_format,
            budget=_budget(config, "remote_cache_gib", block_bytes),
            ttl=config.remote_cache_ttl,
            secret=access.key,
        )
        stores.append(shared)
    compute_seconds = prepared.costs.token * config.block_size
    max_seconds = compute_seconds if config.tier_read_mode == "auto" else math.inf
    return StoreChain(stores, max_seconds, shared=shared) if stores else None


def _budget(config: EngineConfig, option: str, block_bytes: int) -> int:
    """Return the bytes of a store. Raises ConfigError if they hold no block."""
    wanted = getattr(config, option)
    if wanted * GIB < block_bytes:
        raise ConfigError(f"{option}={wanted:g}: one block takes {block_bytes} bytes; raise it")
    return int(wanted * GIB)
