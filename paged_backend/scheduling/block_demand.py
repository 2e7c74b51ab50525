"""Computes how many blocks a request needs. The results are numbers of pages if the layout divides blocks."""

from __future__ import annotations

from typing import NamedTuple

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.plan import Costs
from paged_backend.scheduling.prefix_cache import NO_HIT, CacheHit
from paged_backend.scheduling.sequence import Group
from paged_backend.scheduling.state_slots import StateSlots
from paged_backend.scheduling.windowed_pool import pages_taken_by_lock


class Demand(NamedTuple):
    """The cache hit of a waiting request, and the blocks that it needs."""

    hit: CacheHit
    num_blocks: int  # must be available: new blocks and cached full blocks of the hit, not its partial source


class BlockDemand:
    """Computes how many blocks groups need for the tokens that they have. Changes nothing."""

    def __init__(self, blocks: BlockManager, costs: Costs, states: StateSlots):
        self._blocks = blocks
        self._costs = costs
        self._states = states

    def reserved(self, group: Group) -> int:
        """Return how many more blocks a running group needs for the tokens that it has."""
        layout = self._blocks.layout
        base = layout.base_pages * max(0, self._total(group) - self._held(group))
        return base + max(0, self._window_total(group) - layout.window_pages * self._held_in_window(group))

    def demand(self, group: Group) -> Demand:
        """Return the demand of a waiting group for all of its tokens."""
        if group.is_swapped:
            return Demand(NO_HIT, self._to_swap_in(group))
        leader = group.leader
        hit = self._blocks.match(leader.chain, leader.tokens[: group.max_cacheable_tokens])
        hit = self._states.restrict(hit, leader.chain.entries)
        on_device = hit.device_blocks
        cached = sum(map(self._blocks.pool.is_cached, on_device))
        base = self._blocks.layout.base_pages * (self._total(group) - len(on_device) + cached)
        return Demand(hit, base + self._window_total(group))

    def fit(self, demand: Demand, reserved: int) -> CacheHit | None:
        """Return the hit to use if the demand fits beside the blocks that are reserved for others, else None.

        A partial hit is not used if copying its block would cost more than computing its tokens, or if too few blocks
        remain while its source is locked for the copy.
        """
        available = self._blocks.num_available - reserved
        hit, needed = demand
        if needed > available:
            return None
        if hit.partial is not None:
            source, on_host = hit.partial
            cost = self._costs.move if on_host else self._costs.copy
            locked = 0 if on_host else pages_taken_by_lock(self._blocks.pool, source)
            if needed + locked > available or cost > hit.partial_tokens * self._costs.token:
                return self._blocks.cache.without_partial(hit)
        return hit

    def _total(self, group: Group) -> int:
        """Return the blocks for all of the group's tokens: full prompt blocks once, all others per sample."""
        return sum(self._blocks.blocks_for(len(one.tokens)) for one in group.sequences) - self._shared(group)

    def _held(self, group: Group) -> int:
        return sum(len(one.blocks) for one in group.sequences) - (self._shared(group) if group.forked else 0)

    def _window_total(self, group: Group) -> int:
        """Return the window pages that a group needs at most for the tokens that it has."""
        layout, sequences = self._blocks.layout, group.sequences
        if not layout.window_pages:
            return 0
        blocks = [layout.blocks_for(len(one.tokens)) for one in sequences]
        pending = [len(one.tokens) - one.committed for one in sequences]
        return layout.window_pages_for(blocks, pending, group.leader.num_prompt // layout.block_size)

    def _held_in_window(self, group: Group) -> int:
        """Return how many blocks of a group have window pages that it references."""
        return len({block for one in group.sequences for block in one.blocks[one.window_start :]})

    def _shared(self, group: Group) -> int:
        """Return how often shared prompt blocks are counted too much if each sample's blocks are summed."""
        return (len(group.sequences) - 1) * (group.leader.num_prompt // self._blocks.block_size)

    def _to_swap_in(self, group: Group) -> int:
        """Return the blocks that a swapped-out group needs: one per block on the host, blocks for its further tokens,
        and a copy for each sequence that would write into a shared block."""
        size = self._blocks.block_size
        assert self._blocks.host
        layout = self._blocks.layout
        held = {block for sequence in group.sequences for block in sequence.host_blocks}
        in_window = {block for one in group.sequences for block in one.host_blocks[one.window_start :]}
        more = sum(self._blocks.blocks_for(len(one.tokens)) - len(one.host_blocks) for one in group.active)
        next_index = [one.computed // size for one in group.active]
        written = [
            one.host_blocks[index]
            for one, index in zip(group.active, next_index, strict=True)
            if index < len(one.host_blocks)
        ]
        copied = len(written) - len(set(written))
        window = layout.window_pages * (len(in_window) + copied)
        return layout.base_pages * (len(held) + more + copied) + max(window, self._window_total(group))
