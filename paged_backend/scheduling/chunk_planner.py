"""Plans the next chunks of running requests: decode, prefill and draft tokens."""

from __future__ import annotations

from paged_backend.scheduling.block_tables import BlockTables
from paged_backend.scheduling.mask_budget import MaskBudget
from paged_backend.scheduling.pins import Pins
from paged_backend.scheduling.plan_builder import PlanBuilder
from paged_backend.scheduling.preemption import Preemption
from paged_backend.scheduling.registry import RequestRegistry
from paged_backend.scheduling.sequence import Group, Sequence
from paged_backend.scheduling.speculation import Proposer
from paged_backend.scheduling.stats import SchedulerCounters


class ChunkPlanner:
    """Adds chunks of running sequences to a plan, and finds the blocks for them."""

    def __init__(
        self,
        requests: RequestRegistry,
        tables: BlockTables,
        pins: Pins,
        preemption: Preemption,
        masks: MaskBudget,
        counters: SchedulerCounters,
        stages: int = 1,
    ):
        """stages: number of pipeline stages; 1 without a pipeline."""
        self._requests = requests
        self._tables = tables
        self._pins = pins
        self._preemption = preemption
        self._masks = masks
        self._counters = counters
        self._stages = stages

    def split(self, *, in_flight: bool) -> tuple[list[tuple[Group, Sequence]], list[tuple[Group, Sequence]]]:
        """Return the sequences that decode and those that prefill, each in scheduling order.

        Decode is planned first, so that a long prompt hardly delays running streams. Sequences for whose masks there is
        no time are left out. In a pipeline, sequences with a placeholder wait for its token, and at most an equal share
        of those that decode is returned for each stage.
        """
        self._masks.renew()
        self._masks.prepare(self._requests.running.values())
        decoding: list[tuple[Group, Sequence]] = []
        prefilling: list[tuple[Group, Sequence]] = []
        waiting = 0  # sequences that decode in other steps of the pipeline
        for group in self._requests.running.values():  # iterates in scheduling order, which `check` asserts
            for sequence in group.active:
                if self._stages > 1 and sequence.tokens[-1] < 0:
                    waiting += 1
                elif not (sequence.needs_mask or (in_flight and sequence.has_all_tokens)):
                    is_decode = len(sequence.tokens) - sequence.computed == 1
                    (decoding if is_decode else prefilling).append((group, sequence))
        if self._stages > 1:
            del decoding[-(-(len(decoding) + waiting) // self._stages) :]
        return decoding, prefilling

    def extend_all(self, ordered: list[tuple[Group, Sequence]], builder: PlanBuilder) -> None:
        """Plan the next chunk of each sequence that still runs."""
        running = self._requests.running
        for group, sequence in ordered:
            if group.key in running:  # false if an earlier sequence has preempted it
                self.extend(group, sequence, builder)

    def extend(self, group: Group, sequence: Sequence, builder: PlanBuilder) -> None:
        """Plan the sequence's next chunk. If the pool is exhausted, unpin idle sessions and then preempt the last
        running requests in scheduling order, possibly this one."""
        end = len(sequence.tokens) if group.forked else group.prefill_len
        length = min(end - sequence.computed, builder.budget)
        if group.scores_prompt:
            length = builder.limit_scored(group, sequence.computed, length)
        if length == 0:
            return
        length = self._tables.states.chunk_length(sequence.computed, length, end)
        while (allocated := self._tables.allocate(sequence, sequence.computed + length, builder)) is None:
            if self._pins.drop_oldest():
                continue
            if builder.in_flight:
                builder.blocked = True
                return
            preempted = self._requests.last_running
            self._preemption.preempt(preempted, builder)
            if preempted is group:
                return
        builder.add_chunk(group, sequence, length, allocated)

    def add_draft_tokens(self, builder: PlanBuilder, propose: Proposer, limit: int) -> None:
        """Add draft tokens to decode chunks, as far as the step's budget and the pool allow. limit: maximum per
        sequence."""
        for chunk in builder.chunks:
            sequence = chunk.sequence
            group = self._requests.running[sequence.key]
            if chunk.sampled_sequences != (sequence,) or chunk.length > 1 or not sequence.generated:
                continue
            if group.needs_previous_result:
                continue
            left = sequence.request.sampling.max_tokens - sequence.generated - 1
            most = min(limit, builder.budget, left)
            tokens = propose(sequence, most) if most > 0 else []
            if not tokens:
                continue
            num_blocks = self._tables.allocate_for_drafts(sequence, chunk.start + 1 + len(tokens))
            if num_blocks is not None:
                chunk.add_draft_tokens(tokens, num_blocks, self._tables.states.take_draft_slots(len(tokens)))
                builder.budget -= len(tokens)
                self._counters.draft_tokens += len(tokens)
