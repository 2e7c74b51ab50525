"""Transfers of `prefill_only` requests: hands the blocks of their prompts to the shared tier while they are computed.

device pool ── moves of the next step ──▶ host pool ──▶ write queue of the tier ──▶ store
                                                        (the request ends when its last block is there)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from paged_backend.api.request import GenerateRequest, TokenDelta
from paged_backend.memory.kv_cache import KVCache
from paged_backend.memory.tier_chain import TierChain
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import Entry, PrefixParent

TRANSFER_BLOCKS = 32  # blocks that a step moves to the host: those of 512 tokens, a step's default


@dataclass(eq=False)
class _Transfer:
    """The transfer of one request's prompt."""

    request: GenerateRequest
    num_blocks: int  # blocks to transfer: the full ones of the prompt, fewer if the rest is lost
    entries: list[Entry] = field(default_factory=list)  # contents of the first blocks, as far as they were staged
    staged: deque[Entry] = field(default_factory=deque)  # those that the tiers have not got yet
    end: TokenDelta | None = None  # the end of the request, which waits for the transfer
    waits_for_store: bool = False  # whether the tier has got everything

    @property
    def is_handed_over(self) -> bool:
        return len(self.entries) >= self.num_blocks and not self.staged

    @property
    def needs_hand_over(self) -> bool:
        """Whether the prompt is computed, and some of its blocks are not in the tier's queue yet."""
        return self.end is not None and not self.waits_for_store

    def next_tokens(self, block_size: int) -> tuple[PrefixParent, tuple[int, ...]]:
        """Return parent and tokens of the next block."""
        parent = self.entries[-1] if self.entries else self.request.origin
        start = len(self.entries) * block_size
        return parent, self.request.prompt_token_ids[start : start + block_size]


class PrefillTransfers:
    """The open transfers. Belongs to the engine's thread.

    A block that neither pool has any more, or that the store does not take, ends its transfer early. The request then
    ends as usual, and its usage says how many tokens are stored.
    """

    def __init__(self, tiers: TierChain, blocks: BlockManager, host_cache: KVCache, stored: Callable[[int], object]):
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
        num_blocks = len(request.prompt_token_ids) // self._blocks.block_size
        self._open[request.key] = _Transfer(request, num_blocks)

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

    def stages(self, entry: Entry) -> bool:
        """Return whether a block is moved to the host for a transfer, so that `hand_over` puts it into the tiers."""
        return any(entry in transfer.staged for transfer in self._open.values())

    def hand_over(self) -> bool:
        """Put staged blocks that are in the host pool into the tiers, and stage the next ones, at most
        TRANSFER_BLOCKS of each. Called between two steps. Return whether the next step has to move blocks."""
        num_moves, slots = self._blocks.offload.num_moves_out, self._tiers.free_queue_slots
        for transfer in self._open.values():
            while slots and transfer.staged and self._put(transfer.staged[0]):
                transfer.staged.popleft()
                slots -= 1
        room = TRANSFER_BLOCKS - sum(len(transfer.staged) for transfer in self._open.values())
        for transfer in self._open.values():
            while room > 0 and len(transfer.entries) < transfer.num_blocks and self._stage_next(transfer):
                room -= 1
            if transfer.needs_hand_over and transfer.is_handed_over:
                stored = partial(self._stored, transfer.request.key)
                transfer.waits_for_store = self._tier.call_when_written(stored)
        return self._blocks.offload.num_moves_out > num_moves

    def take_end(self, key: int) -> list[TokenDelta]:
        """Return the end of a request whose blocks are written, or could not be. Empty if it has ended early."""
        transfer = self._open.pop(key, None)
        if transfer is None:
            return []
        assert transfer.end
        usage = transfer.end.usage
        if usage:
            num_stored = sum(1 for _ in takewhile(self._tier.has, transfer.entries))
            usage = usage._replace(stored_tokens=num_stored * self._blocks.block_size)
        return [transfer.end._replace(usage=usage)]

    def _stage_next(self, transfer: _Transfer) -> bool:
        """Make sure that the next block is in the host pool after the next step, unless the store has it. Return False
        if it is not computed yet, or lost."""
        entry = self._blocks.cache.contents.find(*transfer.next_tokens(self._blocks.block_size))
        if entry and self._tier.up:
            is_stored = self._tier.has(entry)
            if is_stored or self._blocks.offload.copy_to_host(entry) is not None:
                transfer.entries.append(entry)
                if not is_stored:
                    transfer.staged.append(entry)
                return True
        if transfer.end and not any(
            one.staged for one in self._open.values()
        ):  # none of them frees room in the host pool
            transfer.num_blocks = len(transfer.entries)
        return False

    def _put(self, entry: Entry) -> bool:
        """Put a staged block into the tiers, unless it was lost or written meanwhile. Return False if it has not
        arrived in the host pool."""
        block = self._blocks.offload.copy_to_host(entry)
        if block is not None and self._tiers.should_write(entry):
            if not self._blocks.offload.has_arrived(block):
                return False
            self._tiers.put(entry, self._host_cache.read_block(self._host.pages_of(block)))
        return True
