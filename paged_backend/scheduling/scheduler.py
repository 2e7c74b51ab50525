"""Continuous batching with chunked prefill: plans each step and commits its results. Integers only, no tensors.

schedule    decode chunks of running requests, then their prefill chunks, then waiting requests, then draft tokens;
            requests of the lowest priority are preempted when blocks run out
commit      new tokens, full blocks to the prefix cache, ends of sequences and requests

The scheduler owns the requests, the `BlockManager` their blocks. What only orders or limits has modules of its own:
waiting_queue.py (who is next), budgets.py (how much), adapter_slots.py, speculation.py, beam_search.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import FinishReason, GenerateRequest, HiddenState, TokenDelta
from paged_backend.api.token_outputs import NOTHING, Values
from paged_backend.kv.blocks import NO_BLOCKS, NO_HIT, BlockManager, Hit, Pins
from paged_backend.kv.content import BlockScores
from paged_backend.kv.pages import NULL
from paged_backend.kv.sequence import Sequence
from paged_backend.scheduling.adapter_slots import AdapterSlots
from paged_backend.scheduling.beam_search import Continuation
from paged_backend.scheduling.budgets import MaskBudget, PrefillBudget
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Costs, Plan, PlanBuilder, StepResult
from paged_backend.scheduling.speculation import Proposer
from paged_backend.scheduling.stats import SchedulerCounters, Stats
from paged_backend.scheduling.waiting_queue import Accounts, WaitingQueue


@dataclass
class _Room:
    """What is left for waiting requests in this step."""

    num_seqs: int
    reserved_pages: int  # pages that running requests still need for their tokens


class _Demand(NamedTuple):
    """What a waiting request needs to be admitted."""

    pages: int  # must be available
    hit: Hit


class Scheduler:
    """Decides what each step computes. `schedule` plans a step and `commit` stores its results, both on the engine
    thread.

    A step may be planned while the one before is in flight. Tokens that are still to be sampled then stand in the
    sequences as placeholders. If the sequence has ended meanwhile, one row is computed for nothing. No request is
    preempted while a step is in flight: a request that does not fit waits for the commit. With several pipeline stages,
    as many steps are in flight, each with its share of the sequences; a sequence whose last token is a placeholder is
    not planned.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        costs: Costs | None = None,
        preemption: str = "auto",
        session_pages: int = 0,
        proposer: Proposer | None = None,
        max_draft_tokens: int = 0,
        prefill_budget: PrefillBudget | None = None,
        mask_budget: MaskBudget | None = None,
        max_loras: int = 0,
        fair_tenants: bool = False,
        stages: int = 1,
        whole_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """preemption: "swap", "recompute", or "auto" for the cheaper one. session_pages: maximum pages pinned for
        sessions between turns. max_draft_tokens: maximum per sequence and step. prefill_budget: limits the prompt
        tokens of a step that decodes. mask_budget: limits the time for masks. max_loras: maximum adapters on
        the device. fair_tenants: within a priority, admit the tenant that was served the fewest tokens instead of first
        come, first served. stages: pipeline stages. whole_prompts: compute each prompt in one step, because its tokens
        attend to later ones; prompts have at most max_num_batched_tokens. clock: returns seconds.
        """
        assert max_num_batched_tokens >= max_num_seqs >= 1
        self.blocks = blocks
        self.costs = costs or Costs()
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.stages = stages
        self.slots = AdapterSlots(max_loras)
        self.pins = Pins(blocks, session_pages)
        self.admitted: list[int] = []  # keys of requests that the last `schedule` admitted for the first time
        self._states = blocks.states
        self._preemption = preemption
        self._proposer = proposer if max_draft_tokens else None
        self._max_draft_tokens = max_draft_tokens
        self._prefill_budget = prefill_budget
        self._masks = mask_budget or MaskBudget()
        self._whole_prompts = whole_prompts
        self._clock = clock

        self._waiting = WaitingQueue()
        self._running: dict[int, Group] = {}  # running requests by key, in scheduling order
        self._accounts = Accounts(by_tenant=fair_tenants)
        self._admission_indices = count()
        self._num_preempted = 0  # waiting requests that were preempted
        self._in_flight = 0  # plans that were neither committed nor failed
        self._blocked = False  # whether a request waits for a commit
        self._committed_at = 0.0  # time of the last commit
        self._prefill = (0, 0)  # requests that prefilled in the last step, and their prompt tokens
        self._counters = SchedulerCounters()

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_open(self) -> int:
        """The number of requests that wait or run."""
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> tuple[Group, ...]:
        """The running requests, by priority, then by first admission."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> tuple[Group, ...]:
        """The waiting requests, in no particular order."""
        return tuple(self._waiting)

    @property
    def needs_results(self) -> bool:
        """True if the steps in flight must be committed before the next one is planned, since requests depend on it."""
        if self._blocked or self.stages > 1:  # with stages, each sequence waits for its own results
            return self._blocked
        running = self._running.values()  # beams, guides and draft tokens depend on results
        return self._proposer is not None or any(group.needs_previous_result for group in running)

    def add(self, request: GenerateRequest) -> None:
        """Add a new request to the waiting queue."""
        self._waiting.add(Group(request, self._accounts.open_request(request), len(self.blocks.layout.kinds)))

    def has_request(self, key: int) -> bool:
        """Return whether a request waits or runs."""
        return self._find(key) is not None

    def abort(self, key: int) -> bool:
        """Remove a request and free its blocks at once. False if it has ended already."""
        group = self._find(key)
        if group is None:
            return False
        self._abort(group)
        return True

    def end(self, key: int, index: int) -> bool:
        """End one sample, whose text met a stop string, and free its blocks at once. False if it has ended already."""
        group = self._find(key)
        if group is None:
            return False
        if group.beams:  # beam outputs are not sequences: the search continues until all have ended
            group.beams.ended.add(index)
            return len(group.beams.ended) < group.request.sampling.n or self.abort(key)
        sequence = next((sequence for sequence in group.sequences if sequence.index == index), None)
        if sequence is None:
            return False
        self._finish(group, sequence)
        return True

    def end_all(self, key: int) -> bool:
        """End every sample of a request. Its blocks are freed, or pinned for its session. False if it has ended."""
        group = self._find(key)
        if group is None or group.beams:
            return self.abort(key)
        self._finish_all(group)
        return True

    def expire(self, key: int) -> list[TokenDelta]:
        """End a beam search, and return the best outputs that it has. Empty if it has ended already."""
        group = self._find(key)
        if group is None:
            return []
        assert group.beams
        group.beams.search.cut([sequence.output for sequence in group.sequences])
        self._abort(group)
        return _beam_outputs(group)

    def _find(self, key: int) -> Group | None:
        return self._running.get(key) or self._waiting.get(key)

    def _abort(self, group: Group) -> None:
        """Remove a request, and free its blocks."""
        self._remove(group)
        for sequence in group.sequences:
            self.blocks.restart(sequence)

    def _finish(self, group: Group, sequence: Sequence) -> None:
        """End one sample, and the request with its last one. Pin the full blocks for the request's session, if it has
        one, and free the others."""
        session = group.request.session
        if session is not None and sequence.num_blocks and not sequence.on_host:
            self.pins.pin_and_free(session, sequence)
        else:
            self.blocks.free(sequence)
        sequence.ended = True
        group.sequences.remove(sequence)
        if not group.sequences:
            self._remove(group)

    def _finish_all(self, group: Group) -> None:
        for sequence in list(group.sequences):
            self._finish(group, sequence)

    def _fail(self, group: Group, error: RequestError) -> TokenDelta:
        """End all samples of a request with an error. After an internal error, its blocks are not cached."""
        if error.code is ErrorCode.INTERNAL:
            for sequence in group.sequences:
                self.blocks.invalidate(sequence)
        self._abort(group)
        for sequence in group.sequences:
            sequence.ended = True
        return TokenDelta(group.key, error=error)

    def _remove(self, group: Group) -> None:
        """Remove a request that has ended, whose blocks the caller frees."""
        if group.key in self._running:
            self._stop_running(group)
        else:
            self._waiting.remove(group)
            self._num_preempted -= group.admission_index is not None
        self._accounts.close_request(group.account, was_admitted=group.admission_index is not None)

    def _stop_running(self, group: Group) -> None:
        del self._running[group.key]
        if group.request.adapter:
            self.slots.release(group.request.adapter)

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """Plan the next step. None if nothing can run. One step may be in flight, or one for each other stage."""
        assert self._in_flight <= max(1, self.stages - 1)
        step = PlanBuilder(self.max_num_batched_tokens, self._clock(), in_flight=self._in_flight > 0)
        preemptions = self._counters.preemptions
        decoding, prefilling = self._split(in_flight=step.in_flight)
        self._plan_chunks(decoding, step)
        decodes = bool(step.chunks)
        withheld = max(0, step.budget - self._prefill_budget.tokens) if self._prefill_budget and decodes else 0
        step.budget -= withheld
        left = step.budget
        self._plan_chunks(prefilling, step)
        generating = len(self._running) - len({group.key for group, _ in prefilling} & self._running.keys())
        if self._counters.preemptions == preemptions:
            self._admit_waiting(step)
        prefill_tokens = max(0, left - step.budget)
        self._prefill = len(self._running) - generating, prefill_tokens
        step.prefill_tokens = prefill_tokens if decodes else None
        step.budget += withheld  # the limit is for prompt tokens, not for draft tokens
        if self._proposer:
            self._add_draft_tokens(step, self._proposer)
        self.admitted, self._blocked = step.admitted, step.blocked
        plan = step.build(self.blocks, self.slots)
        if plan is not None:
            self._advance(plan)
        return plan

    def _split(self, *, in_flight: bool) -> tuple[list[tuple[Group, Sequence]], list[tuple[Group, Sequence]]]:
        """Return the sequences that decode and those that prefill, each in scheduling order.

        Decode is planned first, so a long prompt hardly delays running streams. A sequence is left out if there is no
        time for its mask, or while a token that it waits for decides whether the next one is forced. In a pipeline, a
        sequence with a placeholder waits for its token, and each stage gets at most an equal share of the decoding
        sequences.
        """
        self._masks.renew()
        self._masks.prepare(self._running.values())
        decoding: list[tuple[Group, Sequence]] = []
        prefilling: list[tuple[Group, Sequence]] = []
        waiting = 0  # sequences that decode in other steps of the pipeline
        for group in self._running.values():  # iterates in scheduling order, which `check` asserts
            for sequence in group.active:
                if self.stages > 1 and sequence.tokens[-1] < 0:
                    waiting += 1
                elif not (sequence.needs_mask or sequence.awaits_token or (in_flight and sequence.has_all_tokens)):
                    is_decode = len(sequence.tokens) - sequence.computed == 1
                    (decoding if is_decode else prefilling).append((group, sequence))
        if self.stages > 1:
            del decoding[-(-(len(decoding) + waiting) // self.stages) :]
        return decoding, prefilling

    def _plan_chunks(self, ordered: list[tuple[Group, Sequence]], step: PlanBuilder) -> None:
        """Plan the next chunk of each sequence that still runs."""
        for group, sequence in ordered:
            if group.key in self._running:  # false if an earlier sequence has preempted it
                self._plan_chunk(group, sequence, step)

    def _plan_chunk(self, group: Group, sequence: Sequence, step: PlanBuilder) -> None:
        """Plan the sequence's next chunk. If the pool is exhausted, unpin idle sessions and then preempt the last
        running requests in scheduling order, possibly this one."""
        end = len(sequence.tokens) if group.forked else group.prefill_len
        length = min(end - sequence.computed, step.budget)
        if group.scores_prompt:
            length = step.limit_scored(group, sequence.computed, length)
        if length == 0:
            return
        if self._states:
            length = self._states.chunk_length(sequence.computed, length, end)
        while (allocated := self.blocks.extend(sequence, sequence.computed + length)) is None:
            if self.pins.drop_oldest():
                continue
            if step.in_flight:
                step.blocked = True
                return
            preempted = self._last_running
            self._preempt(preempted, step)
            if preempted is group:
                return
        step.add_chunk(group, sequence, length, allocated)

    def _add_draft_tokens(self, step: PlanBuilder, propose: Proposer) -> None:
        """Add draft tokens to decode chunks, as far as the step's budget and the pool allow."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            group = self._running[sequence.key]
            if chunk.sampled_sequences != (sequence,) or chunk.length > 1 or not sequence.generated:
                continue
            if group.needs_previous_result:
                continue
            left = sequence.request.sampling.max_tokens - sequence.generated - 1
            most = min(self._max_draft_tokens, step.budget, left)
            if self._states:
                most = min(most, self._states.num_affordable)
            tokens = propose(sequence, most) if most > 0 else []
            if not tokens:
                continue
            allocated = self.blocks.extend(sequence, chunk.start + 1 + len(tokens), num_states=len(tokens))
            if allocated is not None:
                states = self._states.take_drafts(len(tokens)) if self._states else ()
                chunk.add_draft_tokens(tokens, allocated, states)
                step.budget -= len(tokens)
                self._counters.draft_tokens += len(tokens)

    def _advance(self, plan: Plan) -> None:
        """Count the plan's tokens as computed, and append placeholders for the tokens to sample."""
        self._in_flight += 1
        if self._accounts.by_tenant:
            for chunk in plan.chunks:
                self._running[chunk.sequence.key].account.served_tokens += len(chunk.sampled_sequences)
        rows = 0
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.length
            if sequence.computed == sequence.num_prompt:
                group = self._running[sequence.key]
                if not group.forked:
                    for sample in group.sequences[1:]:
                        self.blocks.fork(sequence, sample)
                    group.forked = True
            if chunk.draft_tokens:
                sequence.tokens.extend(chunk.draft_tokens)
                rows += len(chunk.draft_tokens)
            is_beam = sequence.request.sampling.beam_width > 1
            for sequence in chunk.sampled_sequences:
                rows += 1
                if not is_beam:
                    sequence.tokens.append(-rows)

    # --- admission --------------------------------------------------------------------------------------------------

    def _admit_waiting(self, step: PlanBuilder) -> None:
        """Admit waiting requests until the next one does not fit.

        A request is admitted only if the pages for all of its tokens are available and not reserved for prompts that
        are still being computed. This keeps prompts from preempting each other during prefill. A request that has
        output already, such as a preempted one, also waits for its masks.
        """
        self._masks.renew()
        room = self._room() if self._waiting else _Room(0, 0)
        while step.budget > 0 and (group := self._next_waiting()):
            if self._whole_prompts and group.prefill_len > step.budget:
                return
            self._masks.prepare([group])
            if any(sequence.needs_mask for sequence in group.sequences):
                return
            self._take_scores(group)
            if not step.scored_budget and group.unscored(0, group.leader.num_prompt):
                return
            slot_users = self._preemptible_slot_users(group)
            demand = self._demand(group) if group.num_seqs <= room.num_seqs else None
            if demand and not slot_users and self._fits(demand.pages, room):
                self._enter(group, self._affordable_hit(demand, room), step)
                room.num_seqs -= group.num_seqs
                room.reserved_pages += self._missing_pages(group)
            elif self._running and not self._would_fit(group, room, demand):
                return
            elif demand and not slot_users and self.pins.drop_oldest():
                continue  # unpins idle sessions before any request is preempted
            elif step.in_flight:
                step.blocked = True
                return
            elif self._running:
                for preempted in slot_users or [self._last_running]:
                    self._preempt(preempted, step)
                room = self._room()
            else:
                return

    def _next_waiting(self) -> Group | None:
        """Return the next request. If its adapter has no slot and none can be freed by preemption, return the first
        request without an adapter. Another adapter request could keep the slots occupied and starve this one."""
        first = self._waiting.first()
        if first is None or self._has_slot(first) or self._preemptible_slot_users(first):
            return first
        return self._waiting.first_without_adapter()

    def _has_slot(self, group: Group) -> bool:
        return group.request.adapter is None or self.slots.has_room(group.request.adapter)

    def _preemptible_slot_users(self, group: Group) -> list[Group]:
        """Return the running requests to preempt so that the group's adapter gets a slot: all users of one adapter,
        each of a lower priority than the group.

        Of several such adapters, take the one whose first user has the lowest priority, then the one with the fewest
        users. Empty if the group needs no slot, one is available, or there is no such adapter.
        """
        if self._has_slot(group):
            return []
        by_adapter: dict[bytes, list[Group]] = {}
        for running in self._running.values():  # iterates in scheduling order
            if running.request.adapter:
                by_adapter.setdefault(running.request.adapter.digest, []).append(running)
        lower = (users for users in by_adapter.values() if users[0].priority > group.priority)
        return max(lower, key=lambda users: (users[0].priority, -len(users), users[0].scheduling_order), default=[])

    def _room(self) -> _Room:
        running = self._running.values()
        return _Room(
            num_seqs=self.max_num_seqs - sum(group.num_seqs for group in running),
            reserved_pages=sum(map(self._missing_pages, running)),
        )

    def _missing_pages(self, group: Group) -> int:
        return self.blocks.missing_pages(group.sequences, forked=group.forked)

    def _demand(self, group: Group) -> _Demand:
        """Return what a waiting request needs for all of its tokens."""
        if group.is_swapped:
            return _Demand(self.blocks.pages_to_swap_in(group.sequences, group.active), NO_HIT)
        hit = self.blocks.match(group.leader, group.max_cacheable_tokens)
        return _Demand(self.blocks.pages_to_admit(group.sequences, hit), hit)

    def _fits(self, needed: int, room: _Room) -> bool:
        return needed <= self.blocks.pool.num_available - room.reserved_pages

    def _affordable_hit(self, demand: _Demand, room: _Room) -> Hit:
        """Return the hit to use: without its partial block if copying that would cost more than computing its tokens,
        or if there is no room for it."""
        hit = demand.hit
        if not hit.partial:
            return hit
        cost = self.costs.move if hit.partial[0].on_host else self.costs.copy
        if self.blocks.takes_over_partial(hit):
            cost = 0
        fits = self._fits(demand.pages + self.blocks.pages_to_copy_partial(hit), room)
        return hit if fits and cost <= hit.partial_tokens * self.costs.token else hit.without_partial()

    def _would_fit(self, group: Group, room: _Room, demand: _Demand | None) -> bool:
        """Return whether a request would fit if all requests of lower priority were preempted and all sessions
        unpinned."""
        lower = [other for other in self._running.values() if other.priority > group.priority]
        if not lower or group.num_seqs > room.num_seqs + sum(other.num_seqs for other in lower):
            return False
        tables = [table for other in lower for sequence in other.sequences for table in sequence.tables]
        tables += self.pins.tables
        reserved = room.reserved_pages - sum(map(self._missing_pages, lower))
        pool = self.blocks.pool
        return (demand or self._demand(group)).pages <= pool.num_available + pool.num_freed_by(tables) - reserved

    def _enter(self, group: Group, hit: Hit, step: PlanBuilder) -> None:
        """Admit a request that fits, and plan its first chunk."""
        is_new = group.admission_index is None
        self._start_running(group)
        if not is_new:
            self._end_preemption(group)
        if group.is_swapped:
            moved = self.blocks.swap_in(group.sequences)
            step.trace_moves(group, "swap_in", moved)
            for sequence in group.active:
                self._plan_chunk(group, sequence, step)
            return
        leader = group.leader
        self.blocks.adopt(leader, hit)
        length = min(group.prefill_len - leader.computed, step.budget)
        if group.scores_prompt:
            length = step.limit_scored(group, leader.computed, length)
        if self._states:
            length = self._states.chunk_length(leader.computed, length, group.prefill_len)
        allocated = self.blocks.extend(leader, leader.computed + length)
        assert allocated is not None, "pages that were counted available are not"
        group.block_usage.new += allocated.new
        if is_new:
            step.admitted.append(group.key)
            self._accounts.admit_request(group.account, group.prefill_len - leader.computed)
            self._count_hit(group, hit)
        step.add_chunk(group, leader, length, NO_BLOCKS)

    def _start_running(self, group: Group) -> None:
        """Move a request from the waiting queue to the running batch."""
        last = self._last_running if self._running else None
        self._waiting.remove(group)
        self._running[group.key] = group
        if group.request.adapter:
            self.slots.acquire(group.request.adapter)
        if group.admission_index is None:
            group.admission_index = next(self._admission_indices)
        else:
            self._num_preempted -= 1
        if last and last.scheduling_order > group.scheduling_order:
            ordered = sorted(self._running.values(), key=lambda running: running.scheduling_order)
            self._running = {running.key: running for running in ordered}

    def _end_preemption(self, group: Group) -> None:
        now = self._clock()
        group.preempted_seconds += now - group.preempted_at
        if trace := group.request.trace:
            kind = "swap" if group.is_swapped else "recompute"
            trace.add("preempted", group.preempted_at, now, **{"paged_llm.kind": kind})

    def _count_hit(self, group: Group, hit: Hit) -> None:
        size, first = self.blocks.block_size, hit.tables[0] if hit.tables else []
        group.cached_tokens = group.leader.computed
        self._counters.queried_tokens += group.prefill_len
        self._counters.cached_tokens += group.cached_tokens
        self._counters.host_tokens += size * sum(location is not None and location.on_host for location in first)
        if hit.partial and hit.partial[0].on_host:
            self._counters.host_tokens += hit.partial_tokens

    # --- preemption -------------------------------------------------------------------------------------------------

    @property
    def _last_running(self) -> Group:
        """The last running request in scheduling order: the one admitted last among those with the lowest priority."""
        return next(reversed(self._running.values()))

    def _preempt(self, group: Group, step: PlanBuilder) -> None:
        """Move a running request with all of its samples back to the waiting queue, swapped out or to be recomputed.
        Their tokens are kept, so the output does not change."""
        assert not step.in_flight
        step.remove(group)
        # Blocks assigned in the step being planned are still empty, so they cannot be swapped out.
        is_filled = not self.blocks.ledger.cancel(group.key)
        if is_filled and self._swap_is_cheaper(group) and self.blocks.swap_out(group.sequences):
            self._counters.swapped += 1
            step.trace_moves(group, "swap_out", self._num_distinct_blocks(group))
        else:
            self._restart(group)
            self._counters.recomputed += 1
        group.preemptions += 1
        group.preempted_at = self._clock()
        self._stop_running(group)
        self._num_preempted += 1
        self._waiting.add(group)

    def _swap_is_cheaper(self, group: Group) -> bool:
        """Return whether moving blocks to the host and back is cheaper than computing them again."""
        if self._preemption != "auto":
            return self._preemption == "swap"
        shared = group.leader.num_prompt * (len(group.sequences) - 1) if group.forked else 0
        tokens = sum(sequence.computed for sequence in group.sequences) - shared
        moves = self.blocks.num_pages_held(group.sequences) * self.costs.move
        return 2 * moves < tokens * self.costs.token

    def _num_distinct_blocks(self, group: Group) -> int:
        """Return the number of blocks of the first kind that a request holds."""
        return len({block for sequence in group.sequences for block in sequence.tables[0]} - {NULL})

    def _restart(self, group: Group) -> None:
        """Free all blocks of a request, whose tokens will be computed again."""
        for sequence in group.sequences:
            self.blocks.restart(sequence)
        group.num_stored_scores = 0
        group.forked = len(group.sequences) == 1
        if group.beams:
            group.beams.candidates.clear()

    # --- commit -----------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: StepResult) -> list[TokenDelta]:
        """Commit the results of the oldest step in flight, and return the new tokens and finished samples. Skips
        requests and samples that have ended since the step was planned."""
        self._in_flight -= 1
        self._counters.steps += 1
        if self._prefill_budget:
            last, self._committed_at = self._committed_at, self._clock()
            if plan.prefill_tokens is not None:
                started = plan.planned_at if self.stages > 1 else max(last, plan.planned_at)
                self._prefill_budget.record_step(plan.prefill_tokens, self._committed_at - started)
        self.blocks.ledger.finish(plan.transfers)
        deltas: list[TokenDelta] = []
        sampled = 0  # index of the sampled sequence, over all chunks
        for index, chunk in enumerate(plan.chunks):
            group = self._running.get(chunk.sequence.key)
            if group:
                if chunk.allocated is not NO_BLOCKS and not chunk.sequence.ended:
                    group.block_usage.new += chunk.allocated.new
                    group.block_usage.copied += chunk.allocated.copied
                for sequence in (chunk.sequence, *chunk.forks):  # the leader may have ended while its samples continue
                    if not sequence.ended:
                        self.blocks.commit(sequence, chunk.start + chunk.length - len(chunk.draft_tokens))
            if plan.has_prompt_outputs and group:
                deltas += self._commit_prompt(group, chunk, result, index)
            for sequence in chunk.sampled_sequences:
                if group is not None and not sequence.ended:
                    if sampled in result.errors:
                        deltas.append(self._fail(group, result.errors[sampled]))
                    elif group.beams:
                        deltas += self._commit_beam(group, sequence, result, sampled)
                    else:
                        deltas.append(self._commit_sample(group, sequence, chunk, result, sampled))
                sampled += 1
        assert sampled == len(result.tokens), f"{len(result.tokens)} results for {sampled} sequences"
        if self._states:
            self._states.free_drafts()
        return deltas

    def fail(self, plan: Plan, message: str) -> list[TokenDelta]:
        """Fail the requests of a step that could not run. Blocks that it wrote or moved are not cached."""
        self._in_flight -= 1
        self.blocks.ledger.finish(plan.transfers, done=False)
        lost = {move.target for move in plan.transfers.moves_out}
        for group in self._waiting:
            tables = (table for sequence in group.sequences if sequence.on_host for table in sequence.tables)
            if any(map(lost.intersection, tables)):
                self._restart(group)
        error = RequestError(ErrorCode.INTERNAL, message)
        keys = dict.fromkeys(chunk.sequence.key for chunk in plan.chunks)
        ended = [TokenDelta(key, error=error) for key in keys if self.abort(key)]
        if self._states:
            self._states.free_drafts()
        self.slots.fail(plan.loads)
        return ended

    def _commit_sample(
        self, group: Group, sequence: Sequence, chunk: Chunk, result: StepResult, index: int
    ) -> TokenDelta:
        """Append the new tokens of a sequence, up to the one that ends the output, and return them with their optional
        outputs. index: number of the sequence in the results."""
        request, first, tokens = sequence.request, sequence.committed, result.tokens[index]
        sequence.tokens[first] = tokens[0]
        finish = _finish_reason(request, tokens[0], first + 1 - sequence.num_prompt)
        if chunk.draft_tokens:
            self._counters.accepted_tokens += len(tokens) - 1
            group.draft_tokens += len(chunk.draft_tokens)
            group.accepted_tokens += len(tokens) - 1
            length = 1
            while finish is None and length < len(tokens):
                finish = _finish_reason(request, tokens[length], first + 1 + length - sequence.num_prompt)
                length += 1
            tokens = tokens[:length]
            # Keys and values of rejected tokens are overwritten later. Blocks that hold nothing else are freed.
            sequence.tokens[first:] = tokens
            sequence.computed = first + length - 1
            if self._states:
                self._states.accept(sequence, chunk.draft_states, length - 1)
            self.blocks.truncate(sequence, sequence.computed)
            self.blocks.commit(sequence, sequence.computed)
            group.account.served_tokens += length - 1  # one token was counted when the step was planned
        if finish:
            self._finish(group, sequence)
        values: Values = NOTHING
        if result.values:
            count = len(tokens)
            values = {name: by_seq[index][:count] for name, by_seq in result.values.items() if index in by_seq}
        return TokenDelta(sequence.key, tuple(tokens), finish, None, sequence.index, group.usage, values)

    def _commit_prompt(self, group: Group, chunk: Chunk, result: StepResult, index: int) -> list[TokenDelta]:
        """Commit the prompt results of a chunk: optional outputs, a hidden state, the end of a request without
        output."""
        if index in result.prompt_errors:
            return [self._fail(group, result.prompt_errors[index])]
        deltas: list[TokenDelta] = []
        if chunk.scored:
            # If the leader ends, the next sequence computes the prompt again while results of the old leader still
            # arrive.
            known = group.num_scored - chunk.scored.start
            assert known >= 0
            for name, scores in group.prompt_values.items():
                scores += result.prompt_values[name][index][known:]
        if group.num_scored:
            self._store_scores(group)
        if group.scores_prompt and not group.unscored(0, chunk.sequence.num_prompt):
            group.scores_prompt = False
            prompt_values = {name: tuple(scores) for name, scores in group.prompt_values.items()}
            deltas.append(TokenDelta(group.key, prompt_values=prompt_values))
        if chunk.ends_request and (chunk.forks or not chunk.sequence.ended):
            deltas += self._finish_without_output(group, result.hidden_states.get(index))
        return deltas

    def _finish_without_output(self, group: Group, hidden: HiddenState | None) -> list[TokenDelta]:
        """End a request after its prompt."""
        finish = FinishReason.LENGTH if hidden is None else FinishReason.STOP
        self._finish_all(group)
        return [
            TokenDelta(group.key, finish=finish, sample=index, usage=group.usage, hidden=hidden)
            for index in range(group.request.sampling.num_samples)
        ]

    # --- values of prompt tokens that are cached with blocks --------------------------------------------------------

    def _take_scores(self, group: Group) -> None:
        """Append the scores of cached blocks to a group's prompt scores, up to the first block that lacks some.

        They stay valid if the blocks are evicted before the group is admitted, since they depend on the tokens alone.
        """
        if not (self.blocks.keeps_scores and group.scores_prompt):
            return
        leader, size, requested = group.leader, self.blocks.block_size, group.request.prompt_outputs
        for index in range(self._num_scored_blocks(group), leader.num_prompt // size):
            scores = self.blocks.find_scores(leader, index)
            if scores is None or not scores.cover(requested):
                break
            known = group.num_scored - _first_score(index, size)
            for name, values in scores.values(requested).items():
                group.prompt_values[name] += values[known:]
            group.num_stored_scores = max(group.num_stored_scores, index + 1)

    def _store_scores(self, group: Group) -> None:
        """Store the scores of the prompt's full blocks that are cached without scores."""
        if not self.blocks.keeps_scores:
            return
        leader, size = group.leader, self.blocks.block_size
        end = min(leader.committed // size, self._num_scored_blocks(group))
        for index in range(group.num_stored_scores, end):
            tokens = slice(_first_score(index, size), (index + 1) * size - 1)
            values = {name: scores[tokens] for name, scores in group.prompt_values.items()}
            self.blocks.add_scores(leader, index, BlockScores.of(group.request.prompt_outputs, values))
        group.num_stored_scores = max(group.num_stored_scores, end)

    def _num_scored_blocks(self, group: Group) -> int:
        """Return how many leading blocks of the prompt have all of their scores."""
        return (group.num_scored + 1) // self.blocks.block_size

    # --- beam search ------------------------------------------------------------------------------------------------

    def _commit_beam(self, group: Group, sequence: Sequence, result: StepResult, index: int) -> list[TokenDelta]:
        """Store a live beam's candidates. Once every live beam has its own, advance the search: fork the beams that
        continue in several ways, and drop those that do not continue. index: number of the beam in the results."""
        beams, candidates = group.beams, result.candidates[index]
        assert beams
        beams.candidates[sequence.index] = candidates
        if len(beams.candidates) < len(group.sequences):
            return []
        rows = [beams.candidates[beam.index] for beam in group.sequences]
        beams.candidates.clear()
        continuations = beams.search.advance([beam.output for beam in group.sequences], rows)
        self._branch(group, continuations)
        if continuations:
            return _agreed_outputs(group)
        self._remove(group)
        return _beam_outputs(group)

    def _branch(self, group: Group, continuations: list[Continuation]) -> None:
        """Replace the live beams by their continuations. The first continuation of a beam takes over its blocks, the
        others share them. Beams without continuations are freed."""
        parents, beams = group.sequences, []
        for index in set(range(len(parents))) - {continuation.beam for continuation in continuations}:
            self.blocks.free(parents[index])
        left = dict(enumerate(parents))
        for continuation in continuations:
            parent = parents[continuation.beam]
            beam = left.pop(continuation.beam, None)
            if beam is None:
                beam = Sequence(
                    parent.request, list(parent.tokens), parent.chain, usage=parent.usage, num_kinds=len(parent.tables)
                )
                self.blocks.fork(parent, beam)
            beams.append((beam, continuation.token))
        for index, (beam, token) in enumerate(beams):
            beam.index = index
            beam.tokens.append(token)
        group.sequences = [beam for beam, _ in beams]

    # --- statistics and checks --------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """The statistics of the scheduler and of its blocks."""
        context_requests, context_tokens = self._prefill if self._running else (0, 0)
        return Stats(
            running=len(self._running),
            waiting=len(self._waiting),
            paused=self._num_preempted,
            context_requests=context_requests,
            context_tokens=context_tokens,
            blocks_pinned=self.pins.num_pages,
            compute_seconds=self.costs.token * self.blocks.block_size,
            host_seconds=self.costs.move,
            **vars(self._counters),
            **self.blocks.stats,
        )

    @property
    def empty_slots(self) -> int:
        """The number of token slots in use without a token. Between steps these are the rest of each sequence's last
        block."""
        last = {
            sequence.tables[0][-1]: sequence
            for sequence in self._sequences()
            if sequence.num_blocks and not sequence.on_host
        }
        return sum(sequence.num_blocks * self.blocks.block_size - sequence.computed for sequence in last.values())

    def clear_cache(self) -> None:
        """Drop all cached contents of the pool, including pinned ones. Called while no request is open."""
        assert not self.has_work and not self._in_flight
        while self.pins.drop_oldest():
            pass
        self.blocks.clear()

    def check(self) -> None:
        """Assert every invariant of the scheduler and the pools. For tests and idle moments."""
        running, sequences = list(self._running.values()), list(self._sequences())
        assert sum(group.num_seqs for group in running) <= self.max_num_seqs
        for sequence in sequences:
            assert 0 <= sequence.committed <= sequence.computed <= len(sequence.tokens)
            assert not sequence.ended
            guides = sequence.request.guides
            assert not guides or guides[sequence.index].seen <= sequence.generated, "a mask of tokens that do not exist"
            if not self._in_flight:
                assert sequence.committed == sequence.computed, "computed, but not committed"
                assert min(sequence.tokens) >= 0, "a placeholder is left"
            assert sequence.computed <= sequence.num_blocks * self.blocks.block_size
        assert [group.scheduling_order for group in running] == sorted(group.scheduling_order for group in running)
        waiting = [sequence for group in self._waiting for sequence in group.sequences]
        assert not any(sequence.num_blocks and not sequence.on_host for sequence in waiting)
        assert not any(group.is_swapped for group in running)
        assert self._num_preempted == sum(group.preemptions > 0 for group in self._waiting)
        self._waiting.check()
        self._accounts.check(
            (group.account for group in self._waiting if group.admission_index is None),
            (group.account for group in (*running, *self._waiting) if group.admission_index is not None),
        )
        self.slots.check(group.request for group in running)
        self.blocks.check(sequences, self.pins.tables)

    def _sequences(self) -> Iterator[Sequence]:
        for group in (*self._running.values(), *self._waiting):
            yield from group.sequences


def _finish_reason(request: GenerateRequest, token: int, length: int) -> FinishReason | None:
    """Return why an output of `length` tokens ends with its last token, or None if it continues."""
    if token in request.stop_ids and (request.guides or length >= request.sampling.min_tokens):
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= request.sampling.max_tokens else None


def _first_score(index: int, block_size: int) -> int:
    """Return the index of a block's first score among the scores of its prompt, whose first token has none."""
    return max(0, index * block_size - 1)


def _agreed_outputs(group: Group) -> list[TokenDelta]:
    """Return the new tokens that all outputs of a beam search have in common, for each output."""
    assert group.beams
    search = group.beams.search
    tokens = search.agree([sequence.output for sequence in group.sequences])
    if not tokens:
        return []
    values = search.agreed_values(len(tokens))
    return [
        TokenDelta(group.key, tokens, sample=index, usage=group.usage, values=values)
        for index in range(group.request.sampling.n)
        if index not in group.beams.ended
    ]


def _beam_outputs(group: Group) -> list[TokenDelta]:
    """Return the outputs of a beam search that has ended, without the tokens that were returned before."""
    assert group.beams
    sent = group.beams.search.num_agreed
    return [
        TokenDelta(
            group.key,
            hypothesis.tokens[sent:],
            hypothesis.finish,
            sample=index,
            usage=group.usage,
            values={name: values[sent:] for name, values in hypothesis.values.items()},
        )
        for index, hypothesis in enumerate(group.beams.search.best)
        if index not in group.beams.ended
    ]
