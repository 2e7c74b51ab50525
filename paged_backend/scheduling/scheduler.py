"""Continuous batching with chunked prefill: who computes what in the next step. Integers only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import FinishReason, GenerateRequest, HiddenState, Logprobs, TokenDelta
from paged_backend.scheduling.accounts import Accounts
from paged_backend.scheduling.adapter_slots import AdapterSlots
from paged_backend.scheduling.beam_search import Candidate
from paged_backend.scheduling.block_manager import BlockManager, CacheHit
from paged_backend.scheduling.pace import Pace
from paged_backend.scheduling.pins import Pins
from paged_backend.scheduling.plan import Chunk, Costs, Draft, Plan
from paged_backend.scheduling.sequence import Group, Sequence
from paged_backend.scheduling.speculation import Proposer
from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.scheduling.step_result import StepResult
from paged_backend.scheduling.tables import Demand, Tables
from paged_backend.scheduling.waiting import WaitingQueue


@dataclass
class _Room:
    """What requests that wait may still take in this step."""

    seqs: int
    promised: int  # blocks that those which run will need for the tokens they have


class Scheduler:
    """Decides who runs. `schedule` plans a step, `commit` books its tokens; both on the engine thread. Who is next of
    those that wait, the queue knows (waiting.py), and how many blocks that takes, the tables do (tables.py).

    The next step may be planned while one is in flight: what that one draws stands in the sequences as tokens whose
    value is to come. A sequence that turns out to have ended computes one row for nothing. Nobody is preempted then:
    who finds no room waits for the commit.
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
        step_seconds: float | None = None,
        max_loras: int = 0,
        fair_tenants: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """preemption: "swap", "recompute", or by cost. session_blocks: how many sessions may keep between turns.
        max_guesses: of a sequence in a step. step_seconds: that a step should take while sequences decode; chunks of
        prompts beside them are made to fit. max_loras: adapters that the device holds. fair_tenants: of a priority,
        who has had the fewest tokens is let in first, not who came first. clock: in seconds."""
        assert max_num_batched_tokens >= max_num_seqs >= 1
        self.pins = Pins(blocks, session_blocks)
        self.slots = AdapterSlots(max_loras)
        self.blocks = blocks
        self.costs = costs or Costs()
        self._tables = Tables(blocks, self.costs, preemption)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._waiting = WaitingQueue()
        self._accounts = Accounts(by_tenant=fair_tenants)
        self._running: dict[int, Group] = {}
        self.entered: list[int] = []  # keys of requests that the last call of `schedule` let in for the first time
        self._turns = count()
        self._in_flight = 0  # plans that are not committed, nor have failed
        self._stuck = False  # whether somebody waits for a commit
        self._proposer = proposer if max_draft_tokens else None
        self._max_guesses = max_draft_tokens
        self._clock = clock
        self._committed = 0.0  # when the last step was
        self._pace = Pace(step_seconds, self.costs.token, max_num_batched_tokens) if step_seconds else None
        self._guessed_tokens = 0
        self._accepted_tokens = 0
        self._steps = 0
        self._context = (0, 0)  # requests with a prompt to compute in the last step, and its tokens
        self._paused = 0
        self._recomputed = 0
        self._swapped = 0
        self._queried_tokens = 0
        self._cached_tokens = 0
        self._host_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        host, counters = self.blocks.host, self.blocks.counters
        context = self._context if self._running else (0, 0)
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_total=self.blocks.num_blocks,
            blocks_used=self.blocks.num_used,
            blocks_cached=self.blocks.num_cached,
            blocks_shared=self.blocks.num_shared,
            blocks_pinned=self.pins.num_blocks,
            block_size=self.blocks.block_size,
            host_total=host.num_blocks if host else 0,
            host_cached=host.num_cached if host else 0,
            host_used=host.num_used if host else 0,
            recomputed=self._recomputed,
            swapped=self._swapped,
            queried_tokens=self._queried_tokens,
            cached_tokens=self._cached_tokens,
            host_tokens=self._host_tokens,
            evictions=counters.evictions,
            copies=counters.copies,
            moves_out=counters.moves_out,
            moves_in=counters.moves_in,
            draft_tokens=self._guessed_tokens,
            accepted_tokens=self._accepted_tokens,
            paused=self._paused,
            steps=self._steps,
            context_requests=context[0],
            context_tokens=context[1],
        )

    @property
    def running(self) -> tuple[Group, ...]:
        """Requests that hold blocks, by rank."""
        return tuple(self._running.values())

    @property
    def empty_slots(self) -> int:
        """Slots of the sequences' blocks that hold no token: between steps, the rest of the last block of each."""
        last = {one.blocks[-1]: one for group in self._running.values() for one in group.sequences if one.blocks}
        return sum(len(one.blocks) * self.blocks.block_size - one.computed for one in last.values())

    def add(self, request: GenerateRequest) -> None:
        self._waiting.add(Group.of(request, self._accounts.join(request)))

    def has_request(self, key: int) -> bool:
        """Whether a request waits or runs."""
        return self._find(key) is not None

    def abort(self, key: int) -> bool:
        """Drop a request wherever it is; its blocks are free at once. False where it had ended already."""
        group = self._find(key)
        if group is None:
            return False
        self._remove(group)
        self._tables.release(group)
        return True

    def end(self, key: int, index: int) -> bool:
        """End one sample, whose text has met a stop string; its blocks are free at once. False where it had ended."""
        group = self._find(key)
        if group is None:
            return False
        if group.beams:  # the outputs are not the sequences: the search goes on until all of them have ended
            group.beams.ended.add(index)
            return len(group.beams.ended) < group.request.sampling.n or self.abort(key)
        sequence = next((one for one in group.sequences if one.index == index), None)
        if sequence is None:
            return False
        self._end(group, sequence)
        return True

    def end_all(self, key: int) -> bool:
        """End every sample of a request; its blocks are free at once, or its session's. False where it had ended."""
        group = self._find(key)
        if group is None or group.beams:
            return self.abort(key)
        self._end_each(group)
        return True

    def expire(self, key: int) -> list[TokenDelta]:
        """End a beam search with the best that it has, finished or not; nothing where it has ended already."""
        group = self._find(key)
        if group is None:
            return []
        assert group.beams
        group.beams.search.cut([one.output for one in group.sequences])
        self._remove(group)
        self._tables.release(group)
        return self._best(group)

    @property
    def needs_results(self) -> bool:
        """Whether the next plan would be better, or there would be none without, once all is committed: beams go on
        from what was drawn, guides and guesses follow it."""
        return self._stuck or self._proposer is not None or any(group.in_turn for group in self._running.values())

    def schedule(self) -> Plan | None:
        """The next step, or None where nothing can run. At most one may be in flight."""
        assert self._in_flight <= 1
        self._stuck = False
        draft = Draft(self.max_num_batched_tokens, self._clock())
        self.entered = draft.entered
        preempted = self._recomputed + self._swapped
        decoding, feeding = self._running_in_order()
        self._extend_all(decoding, draft)
        decodes = bool(draft.chunks)
        kept = max(0, draft.budget - self._pace.tokens) if self._pace and decodes else 0
        draft.budget -= kept
        left = draft.budget
        self._extend_all(feeding, draft)
        generating = len(self._running) - len({group.key for group, _ in feeding} & self._running.keys())
        if self._recomputed + self._swapped == preempted:
            self._admit(draft)
        fed = max(0, left - draft.budget)
        self._context = len(self._running) - generating, fed
        draft.fed = fed if decodes else None
        draft.budget += kept  # guesses are no prompts
        if self._proposer:
            self._speculate(draft, self._proposer)
        plan = draft.plan(self.blocks, self.slots)
        if plan is not None:
            self._advance(plan)
        return plan

    def _speculate(self, draft: Draft, proposer: Proposer) -> None:
        """Have guesses checked with what the step, and the pool, have left."""
        for chunk in draft.chunks:
            sequence = chunk.sequence
            group = self._running[sequence.key]
            if chunk.draws != (sequence,) or chunk.length > 1 or group.in_turn or not sequence.generated:
                continue
            left = sequence.request.sampling.max_tokens - sequence.generated - 1
            most = min(self._max_guesses, draft.budget, left)
            draft_tokens = proposer(sequence, most) if most > 0 else []
            if draft_tokens and self._tables.grow(group, sequence.blocks, chunk.start + 1 + len(draft_tokens)):
                chunk.draft_tokens = tuple(draft_tokens)
                chunk.length += len(draft_tokens)
                draft.budget -= len(draft_tokens)
                self._guessed_tokens += len(draft_tokens)

    def _advance(self, plan: Plan) -> None:
        """From here on what the plan computes counts as computed, and what it draws as drawn."""
        self._in_flight += 1
        if self._accounts.by_tenant:
            for chunk in plan.chunks:
                self._running[chunk.sequence.key].account.served += len(chunk.draws)
        draws = 0
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.length
            if sequence.computed == sequence.num_prompt:
                group = self._running[sequence.request.key]
                if not group.forked:
                    self._tables.fork(group)
                    chunk.forks = tuple(group.sequences[1:])
            if chunk.draft_tokens:
                sequence.tokens.extend(chunk.draft_tokens)
                draws += len(chunk.draft_tokens)
            is_beam = sequence.request.sampling.beam_width > 1
            for sequence in chunk.draws:
                draws += 1
                if not is_beam:
                    sequence.tokens.append(-draws)

    def commit(self, plan: Plan, result: StepResult) -> list[TokenDelta]:
        """Book a step that ran, the oldest in flight."""
        self._in_flight -= 1
        self._steps += 1
        if self._pace:
            before, self._committed = self._committed, self._clock()
            if plan.fed is not None:
                self._pace.took(plan.fed, self._committed - max(before, plan.began))
        self.blocks.finish_moves_out(plan.moves_out)
        self.blocks.finish_moves_in(plan.moves_in)
        self.blocks.finish(plan.copies)
        deltas: list[TokenDelta] = []
        draw = 0
        for index, chunk in enumerate(plan.chunks):
            group = self._running.get(chunk.sequence.request.key)
            if group and not chunk.sequence.ended:
                group.blocks_new += chunk.blocks_new
                group.blocks_copied += chunk.blocks_copied
            if group:
                for sequence in (chunk.sequence, *chunk.forks):  # who computed for others may have ended since
                    if not sequence.ended:
                        self._tables.seal(sequence, chunk.start + chunk.length - len(chunk.draft_tokens))
            if plan.has_prompt_outputs and group and not chunk.sequence.ended:
                deltas += self._commit_prompt(group, chunk, result, index)
            for sequence in chunk.draws:
                if group is not None and not sequence.ended:  # else it has ended since the step was planned
                    deltas += self._commit_draw(group, sequence, result, draw, len(chunk.draft_tokens))
                draw += 1
        assert draw == len(result.tokens), f"{len(result.tokens)} results for {draw} draws"
        return deltas

    def _commit_draw(
        self, group: Group, sequence: Sequence, result: StepResult, draw: int, drafted: int
    ) -> list[TokenDelta]:
        if draw in result.errors:
            return [self._lose(group, result.errors[draw])]
        if group.beams:
            return self._rank(group, sequence, result.candidates[draw])
        return [self._append(group, sequence, result.tokens[draw], drafted, result.logprobs.get(draw))]

    def _commit_prompt(self, group: Group, chunk: Chunk, result: StepResult, index: int) -> list[TokenDelta]:
        """What is wanted of a prompt itself, and the end of a request that wants nothing else."""
        deltas: list[TokenDelta] = []
        if index in result.prompt_errors:
            return [self._lose(group, result.prompt_errors[index])]
        if chunk.scored:
            group.prompt_logprobs += result.prompt_logprobs[index]
            if not group.unscored(0, chunk.sequence.num_prompt):
                deltas.append(TokenDelta(group.key, prompt_logprobs=tuple(group.prompt_logprobs)))
        if chunk.ends_all:
            deltas += self._end_prompt(group, result.hidden_states.get(index))
        return deltas

    def _end_prompt(self, group: Group, hidden: HiddenState | None) -> list[TokenDelta]:
        """Of a request for which nothing is to be drawn."""
        finish = FinishReason.LENGTH if hidden is None else FinishReason.STOP
        self._end_each(group)
        return [
            TokenDelta(group.key, finish=finish, sample=index, usage=group.usage, hidden=hidden)
            for index in range(group.request.sampling.num_samples)
        ]

    def fail(self, plan: Plan, message: str) -> list[TokenDelta]:
        """A step that could not run ends the requests in it, and no other. What it wrote or moved is nobody's
        content."""
        self._in_flight -= 1
        self.blocks.finish_moves_out(plan.moves_out, done=False)
        self.blocks.finish_moves_in(plan.moves_in, done=False)
        self.blocks.finish(plan.copies)
        lost = {move.target for move in plan.moves_out}
        for group in self._waiting:
            if any(lost.intersection(sequence.swapped) for sequence in group.sequences):
                self._tables.restart(group)
        error = RequestError(ErrorCode.INTERNAL, message)
        keys = dict.fromkeys(chunk.sequence.key for chunk in plan.chunks)
        ended = [TokenDelta(key, error=error) for key in keys if self.abort(key)]
        self.slots.fail(plan.loads)
        return ended

    def check(self) -> None:
        """Assert every invariant of scheduler and pool; for tests and idle moments."""
        assert sum(group.num_seqs for group in self._running.values()) <= self.max_num_seqs
        for sequence in self._sequences():
            assert 0 <= sequence.committed <= sequence.computed <= len(sequence.tokens)
            assert not sequence.ended
            if not self._in_flight:
                assert sequence.committed == sequence.computed, "computed, but not committed"
                assert min(sequence.tokens) >= 0, "a token is missing"
            assert sequence.computed <= len(sequence.blocks or sequence.swapped) * self.blocks.block_size
        assert [group.rank for group in self.running] == sorted(group.rank for group in self.running)
        self._waiting.check()
        assert not any(sequence.blocks for group in self._waiting for sequence in group.sequences)
        assert not any(sequence.swapped for group in self.running for sequence in group.sequences)
        assert self._paused == sum(group.preemptions > 0 for group in self._waiting)
        self._accounts.check(
            (group.account for group in self._waiting if group.turn is None),
            (group.account for group in (*self.running, *self._waiting) if group.turn is not None),
        )
        self.slots.check(group.request for group in self.running)
        self.blocks.check([*(sequence.blocks for sequence in self._sequences()), *self.pins.tables])
        if self.blocks.host:
            self.blocks.host.check([sequence.swapped for sequence in self._sequences()])

    def _sequences(self) -> Iterator[Sequence]:
        for group in (*self._running.values(), *self._waiting):
            yield from group.sequences

    def _running_in_order(self) -> tuple[list[tuple[Group, Sequence]], list[tuple[Group, Sequence]]]:
        """Who decodes, and who still has a prompt to compute, each by rank. Decode comes first, so that a long prompt
        delays the streams that already flow by little."""
        decoding: list[tuple[Group, Sequence]] = []
        feeding: list[tuple[Group, Sequence]] = []
        for group in self._running.values():  # which are in order: `check` says so
            for sequence in group.active:
                if not (self._in_flight and sequence.has_all):
                    (decoding if len(sequence.tokens) - sequence.computed == 1 else feeding).append((group, sequence))
        return decoding, feeding

    def _extend_all(self, ordered: list[tuple[Group, Sequence]], draft: Draft) -> None:
        for group, sequence in ordered:
            if group.key in self._running:  # an earlier one may have taken its blocks
                self._extend(group, sequence, draft)

    def _extend(self, group: Group, sequence: Sequence, draft: Draft) -> None:
        """Plan the sequence's next chunk, taking blocks from the last in rank that run if the pool is dry."""
        end = len(sequence.tokens) if group.forked else group.feed
        length = min(end - sequence.computed, draft.budget)
        if group.scores_prompt:
            length = draft.room(group, sequence.computed, length)
        if length == 0:
            return
        new, copied = group.blocks_new, group.blocks_copied
        while not self._tables.make_room(group, sequence, sequence.computed + length, draft):
            if self.pins.drop_oldest():
                continue
            if self._in_flight:
                self._stuck = True
                return
            victim = self._last
            self._preempt(victim, draft)
            if victim is group:
                return
        chunk = draft.put(group, sequence, length)
        # Counted at the commit, unless it has ended by then.
        chunk.blocks_new, group.blocks_new = group.blocks_new - new, new
        chunk.blocks_copied, group.blocks_copied = group.blocks_copied - copied, copied

    def _admit(self, draft: Draft) -> None:
        """Let waiting requests in, in order. One enters only if the blocks of all its tokens are available and not
        promised to a prompt still being fed; so prompts do not push each other out half-way."""
        room = self._room() if self._waiting else _Room(0, 0)
        while draft.budget > 0 and (group := self._next()):
            if not draft.scores and group.unscored(0, group.leader.num_prompt):
                return
            slot_users = self._slot_users_below(group)
            demand = self._tables.demand(group) if group.num_seqs <= room.seqs else None
            hit = self._tables.fit(demand, room.promised) if demand and not slot_users else None
            if hit is not None:
                self._enter(group, hit, draft)
                room.seqs -= group.num_seqs
                room.promised += self._tables.promised(group)
            elif self._running and not self._would_fit(group, room, demand):
                return
            elif demand and not slot_users and self.pins.drop_oldest():
                continue  # idle sessions let go before anybody is preempted
            elif self._in_flight:
                self._stuck = True
                return
            elif self._running:
                for victim in slot_users or [self._last]:
                    self._preempt(victim, draft)
                room = self._room()
            else:
                return

    def _next(self) -> Group | None:
        """The first of those that wait, but for those whose adapter finds no slot, and who may displace nobody for one.
        Behind such a one nobody with an adapter is let in, who might keep the slots in use for ever."""
        first = self._waiting.first()
        if first is None or self._has_slot(first) or self._slot_users_below(first):
            return first
        return self._waiting.first_without_adapter()

    def _has_slot(self, group: Group) -> bool:
        return group.request.adapter is None or self.slots.has_room(group.request.adapter)

    def _slot_users_below(self, group: Group) -> list[Group]:
        """Who has to make way so that its adapter finds a slot: all that run with one adapter, each of them of a lower
        priority. Of several such adapters that whose first user has the lowest priority, then that with the fewest
        users. Empty where a slot is there, or no such adapter."""
        if self._has_slot(group):
            return []
        users: dict[bytes, list[Group]] = {}
        for one in self._running.values():  # by rank
            if one.request.adapter:
                users.setdefault(one.request.adapter.digest, []).append(one)
        lower = (ones for ones in users.values() if ones[0].priority > group.priority)
        return max(lower, key=lambda ones: (ones[0].priority, -len(ones), ones[0].rank), default=[])

    def _would_fit(self, group: Group, room: _Room, demand: Demand | None) -> bool:
        """Whether a request would find room if all of lower priority, and idle sessions, made way."""
        lower = [one for one in self._running.values() if one.priority > group.priority]
        if not lower or group.num_seqs > room.seqs + sum(one.num_seqs for one in lower):
            return False
        tables = [sequence.blocks for one in lower for sequence in one.sequences] + self.pins.tables
        promised = room.promised - sum(map(self._tables.promised, lower))
        needed = (demand or self._tables.demand(group)).blocks
        return needed <= self.blocks.num_available + self.blocks.num_freed_by(tables) - promised

    def _room(self) -> _Room:
        running = self._running.values()
        return _Room(
            seqs=self.max_num_seqs - sum(group.num_seqs for group in running),
            promised=sum(map(self._tables.promised, running)),
        )

    def _enter(self, group: Group, hit: CacheHit, draft: Draft) -> None:
        last = self._last if self._running else None
        self._waiting.remove(group)
        self._running[group.key] = group
        if group.request.adapter:
            self.slots.take(group.request.adapter)
        is_new = group.turn is None
        if is_new:
            group.turn = next(self._turns)
        else:
            self._paused -= 1
            group.preempted_seconds += self._clock() - group.preempted_at
        if last and last.rank > group.rank:
            self._running = {one.key: one for one in sorted(self.running, key=lambda one: one.rank)}
        if group.swapped:
            self._tables.swap_in(group, draft)
            for sequence in group.active:
                self._extend(group, sequence, draft)
            return
        self._tables.adopt(group, hit, draft)
        leader = group.leader
        length = min(group.feed - leader.computed, draft.budget)
        if group.scores_prompt:
            length = draft.room(group, leader.computed, length)
        grown = self._tables.grow(group, leader.blocks, leader.computed + length)
        assert grown, "blocks that were counted available are not"
        if is_new:
            draft.entered.append(group.key)
            self._accounts.enter(group.account, group.feed - leader.computed)
            self._count_hit(group, hit)
        draft.put(group, leader, length)

    def _count_hit(self, group: Group, hit: CacheHit) -> None:
        size = self.blocks.block_size
        group.cached_tokens = group.leader.computed
        self._queried_tokens += group.feed
        self._cached_tokens += group.cached_tokens
        self._host_tokens += size * (len(hit.blocks) - len(hit.on_device))
        if hit.partial is not None and hit.partial.on_host:
            self._host_tokens += hit.partial_tokens

    @property
    def _last(self) -> Group:
        """Of those that run, the one of the lowest priority that was let in last."""
        return next(reversed(self._running.values()))

    def _preempt(self, group: Group, draft: Draft) -> None:
        """Back to the queue, with all its samples. Their tokens are kept; keys and values are computed again or wait on
        the host, so no token changes."""
        assert not self._in_flight
        copies, moves_in = draft.drop(group)
        # What this very step would have brought is not there: those start again, with what the cache has.
        swapped = not copies and not moves_in and self._tables.swap_out(group)
        self.blocks.finish(copies)
        self.blocks.finish_moves_in(moves_in, done=False)
        self._leave(group)
        if swapped:
            self._swapped += 1
        else:
            self._tables.restart(group)
            self._recomputed += 1
        group.preemptions += 1
        self._paused += 1
        group.preempted_at = self._clock()
        self._waiting.add(group)

    def _append(
        self, group: Group, sequence: Sequence, tokens: list[int], drafted: int, logprobs: list[Logprobs] | None
    ) -> TokenDelta:
        request, first = sequence.request, sequence.committed
        generated = first - sequence.num_prompt
        finish = None
        kept = 0
        for token in tokens:
            kept += 1
            if finish := _finish(request, token, generated + kept):
                break
        sequence.tokens[first] = tokens[0]
        if drafted:
            self._accepted_tokens += len(tokens) - 1
            group.draft_tokens += drafted
            group.accepted_tokens += len(tokens) - 1
            tokens = tokens[:kept]
            self._tables.accept(group, sequence, tokens)
            group.account.served += len(tokens) - 1  # the first was counted as the step was planned
        if finish:
            self._end(group, sequence)
        told = () if logprobs is None else tuple(logprobs[: len(tokens)])
        return TokenDelta(request.key, tuple(tokens), finish, None, sequence.index, group.usage, told)

    def _lose(self, group: Group, error: RequestError) -> TokenDelta:
        """One of its samples has come to where no token can follow. Where that is the model's fault, nobody is to find
        what it computed."""
        if error.code is ErrorCode.INTERNAL:
            for sequence in group.sequences:
                self.blocks.disown(sequence.blocks)
        self._remove(group)
        self._tables.release(group)
        for sequence in group.sequences:
            sequence.ended = True
        return TokenDelta(group.key, error=error)

    def _rank(self, group: Group, sequence: Sequence, row: list[Candidate]) -> list[TokenDelta]:
        """Keep a live beam's candidates until every beam has its own; then fork those that go on in several ways, and
        drop those that do not go on."""
        beams = group.beams
        assert beams
        beams.rows[sequence.index] = row
        if len(beams.rows) < len(group.sequences):
            return []
        rows = [beams.rows[one.index] for one in group.sequences]
        beams.rows.clear()
        continuations = beams.search.advance([one.output for one in group.sequences], rows)
        self._tables.branch(group, continuations)
        if continuations:
            agreed = beams.search.agree([one.output for one in group.sequences])
            return self._to_all(group, agreed) if agreed else []
        self._remove(group)
        return self._best(group)

    def _best(self, group: Group) -> list[TokenDelta]:
        """The outputs of a search that has ended, past what was given of them before."""
        assert group.beams
        sent = group.beams.search.num_agreed
        return [
            TokenDelta(group.key, one.tokens[sent:], one.finish, None, index, group.usage, one.logprobs[sent:])
            for index, one in enumerate(group.beams.search.best)
            if index not in group.beams.ended
        ]

    def _to_all(self, group: Group, tokens: tuple[int, ...]) -> list[TokenDelta]:
        assert group.beams
        outputs = (index for index in range(group.request.sampling.n) if index not in group.beams.ended)
        told = group.beams.search.agreed_logprobs(len(tokens))
        return [TokenDelta(group.key, tokens, None, None, index, group.usage, told) for index in outputs]

    def _end_each(self, group: Group) -> None:
        for sequence in list(group.sequences):
            self._end(group, sequence)

    def _end(self, group: Group, sequence: Sequence) -> None:
        if group.request.session is not None and sequence.blocks:
            full = sequence.committed // self.blocks.block_size
            self.pins.pin(group.request.session, sequence.blocks[:full])
        self._tables.let_go(sequence)
        sequence.ended = True
        group.sequences.remove(sequence)
        if not group.sequences:
            self._remove(group)

    def _find(self, key: int) -> Group | None:
        return self._running.get(key) or self._waiting.get(key)

    def _remove(self, group: Group) -> None:
        if group.key in self._running:
            self._leave(group)
        else:
            self._waiting.remove(group)
            self._paused -= group.turn is not None
        self._accounts.leave(group.account, waits=group.turn is None)

    def _leave(self, group: Group) -> None:
        """It runs no longer."""
        del self._running[group.key]
        if group.request.adapter:
            self.slots.leave(group.request.adapter)


def _finish(request: GenerateRequest, token: int, generated: int) -> FinishReason | None:
    """Whether a token is the last of an output, which has `generated` with it, and why."""
    if token in request.stop_ids and (request.guides or generated >= request.sampling.min_tokens):
        return FinishReason.STOP
    return FinishReason.LENGTH if generated >= request.sampling.max_tokens else None
