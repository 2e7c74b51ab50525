"""Collects the chunks, copies and moves of a step while the scheduler plans it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from paged_backend.scheduling.adapter_slots import AdapterSlots
from paged_backend.scheduling.block_manager import BlockManager, Copy
from paged_backend.scheduling.host_offload import BlockTransfer
from paged_backend.scheduling.plan import Allocation, Chunk, Plan, TracedWork
from paged_backend.scheduling.sequence import Group, Sequence
from paged_backend.scheduling.state_slots import StateSlots

MAX_SCORED = 256  # prompt positions with log probabilities in a step: each needs the logits of the whole vocabulary


class PlanBuilder:
    """Builds a plan and keeps the remaining budgets of the step."""

    def __init__(self, budget: int, planned_at: float, *, in_flight: bool, max_scored: int = MAX_SCORED):
        """budget: tokens of the step. in_flight: whether another step is in flight; then no request may be
        preempted."""
        self.budget = budget
        self.scored_budget = max_scored  # prompt positions that may still get log probabilities
        self.planned_at = planned_at
        self.in_flight = in_flight
        self.blocked = False  # whether a request waits for the commit of the step in flight
        self.prefill_tokens: int | None = None
        self.chunks: list[Chunk] = []
        self.admitted: list[int] = []
        self._has_traces = False  # whether any chunk is of a traced request
        self._moved: list[TracedWork] = []
        self._has_prompt_outputs = False
        self._copies: dict[int, list[Copy]] = {}  # copies by request key
        self._moves_in: dict[int, list[BlockTransfer]] = {}  # moves by request key

    def limit_scored(self, group: Group, start: int, length: int) -> int:
        """Return how many of the `length` prompt tokens from `start` fit into the limit of scored positions."""
        unscored = group.unscored(start, start + length)
        return length if len(unscored) <= self.scored_budget else unscored.start + self.scored_budget - start

    def add_chunk(self, group: Group, sequence: Sequence, length: int, allocated: Allocation) -> None:
        """Add the next `length` tokens of a sequence."""
        start = sequence.computed
        end = start + length
        is_last = end == len(sequence.tokens)
        sampled: tuple[Sequence, ...] = ()
        if is_last and group.has_output:
            sampled = (sequence,) if group.forked else tuple(group.sequences)
        forks = () if group.forked or end != sequence.num_prompt else tuple(group.sequences[1:])
        self.budget -= length
        self._has_traces |= group.request.trace is not None
        if group.scores_prompt or not group.has_output:
            scored = group.unscored(start, end)
            self.scored_budget -= len(scored)
            self._has_prompt_outputs = True
            ends_request = is_last and not group.has_output
            self.chunks.append(Chunk(sequence, start, length, sampled, allocated, forks, (), (), scored, ends_request))
        else:
            self.chunks.append(Chunk(sequence, start, length, sampled, allocated, forks))

    def trace_moves(self, group: Group, name: str, num_blocks: int) -> None:
        """Record that this step moves blocks of a request, if it is traced."""
        if trace := group.request.trace:
            self._moved.append(TracedWork(trace, name, {"paged_llm.blocks": num_blocks}))

    def add_copies(self, key: int, copies: Iterable[Copy]) -> None:
        """Add the copies that a request needs before its chunk."""
        self._copies.setdefault(key, []).extend(copies)

    def add_moves_in(self, key: int, moves: Iterable[BlockTransfer]) -> None:
        """Add the moves from the host that a request needs before its chunk."""
        self._moves_in.setdefault(key, []).extend(moves)

    def remove(self, group: Group) -> tuple[list[Copy], list[BlockTransfer]]:
        """Remove a request, and return its copies and moves."""
        removed = [chunk for chunk in self.chunks if chunk.sequence.request is group.request]
        self.budget += sum(chunk.length for chunk in removed)
        self.scored_budget += sum(len(chunk.scored) for chunk in removed)
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence.request is not group.request]
        return self._copies.pop(group.key, []), self._moves_in.pop(group.key, [])

    def build(self, blocks: BlockManager, slots: AdapterSlots, states: StateSlots) -> Plan | None:
        """Return the plan with all pending moves, adapter loads and copies of states; None if it has no chunk."""
        if not self.chunks:
            return None
        return Plan(
            chunks=tuple(self.chunks),
            moves_out=blocks.offload.take_moves_out(),
            moves_in=tuple(chain.from_iterable(self._moves_in.values())),
            copies=tuple(chain.from_iterable(self._copies.values())),
            admitted=tuple(self.admitted),
            planned_at=self.planned_at,
            prefill_tokens=self.prefill_tokens,
            loads=slots.take_loads(),
            adapters=slots.slots_of(chunk.sequence.request for chunk in self.chunks),
            has_prompt_outputs=self._has_prompt_outputs,
            traced=(*self._moved, *self._traced_chunks()),
            states=states.prepare(chunk.sequence for chunk in self.chunks),
        )

    def _traced_chunks(self) -> Iterator[TracedWork]:
        for chunk in self.chunks if self._has_traces else ():
            trace = chunk.sequence.request.trace
            if trace and not chunk.is_decode:
                attributes = {"paged_llm.first_token": chunk.start, "paged_llm.tokens": chunk.length}
                yield TracedWork(trace, "prefill", attributes)
