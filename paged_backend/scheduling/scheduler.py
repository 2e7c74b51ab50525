"""Continuous batching with chunked prefill: plans each step and commits its results. Integers only, no tensors.

Scheduler           plans a step, commits it, ends requests
  RequestRegistry   registry.py: the waiting queue (waiting_queue.py), the running batch, ends of requests
  ChunkPlanner      chunk_planner.py: the next chunks of running requests, and their draft tokens
  MaskBudget        mask_budget.py: which structured outputs take part in a step
  BatchAdmission    batch_admission.py: which waiting requests are admitted; block demand is in block_demand.py
  Preemption        preemption.py: swaps out or recomputes running requests
  StepCommitter     step_commit.py: stores a step's results, ends sequences; beams are in beam_commit.py
  BlockTables       block_tables.py: the blocks of each sequence, over the BlockManager
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import GenerateRequest, TokenDelta
from paged_backend.scheduling.accounts import Accounts
from paged_backend.scheduling.adapter_slots import AdapterSlots
from paged_backend.scheduling.batch_admission import BatchAdmission
from paged_backend.scheduling.beam_commit import BeamCommitter
from paged_backend.scheduling.block_demand import BlockDemand
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.block_tables import BlockTables
from paged_backend.scheduling.chunk_planner import ChunkPlanner
from paged_backend.scheduling.mask_budget import MaskBudget
from paged_backend.scheduling.pins import Pins
from paged_backend.scheduling.plan import Costs, Plan
from paged_backend.scheduling.plan_builder import PlanBuilder
from paged_backend.scheduling.preemption import Preemption
from paged_backend.scheduling.prefill_budget import PrefillBudget
from paged_backend.scheduling.registry import RequestRegistry
from paged_backend.scheduling.sequence import Group
from paged_backend.scheduling.speculation import Proposer
from paged_backend.scheduling.state_slots import StateSlots, num_draft_slots
from paged_backend.scheduling.stats import SchedulerCounters, SchedulerStats
from paged_backend.scheduling.step_commit import StepCommitter
from paged_backend.scheduling.step_result import StepResult


class Scheduler:
    """Decides what each step computes. `schedule` plans a step and `commit` stores its results, both on the engine
    thread.

    A step may be planned while the one before is in flight. Tokens that are still to be sampled then stand in the
    sequences as placeholders. If the sequence has ended meanwhile, one row is computed for nothing. No request is
    preempted while a step is in flight: a request that does not fit waits for the commit. With several stages, as many
    steps are in flight, each with its share of the sequences, and none is planned whose last token is a placeholder.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        costs: Costs | None = None,
        preemption: str = "auto",
        session_blocks: int = 0,
        proposer: Proposer | None = None,
        max_draft_tokens: int = 0,
        prefill_budget: PrefillBudget | None = None,
        mask_budget: MaskBudget | None = None,
        max_loras: int = 0,
        fair_tenants: bool = False,
        state_slots: int = 0,
        host_state_slots: int = 0,
        stages: int = 1,
        whole_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """preemption: "swap", "recompute", or "auto" for the cheaper one. session_blocks: maximum blocks pinned for
        sessions between turns. max_draft_tokens: maximum per sequence and step. prefill_budget: limits the prompt
        tokens of a step that decodes. mask_budget: limits the time for masks. max_loras: maximum adapters on
        the device. fair_tenants: within a priority, admit the tenant that was served the fewest tokens instead of first
        come, first served. state_slots: slots for the states of recurrent layers, at least max_num_seqs and
        `num_draft_slots`; 0: the model has none. host_state_slots: slots on the host for the states of swapped-out
        requests. stages: pipeline stages. whole_prompts: compute each prompt in one step; prompts have at most
        max_num_batched_tokens. clock: returns seconds.
        """
        assert max_num_batched_tokens >= max_num_seqs >= 1
        self.blocks = blocks
        self.costs = costs or Costs()
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.slots = AdapterSlots(max_loras)
        self.admitted: list[int] = []  # keys of requests that the last `schedule` admitted for the first time
        self._counters = SchedulerCounters()
        self._accounts = Accounts(by_tenant=fair_tenants)
        self.states = StateSlots(
            state_slots,
            max_num_seqs,
            contents=blocks.cache.contents,
            block_size=blocks.block_size,
            caching=blocks.caching,
            num_host_slots=host_state_slots,
            num_draft_slots=num_draft_slots(max_num_seqs, max_num_batched_tokens, max_draft_tokens),
        )
        self.pins = Pins(blocks, session_blocks, self.states)
        self._tables = BlockTables(blocks, self.costs, preemption, self.states)
        self._requests = RequestRegistry(blocks, self._tables, self.slots, self.pins, self._accounts)
        self._preemption = Preemption(self._requests, blocks, self._tables, self._counters, clock)
        masks = mask_budget or MaskBudget()
        self._planner = ChunkPlanner(
            self._requests, self._tables, self.pins, self._preemption, masks, self._counters, stages
        )
        self._admission = BatchAdmission(
            self._requests,
            blocks,
            self._tables,
            BlockDemand(blocks, self.costs, self.states),
            self.slots,
            self.pins,
            self._accounts,
            self._planner,
            self._preemption,
            masks,
            self._counters,
            clock,
            max_num_seqs=max_num_seqs,
            whole_prompts=whole_prompts,
        )
        self._beams = BeamCommitter(self._requests, self._tables)
        self._committer = StepCommitter(self._requests, self._tables, self._beams, self._counters)
        self._proposer = proposer if max_draft_tokens else None
        self._max_draft_tokens = max_draft_tokens
        self._prefill_budget = prefill_budget
        self._clock = clock
        self.stages = stages
        self._in_flight = 0  # plans that were neither committed nor failed
        self._blocked = False  # whether a request waits for a commit
        self._committed_at = 0.0  # time of the last commit
        self._prefill = (0, 0)  # requests that prefilled in the last step, and their tokens

    @property
    def has_work(self) -> bool:
        return bool(self._requests.running or self._requests.waiting)

    @property
    def stats(self) -> SchedulerStats:
        blocks, pool, host, counters = self.blocks, self.blocks.pool, self.blocks.host, self._counters
        prefill = self._prefill if self._requests.running else (0, 0)
        return SchedulerStats(
            running=len(self._requests.running),
            waiting=len(self._requests.waiting),
            blocks_total=blocks.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            blocks_shared=pool.num_shared,
            blocks_pinned=self.pins.num_blocks,
            block_size=blocks.block_size,
            host_total=host.num_blocks if host else 0,
            host_cached=host.num_cached if host else 0,
            host_used=host.num_used if host else 0,
            recomputed=counters.recomputed,
            swapped=counters.swapped,
            queried_tokens=counters.queried_tokens,
            cached_tokens=counters.cached_tokens,
            host_tokens=counters.host_tokens,
            evictions=pool.num_evictions,
            copies=blocks.num_copies,
            moves_out=blocks.offload.num_moves_out,
            moves_in=blocks.offload.num_moves_in,
            draft_tokens=counters.draft_tokens,
            accepted_tokens=counters.accepted_tokens,
            paused=self._requests.num_preempted,
            steps=counters.steps,
            context_requests=prefill[0],
            context_tokens=prefill[1],
            state_slots_total=self.states.num_slots,
            state_slots_used=self.states.num_held,
            state_checkpoints=self.states.num_checkpoints,
            host_state_slots_total=self.states.num_host_slots,
            host_state_slots_used=self.states.num_host_used,
            compute_seconds=self.costs.token * blocks.block_size,
            host_seconds=self.costs.move,
        )

    @property
    def running(self) -> tuple[Group, ...]:
        """The running requests, by priority, then by first admission."""
        return tuple(self._requests.running.values())

    @property
    def waiting(self) -> tuple[Group, ...]:
        """The waiting requests, in no particular order."""
        return tuple(self._requests.waiting)

    @property
    def empty_slots(self) -> int:
        """Slots in use that hold no token. Between steps these are the rest of each sequence's last block."""
        groups = self._requests.running.values()
        last = {one.blocks[-1]: one for group in groups for one in group.sequences if one.blocks}
        return sum(len(one.blocks) * self.blocks.block_size - one.computed for one in last.values())

    @property
    def needs_results(self) -> bool:
        """True if the steps in flight must be committed before the next one is planned, since requests depend on it."""
        if self._blocked or self.stages > 1:  # with stages, each sequence waits for its own results
            return self._blocked
        running = self._requests.running.values()  # beams, guides and draft tokens depend on results
        return self._proposer is not None or any(group.needs_previous_result for group in running)

    def add(self, request: GenerateRequest) -> None:
        """Add a new request to the waiting queue."""
        self._requests.add(request)

    def has_request(self, key: int) -> bool:
        """Return whether a request waits or runs."""
        return self._requests.find(key) is not None

    def abort(self, key: int) -> bool:
        """Remove a request and free its blocks at once. False if it has ended already."""
        group = self._requests.find(key)
        if group is None:
            return False
        self._requests.abort(group)
        return True

    def end(self, key: int, index: int) -> bool:
        """End one sample, whose text met a stop string, and free its blocks at once. False if it has ended already."""
        group = self._requests.find(key)
        if group is None:
            return False
        if group.beams:  # beam outputs are not sequences: the search continues until all have ended
            group.beams.ended.add(index)
            return len(group.beams.ended) < group.request.sampling.n or self.abort(key)
        sequence = next((one for one in group.sequences if one.index == index), None)
        if sequence is None:
            return False
        self._requests.finish_sequence(group, sequence)
        return True

    def end_all(self, key: int) -> bool:
        """End every sample of a request. Its blocks are freed, or pinned for its session. False if it has ended."""
        group = self._requests.find(key)
        if group is None or group.beams:
            return self.abort(key)
        self._requests.finish_all(group)
        return True

    def expire(self, key: int) -> list[TokenDelta]:
        """End a beam search, and return the best outputs that it has. Empty if it has ended already."""
        group = self._requests.find(key)
        return self._beams.expire(group) if group else []

    def schedule(self) -> Plan | None:
        """Plan the next step. None if nothing can run. One step may be in flight, or one for each other stage."""
        assert self._in_flight <= max(1, self.stages - 1)
        builder = PlanBuilder(self.max_num_batched_tokens, self._clock(), in_flight=self._in_flight > 0)
        preemptions = self._counters.preemptions
        decoding, prefilling = self._planner.split(in_flight=builder.in_flight)
        self._planner.extend_all(decoding, builder)
        decodes = bool(builder.chunks)
        withheld = max(0, builder.budget - self._prefill_budget.tokens) if self._prefill_budget and decodes else 0
        builder.budget -= withheld
        left = builder.budget
        self._planner.extend_all(prefilling, builder)
        running = self._requests.running
        generating = len(running) - len({group.key for group, _ in prefilling} & running.keys())
        if self._counters.preemptions == preemptions:
            self._admission.admit(builder)
        prefill_tokens = max(0, left - builder.budget)
        self._prefill = len(self._requests.running) - generating, prefill_tokens
        builder.prefill_tokens = prefill_tokens if decodes else None
        builder.budget += withheld  # the limit is for prompt tokens, not for draft tokens
        if self._proposer:
            self._planner.add_draft_tokens(builder, self._proposer, self._max_draft_tokens)
        self.admitted, self._blocked = builder.admitted, builder.blocked
        plan = builder.build(self.blocks, self.slots, self.states)
        if plan is not None:
            self._advance(plan)
        return plan

    def _advance(self, plan: Plan) -> None:
        """Count the plan's tokens as computed, and append placeholders for the tokens to sample."""
        self._in_flight += 1
        running = self._requests.running
        if self._accounts.by_tenant:
            for chunk in plan.chunks:
                running[chunk.sequence.key].account.served_tokens += len(chunk.sampled_sequences)
        rows = 0
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.length
            if sequence.computed == sequence.num_prompt:
                group = running[sequence.request.key]
                if not group.forked:
                    self._tables.fork(group)
            if chunk.draft_tokens:
                sequence.tokens.extend(chunk.draft_tokens)
                rows += len(chunk.draft_tokens)
            is_beam = sequence.request.sampling.beam_width > 1
            for sequence in chunk.sampled_sequences:
                rows += 1
                if not is_beam:
                    sequence.tokens.append(-rows)

    def commit(self, plan: Plan, result: StepResult) -> list[TokenDelta]:
        """Commit the results of the oldest step in flight, and return the new tokens and finished samples."""
        self._in_flight -= 1
        self._counters.steps += 1
        if self._prefill_budget:
            last, self._committed_at = self._committed_at, self._clock()
            if plan.prefill_tokens is not None:
                started = plan.planned_at if self.stages > 1 else max(last, plan.planned_at)
                self._prefill_budget.record_step(plan.prefill_tokens, self._committed_at - started)
        self.blocks.offload.finish_moves_out(plan.moves_out)
        self.blocks.offload.finish_moves_in(plan.moves_in)
        self.blocks.finish_copies(plan.copies)
        self.states.finish(plan.states)
        deltas = self._committer.commit(plan, result)
        self.states.free_draft_slots()
        return deltas

    def fail(self, plan: Plan, message: str) -> list[TokenDelta]:
        """Fail the requests of a step that could not run. Blocks that it wrote or moved are not cached."""
        self._in_flight -= 1
        self.blocks.offload.finish_moves_out(plan.moves_out, done=False)
        self.blocks.offload.finish_moves_in(plan.moves_in, done=False)
        self.blocks.finish_copies(plan.copies)
        lost = {move.target for move in plan.moves_out}
        lost_states = {move.target for move in plan.states.moves_out}
        for group in self._requests.waiting:
            if any(lost.intersection(one.host_blocks) or one.host_state_slot in lost_states for one in group.sequences):
                self._tables.restart(group)
        error = RequestError(ErrorCode.INTERNAL, message)
        keys = dict.fromkeys(chunk.sequence.key for chunk in plan.chunks)
        ended = [TokenDelta(key, error=error) for key in keys if self.abort(key)]
        self.states.finish(plan.states, done=False)  # last: the states of these requests have not arrived
        self.states.free_draft_slots()
        self.slots.fail(plan.loads)
        return ended

    def clear_cache(self) -> None:
        """Forget all contents of the pool and of the state slots, also of sessions. Called while no request is open."""
        assert not self.has_work and not self._in_flight
        while self.pins.drop_oldest():
            pass
        self.blocks.offload.clear()
        self.blocks.cache.clear()
        self.states.clear()

    def check(self) -> None:
        """Assert every invariant of the scheduler and the pools. For tests and idle moments."""
        assert sum(group.num_seqs for group in self._requests.running.values()) <= self.max_num_seqs
        for sequence in self._requests.sequences():
            assert 0 <= sequence.committed <= sequence.computed <= len(sequence.tokens)
            assert not sequence.ended
            guides = sequence.request.guides
            assert not guides or guides[sequence.index].seen <= sequence.generated, "a mask of tokens that do not exist"
            if not self._in_flight:
                assert sequence.committed == sequence.computed, "computed, but not committed"
                assert min(sequence.tokens) >= 0, "a placeholder is left"
            assert sequence.computed <= len(sequence.blocks or sequence.host_blocks) * self.blocks.block_size
        self._requests.check()
        self.states.check(self._requests.sequences())
