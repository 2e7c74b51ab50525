"""Preemption: frees the blocks of running requests for others."""

from __future__ import annotations

from collections.abc import Callable

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.block_tables import BlockTables
from paged_backend.scheduling.plan_builder import PlanBuilder
from paged_backend.scheduling.registry import RequestRegistry
from paged_backend.scheduling.sequence import Group
from paged_backend.scheduling.stats import SchedulerCounters


class Preemption:
    """Moves running requests back to the waiting queue, swapped out or to be recomputed."""

    def __init__(
        self,
        requests: RequestRegistry,
        blocks: BlockManager,
        tables: BlockTables,
        counters: SchedulerCounters,
        clock: Callable[[], float],
    ):
        self._requests = requests
        self._blocks = blocks
        self._tables = tables
        self._counters = counters
        self._clock = clock

    def preempt(self, group: Group, builder: PlanBuilder) -> None:
        """Preempt a request with all of its samples. Their tokens are kept, so the output does not change: keys and
        values are moved to the host or computed again later."""
        assert not builder.in_flight
        copies, moves_in = builder.remove(group)
        # Blocks assigned in the step being planned are still empty, so they cannot be swapped out.
        swapped = not copies and not moves_in and self._tables.swap_out(group)
        self._blocks.finish_copies(copies)
        self._blocks.offload.finish_moves_in(moves_in, done=False)
        if swapped:
            self._counters.swapped += 1
            builder.trace_moves(group, "swap_out", len({block for one in group.sequences for block in one.host_blocks}))
        else:
            self._tables.restart(group)
            self._counters.recomputed += 1
        group.preemptions += 1
        group.preempted_at = self._clock()
        self._requests.requeue(group)
