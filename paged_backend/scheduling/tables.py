"""The block tables of a request: what its sequences need, take, share, move to the host and let go of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paged_backend.scheduling.beam_search import Continuation
from paged_backend.scheduling.block_manager import NO_HIT, BlockManager, CacheHit
from paged_backend.scheduling.plan import Costs, Draft
from paged_backend.scheduling.sequence import Group, Sequence


class Demand(NamedTuple):
    """What the cache has for a request that waits, and the blocks that it needs beside, the source of a partial hit
    aside."""

    hit: CacheHit
    blocks: int


class Tables:
    """Knows how many blocks a group's tokens take, and gives them to it or takes them away; who is to have them, the
    scheduler decides."""

    def __init__(self, blocks: BlockManager, costs: Costs, preemption: str):
        """preemption: "swap", "recompute", or by cost."""
        self._blocks = blocks
        self._costs = costs
        self._preemption = preemption

    # --- how many ------------------------------------------------------------------------------------------------

    def promised(self, group: Group) -> int:
        """Blocks that a group which runs will still need for the tokens it has."""
        return max(0, self._needs(group) - self._holds(group))

    def demand(self, group: Group) -> Demand:
        """Of a group that waits."""
        if group.swapped:
            return Demand(NO_HIT, self._to_bring_back(group))
        hit = self._blocks.match(group.leader.chain, group.leader.tokens[: group.findable])
        here = hit.on_device
        return Demand(hit, self._needs(group) - len(here) + sum(map(self._blocks.is_cached, here)))

    def fit(self, demand: Demand, promised: int) -> CacheHit | None:
        """What the cache has for a request, if all its tokens fit then beside the blocks that are promised to others.
        What a hit brings back into use is no longer available, and nor is what a copy is made from: a copy that leaves
        no room for the rest is done without."""
        available = self._blocks.num_available - promised
        hit, needed = demand
        if needed > available:
            return None
        if hit.partial is not None:
            source, on_host = hit.partial
            cost = self._costs.move if on_host else self._costs.copy
            taken = not on_host and self._blocks.is_cached(source)
            if needed + taken > available or cost > hit.partial_tokens * self._costs.token:
                return CacheHit(hit.blocks)
        return hit

    def _needs(self, group: Group) -> int:
        """Blocks of all the group's tokens so far: full ones of the prompt once, the rest for each sample."""
        return self._once(group) + sum(self._blocks.blocks_for(len(one.tokens)) for one in group.sequences)

    def _holds(self, group: Group) -> int:
        once = self._once(group) if group.forked else 0
        return once + sum(len(one.blocks) for one in group.sequences)

    def _once(self, group: Group) -> int:
        """What to add to a count over samples, so that the blocks they share count once."""
        return -(len(group.sequences) - 1) * (group.leader.num_prompt // self._blocks.block_size)

    def _to_bring_back(self, group: Group) -> int:
        """Blocks that a group needs whose own were moved to the host: as many, what its tokens need more, and a copy
        for each sequence that would write into a block that another has too."""
        size = self._blocks.block_size
        held = {block for sequence in group.sequences for block in sequence.swapped}
        more = sum(self._blocks.blocks_for(len(one.tokens)) - len(one.swapped) for one in group.active)
        next_ones = [one.computed // size for one in group.active]
        written = [
            one.swapped[index] for one, index in zip(group.active, next_ones, strict=True) if index < len(one.swapped)
        ]
        return len(held) + more + len(written) - len(set(written))

    # --- taken ---------------------------------------------------------------------------------------------------

    def adopt(self, group: Group, hit: CacheHit, draft: Draft) -> None:
        """Begin with what the cache has."""
        leader = group.leader
        leader.blocks, moves, copies = self._blocks.adopt(hit)
        draft.bring(group, moves)
        for copy in copies:
            draft.copy(group, copy)
        group.blocks_reused += len(hit.on_device)
        leader.computed = leader.committed = len(hit.blocks) * self._blocks.block_size + hit.partial_tokens

    def make_room(self, group: Group, sequence: Sequence, num_tokens: int, draft: Draft) -> bool:
        """Blocks for `num_tokens` tokens, the one to be written into next its own. False, with nothing changed, where
        the pool is dry."""
        table, size = sequence.blocks, self._blocks.block_size
        index = sequence.computed // size
        shared = index < len(table) and self._blocks.is_shared(table[index])
        if not shared and num_tokens <= len(table) * size:
            return True
        if shared + self._blocks.blocks_for(num_tokens) - len(table) > self._blocks.num_available:
            return False
        if shared:
            copy = self._blocks.make_writable(table, index)
            assert copy is not None, "blocks that were counted available are not"
            draft.copy(group, copy)
        return num_tokens <= len(table) * size or self.grow(group, table, num_tokens)

    def grow(self, group: Group, table: list[int], num_tokens: int) -> bool:
        before = len(table)
        grown = self._blocks.grow(table, num_tokens)
        group.blocks_new += len(table) - before
        return grown

    # --- known by their content ----------------------------------------------------------------------------------

    def seal(self, sequence: Sequence, end: int) -> None:
        """The keys and values of the tokens before `end` are in the pages now: blocks that are full become known by
        their content."""
        size = self._blocks.block_size
        first, sequence.committed = sequence.committed // size, end
        for index in range(first, sequence.committed // size):
            self._blocks.seal(sequence.blocks[index], sequence.chain, sequence.tokens, index)

    def accept(self, group: Group, sequence: Sequence, tokens: list[int]) -> None:
        """What was drawn takes the place of the guesses. Keys and values of wrong ones are overwritten in time; blocks
        that only those are in go back."""
        sequence.tokens[sequence.committed :] = tokens
        sequence.computed = sequence.committed + len(tokens) - 1
        self.seal(sequence, sequence.computed)
        while len(sequence.blocks) > self._blocks.blocks_for(sequence.computed):
            self._blocks.drop(sequence.blocks.pop())
            group.blocks_new -= 1

    # --- shared --------------------------------------------------------------------------------------------------

    def fork(self, group: Group) -> None:
        """All samples go on from the prompt that the first has computed."""
        leader = group.leader
        for sequence in group.sequences[1:]:
            sequence.blocks = self._blocks.fork(leader.blocks)
            sequence.computed, sequence.committed = leader.computed, leader.committed
            sequence.chain = leader.chain.head(leader.num_prompt // self._blocks.block_size)
        group.forked = True

    def branch(self, group: Group, continuations: Iterable[Continuation]) -> None:
        """Put the continuations in place of the live beams. The first of a beam takes over its block table, the
        others share it."""
        parents, beams = group.sequences, []
        left = dict(enumerate(parents))
        for continuation in continuations:
            beam = left.pop(continuation.beam, None) or self._child(parents[continuation.beam])
            beams.append((beam, continuation.token))
        for beam in left.values():
            self._blocks.release(beam.blocks)
        for index, (beam, token) in enumerate(beams):
            beam.index = index
            beam.tokens.append(token)
        group.sequences = [beam for beam, _ in beams]

    def _child(self, parent: Sequence) -> Sequence:
        child = Sequence(parent.request, list(parent.tokens), parent.chain.copy())
        child.blocks, child.computed = self._blocks.fork(parent.blocks), parent.computed
        child.committed = parent.committed
        return child

    # --- moved to the host, and let go of ------------------------------------------------------------------------

    def swap_out(self, group: Group) -> bool:
        """Move a group's blocks to the host, where that and the way back are cheaper than computing them again, and
        there is room."""
        if self._preemption == "recompute":
            return False
        blocks = {block for sequence in group.sequences for block in sequence.blocks}
        shared = group.leader.num_prompt * (len(group.sequences) - 1) if group.forked else 0
        tokens = sum(sequence.computed for sequence in group.sequences) - shared
        if self._preemption == "auto" and 2 * len(blocks) * self._costs.move >= tokens * self._costs.token:
            return False
        tables = self._blocks.swap_out([sequence.blocks for sequence in group.sequences])
        if tables is None:
            return False
        for sequence, table in zip(group.sequences, tables, strict=True):
            sequence.swapped = table
        return True

    def swap_in(self, group: Group, draft: Draft) -> None:
        """Every sequence has its blocks back."""
        tables, moves = self._blocks.swap_in([sequence.swapped for sequence in group.sequences])
        for sequence, table in zip(group.sequences, tables, strict=True):
            sequence.blocks = table
        draft.bring(group, moves)

    def restart(self, group: Group) -> None:
        """Everything is to be computed again, the prompt once."""
        self.release(group)
        group.forked = len(group.sequences) == 1
        if group.beams:
            group.beams.rows.clear()

    def release(self, group: Group) -> None:
        for sequence in group.sequences:
            self.let_go(sequence)
            sequence.computed = sequence.committed = 0

    def let_go(self, sequence: Sequence) -> None:
        self._blocks.release(sequence.blocks)
        if sequence.swapped:
            assert self._blocks.host
            self._blocks.host.release(sequence.swapped)
