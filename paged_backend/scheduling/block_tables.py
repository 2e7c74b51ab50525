"""The block tables of groups: allocating, sharing, caching, swapping and freeing their blocks."""

from __future__ import annotations

from collections.abc import Iterable

from paged_backend.scheduling.beam_search import Continuation
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.plan import NO_BLOCKS, Allocation, Costs
from paged_backend.scheduling.plan_builder import PlanBuilder
from paged_backend.scheduling.prefix_cache import CacheHit
from paged_backend.scheduling.score_cache import ScoreCache
from paged_backend.scheduling.sequence import Group, Sequence
from paged_backend.scheduling.state_slots import StateSlots


class BlockTables:
    """Changes the block tables of groups. Nothing else updates `block_usage`. The scheduler decides which group gets
    blocks."""

    def __init__(self, blocks: BlockManager, costs: Costs, preemption: str, states: StateSlots):
        """preemption: "swap", "recompute", or "auto" for the cheaper one."""
        self._blocks = blocks
        self.states = states
        self.scores = ScoreCache(blocks)
        self._pool = blocks.pool
        self._costs = costs
        self._preemption = preemption

    def adopt(self, group: Group, hit: CacheHit, builder: PlanBuilder) -> None:
        """Begin the leader's block table with the blocks of a cache hit."""
        leader, usage = group.leader, group.block_usage
        leader.blocks, moves, copies = self._blocks.adopt(hit)
        leader.window_start = hit.window_start
        self.states.adopt(leader, hit)
        builder.add_moves_in(group.key, moves)
        builder.add_copies(group.key, copies)
        usage.reused += len(hit.device_blocks)
        usage.new += len(moves) + len(copies)
        usage.from_host += len(moves)
        usage.copied += len(copies)
        leader.computed = leader.committed = len(hit.blocks) * self._blocks.block_size + hit.partial_tokens

    def grow(self, group: Group, num_tokens: int) -> None:
        """Extend the leader's block table to hold `num_tokens` tokens. The caller has checked that enough blocks are
        available."""
        before = len(group.leader.blocks)
        grown = self._blocks.grow(group.leader.blocks, num_tokens)
        assert grown, "not enough blocks, although they were checked to be available"
        group.block_usage.new += len(group.leader.blocks) - before

    def allocate(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> Allocation | None:
        """Allocate blocks to hold `num_tokens` tokens, with a copy of the block to be written next if it is shared.

        The result belongs to the chunk, whose commit counts it. None, with nothing changed, if the pool is exhausted.
        """
        table, size = sequence.blocks, self._blocks.block_size
        index = sequence.computed // size
        shared = index < len(table) and self._pool.is_shared(table[index])
        if not shared and num_tokens <= len(table) * size:
            return NO_BLOCKS
        more = self._blocks.blocks_for(num_tokens) - len(table)
        if (shared + more) * self._blocks.layout.pages > self._pool.num_available:
            return None
        if shared:
            copy = self._blocks.make_writable(table, index)
            assert copy is not None, "not enough blocks, although they were checked to be available"
            builder.add_copies(sequence.key, (copy,))
        if more > 0:
            grown = self._blocks.grow(table, num_tokens)
            assert grown, "not enough blocks, although they were checked to be available"
        return Allocation(shared + max(0, more), int(shared))

    def allocate_for_drafts(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Extend a block table for draft tokens; return the number of blocks allocated. None, with nothing changed, if
        the pool is exhausted."""
        before = len(sequence.blocks)
        return len(sequence.blocks) - before if self._blocks.grow(sequence.blocks, num_tokens) else None

    def count(self, group: Group, allocated: Allocation) -> None:
        """Count the blocks of a committed chunk."""
        group.block_usage.new += allocated.new
        group.block_usage.copied += allocated.copied

    def commit(self, sequence: Sequence, end: int) -> None:
        """Record that keys and values are written up to `end`, cache the blocks that are full, and free the window
        pages that no later query sees."""
        size = self._blocks.block_size
        first, sequence.committed = sequence.committed // size, end
        for index in range(first, sequence.committed // size):
            self._blocks.cache_block(sequence.blocks[index], sequence.chain, sequence.tokens, index)
        if not self._blocks.layout.window_pages:
            return
        start = self._blocks.layout.kept_from(end)
        if start > sequence.window_start:
            self._blocks.trim(sequence.blocks, sequence.window_start, start)
            sequence.window_start = start

    def accept(self, group: Group, sequence: Sequence, tokens: list[int]) -> None:
        """Replace the draft tokens by the accepted ones and the bonus token.

        Keys and values of rejected tokens are overwritten later. Blocks that hold nothing else are freed.
        """
        sequence.tokens[sequence.committed :] = tokens
        sequence.computed = sequence.committed + len(tokens) - 1
        self.commit(sequence, sequence.computed)
        while len(sequence.blocks) > self._blocks.blocks_for(sequence.computed):
            self._pool.free(sequence.blocks.pop(), True)
            group.block_usage.new -= 1

    def fork(self, group: Group) -> None:
        """Share the blocks of the prompt, which the leader has computed, with all other samples."""
        leader = group.leader
        for sequence in group.sequences[1:]:
            sequence.blocks = self._blocks.fork(leader.blocks, leader.window_start)
            sequence.window_start = leader.window_start
            sequence.computed, sequence.committed = leader.computed, leader.committed
            sequence.chain = leader.chain.head(leader.num_prompt // self._blocks.block_size)
            self.states.fork(leader, sequence)
        group.forked = True

    def branch(self, group: Group, continuations: Iterable[Continuation]) -> None:
        """Replace the live beams by their continuations. The first continuation of a beam takes over its block table,
        the others share it. Beams without continuations are freed."""
        parents, beams, chosen = group.sequences, [], list(continuations)
        for index in set(range(len(parents))) - {one.beam for one in chosen}:  # first, since forks need their slots
            self.free_sequence(parents[index])
        left = dict(enumerate(parents))
        for continuation in chosen:
            beam = left.pop(continuation.beam, None) or self._fork_beam(parents[continuation.beam])
            beams.append((beam, continuation.token))
        for index, (beam, token) in enumerate(beams):
            beam.index = index
            beam.tokens.append(token)
        group.sequences = [beam for beam, _ in beams]

    def _fork_beam(self, parent: Sequence) -> Sequence:
        child = Sequence(parent.request, list(parent.tokens), parent.chain.copy())
        child.blocks, child.computed = self._blocks.fork(parent.blocks, parent.window_start), parent.computed
        child.committed, child.window_start = parent.committed, parent.window_start
        self.states.fork(parent, child)
        return child

    def swap_out(self, group: Group) -> bool:
        """Swap a group's blocks and states out to the host, if there is room and, with "auto", if moving them there and
        back is cheaper than computing them again. Return whether it was done."""
        if self._preemption == "recompute":
            return False
        blocks = {block for sequence in group.sequences for block in sequence.blocks}
        shared = group.leader.num_prompt * (len(group.sequences) - 1) if group.forked else 0
        tokens = sum(sequence.computed for sequence in group.sequences) - shared
        num_states = len({one.state_slot for one in group.sequences} - {None})
        moves = len(blocks) * self._costs.move + num_states * self._costs.move_state
        if self._preemption == "auto" and 2 * moves >= tokens * self._costs.token:
            return False
        if not self.states.can_swap_out(group.sequences):
            return False
        tables = self._blocks.offload.swap_out(
            [sequence.blocks for sequence in group.sequences], [sequence.window_start for sequence in group.sequences]
        )
        if tables is None:
            return False
        self.states.swap_out(group.sequences)
        for sequence, table in zip(group.sequences, tables, strict=True):
            sequence.host_blocks = table
        return True

    def swap_in(self, group: Group, builder: PlanBuilder) -> None:
        """Swap all blocks and states of a group back in."""
        tables, moves = self._blocks.offload.swap_in(
            [sequence.host_blocks for sequence in group.sequences],
            [sequence.window_start for sequence in group.sequences],
        )
        for sequence, table in zip(group.sequences, tables, strict=True):
            sequence.blocks = table
        self.states.swap_in(group.sequences)
        builder.add_moves_in(group.key, moves)
        builder.trace_moves(group, "swap_in", len(moves))
        group.block_usage.new += len(moves)
        group.block_usage.from_host += len(moves)

    def restart(self, group: Group) -> None:
        """Free all blocks of a group so that its tokens are computed again."""
        self.free(group)
        group.num_stored_scores = 0
        group.forked = len(group.sequences) == 1
        if group.beams:
            group.beams.candidates.clear()

    def free(self, group: Group) -> None:
        """Free all blocks of a group, on the device and on the host."""
        for sequence in group.sequences:
            self.free_sequence(sequence)
            sequence.computed = sequence.committed = sequence.window_start = 0

    def free_sequence(self, sequence: Sequence) -> None:
        self._blocks.free(sequence.blocks, sequence.window_start)
        self.states.release(sequence)
        if sequence.host_blocks:
            assert self._blocks.host
            self._blocks.host.free_table(sequence.host_blocks)
