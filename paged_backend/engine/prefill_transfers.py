"""Transfers of `prefill_only` requests: hands the blocks of their prompts to the shared tier while they are computed.

device pool ── moves of the next step ──▶ host pool ──▶ write queue of the tier ──▶ store
                                                        (the request ends when its last block is there)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from paged_backend.api.request import GenerateRequest, TokenDelta
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.cache import KVCache
from paged_backend.kv.content import BlockKey, Contents, Entry
from paged_backend.kv.stores.chain import StoreChain

TRANSFER_BLOCKS = 32  # blocks that a step moves to the host: those of 512 tokens, a step's default


@dataclass(eq=False)
class _Transfer:
    """The transfer of one request's prompt."""

    request: GenerateRequest
    wanted: deque[tuple[int, int]]  # (index, kind) of the blocks to stage: full ones of the prompt; none if lost
    entries: list[Entry] = field(default_factory=list)  # contents of the first blocks, as far as they were needed
    keys: list[tuple[int, BlockKey]] = field(default_factory=list)  # (index, block): those that were staged
    staged: deque[BlockKey] = field(default_factory=deque)  # those that the tiers have not got yet
    end: TokenDelta | None = None  # the end of the request, which waits for the transfer
    waits_for_store: bool = False  # whether the tier has got everything

    @property
    def is_handed_over(self) -> bool:
        return not (self.wanted or self.staged)

    @property
    def needs_hand_over(self) -> bool:
        """Whether the prompt is computed, and some of its blocks are not in the tier's queue yet."""
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


class PrefillTransfers:
    """The open transfers. Belongs to the engine's thread.

    A block that neither pool has any more, or that the store does not take, ends its transfer early. The request then
    ends as usual, and its usage says how many tokens are stored.
    """

    def __init__(self, tiers: StoreChain, blocks: BlockManager, host_cache: KVCache, stored: Callable[[int], object]):
        """stored: called on any thread, with the key of a request, when `take_end` may be called for it."""
        assert blocks.host and tiers.shared
        self._tiers = tiers
        self._tier = tiers.shared
        self._blocks = blocks
        self._host = blocks.host
        self._host_cache = host_cache
        self._stored = stored
        self._open: dict[int, _Transfer] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._open

    @property
    def num_waiting(self) -> int:
        """The number of requests that are computed and wait for their transfers."""
        return sum(one.end is not None for one in self._open.values())

    @property
    def needs_hand_over(self) -> bool:
        """Whether a computed request has blocks to hand over, so that `hand_over` has to be called."""
        return any(one.needs_hand_over for one in self._open.values())

    def open(self, request: GenerateRequest) -> None:
        """Begin the transfer of a request that is about to be computed."""
        size = self._blocks.block_size
        count = len(request.prompt_token_ids) // size
        needed = [kind.needed(count, size) for kind in self._blocks.layout.kinds]
        wanted = ((index, kind) for index in range(count) for kind, some in enumerate(needed) if index in some)
        self._open[request.key] = _Transfer(request, deque(wanted))

    def drop(self, key: int) -> bool:
        """End the transfer of a request that has ended early. Return whether there was one."""
        return self._open.pop(key, None) is not None

    def hold(self, deltas: Iterable[TokenDelta]) -> list[TokenDelta]:
        """Return the deltas without the ends of requests whose transfers are open; `take_end` returns those."""
        passed = []
        for delta in deltas:
            transfer = self._open.get(delta.key)
            if transfer is None:
                passed.append(delta)
            elif delta.finish:
                transfer.end = delta
            else:
                passed.append(delta)
                if delta.error:
                    self.drop(delta.key)
        return passed

    def stages(self, key: BlockKey) -> bool:
        """Return whether a block is moved to the host for a transfer, so that `hand_over` puts it into the tiers."""
        return any(key in transfer.staged for transfer in self._open.values())

    def hand_over(self) -> bool:
        """Put staged blocks that are in the host pool into the tiers, and stage the next ones, at most
        TRANSFER_BLOCKS of each. Called between two steps. Return whether the next step has to move blocks."""
        num_moves, slots = self._blocks.ledger.num_moves_out, self._tiers.free_queue_slots
        for transfer in self._open.values():
            while slots and transfer.staged and self._put(transfer.staged[0]):
                transfer.staged.popleft()
                slots -= 1
        room = TRANSFER_BLOCKS - sum(len(transfer.staged) for transfer in self._open.values())
        for transfer in self._open.values():
            while room > 0 and transfer.wanted and self._stage_next(transfer):
                room -= 1
            if transfer.needs_hand_over and transfer.is_handed_over:
                stored = partial(self._stored, transfer.request.key)
                transfer.waits_for_store = self._tier.call_when_written(stored)
        return self._blocks.ledger.num_moves_out > num_moves

    def take_end(self, key: int) -> list[TokenDelta]:
        """Return the end of a request whose blocks are written, or could not be. Empty if it has ended early."""
        transfer = self._open.pop(key, None)
        if transfer is None:
            return []
        assert transfer.end
        usage = transfer.end.usage
        if usage:
            lost = (index for index, key in transfer.keys if not self._tier.has(key))
            num_blocks = next(lost, transfer.keys[-1][0] + 1 if transfer.keys else 0)
            usage = usage._replace(stored_tokens=num_blocks * self._blocks.block_size)
        return [transfer.end._replace(usage=usage)]

    def _stage_next(self, transfer: _Transfer) -> bool:
        """Make sure that the next block is in the host pool after the next step, unless the store has it. Return False
        if it is not computed yet, or lost."""
        key = transfer.next_key(self._blocks.contents, self._blocks.block_size)
        if key and self._tier.up:
            is_stored = self._tier.has(key)
            if is_stored or self._blocks.copy_to_host(key) is not None:
                transfer.keys.append((transfer.wanted.popleft()[0], key))
                if not is_stored:
                    transfer.staged.append(key)
                return True
        if transfer.end and not any(one.staged for one in self._open.values()):  # none of them frees room on the host
            transfer.wanted.clear()
        return False

    def _put(self, key: BlockKey) -> bool:
        """Put a staged block into the tiers, unless it was lost or written meanwhile. Return False if it has not
        arrived in the host pool."""
        block = self._blocks.copy_to_host(key)
        if block is not None and self._tiers.should_write(key):
            if not self._blocks.ledger.has_arrived(block):
                return False
            self._tiers.put(key, self._host_cache.read_block(self._host.pages_of(block)))
        return True
