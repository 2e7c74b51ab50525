"""Continuous batching with chunked prefill: who computes what in the next step. Integers only."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from paged_backend.block_manager import BlockManager, Copy, Hit
from paged_backend.request import ErrorCode, FinishReason, GenerateRequest, RequestError, TokenDelta
from paged_backend.sequence import Group, Sequence


@dataclass(slots=True)
class Chunk:
    """Tokens `start` to `start + length` of a sequence, and the sequences that draw a token after the last of them:
    none where more of the prompt is to come, its own in decode, all of its group's at the end of their prompt."""

    sequence: Sequence
    start: int
    length: int
    draws: tuple[Sequence, ...]

    def __post_init__(self) -> None:
        assert self.length >= 1 and self.start == self.sequence.computed, self
        assert not self.draws or self.start + self.length == len(self.sequence.tokens), self


@dataclass(frozen=True)
class Plan:
    """One step: the block copies to do first, and chunks in the order of their rows, decode first."""

    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...] = ()
    entered: tuple[int, ...] = ()  # keys of requests that compute for the first time

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass
class _Draft:
    """A plan in the making: what each group computes, and how many tokens the step can still take."""

    budget: int
    chunks: dict[int, list[Chunk]] = field(default_factory=dict)
    copies: dict[int, list[Copy]] = field(default_factory=dict)
    entered: list[int] = field(default_factory=list)

    def put(self, group: Group, sequence: Sequence, length: int) -> None:
        draws: tuple[Sequence, ...] = ()
        if length == sequence.pending:
            draws = (sequence,) if group.forked else tuple(group.sequences)
        self.chunks.setdefault(group.key, []).append(Chunk(sequence, sequence.computed, length, draws))
        self.budget -= length

    def copy(self, group: Group, copy: Copy) -> None:
        group.blocks_new += 1
        group.blocks_copied += 1
        self.copies.setdefault(group.key, []).append(copy)

    def drop(self, group: Group) -> list[Copy]:
        """Take a group out; the copies that it no longer needs."""
        self.budget += sum(chunk.length for chunk in self.chunks.pop(group.key, []))
        return self.copies.pop(group.key, [])

    def plan(self) -> Plan | None:
        chunks = tuple(chunk for chunks in self.chunks.values() for chunk in chunks)
        copies = tuple(copy for copies in self.copies.values() for copy in copies)
        return Plan(chunks, copies, tuple(self.entered)) if chunks else None


@dataclass
class _Room:
    """What requests that wait may still take in this step."""

    seqs: int
    promised: int  # blocks that those which run will need for the tokens they have


@dataclass(frozen=True)
class SchedulerStats:
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_shared: int
    block_size: int
    preemptions: int  # this and all below since the start
    cached_tokens: int
    evictions: int
    copies: int

    @property
    def blocks_free(self) -> int:
        return self.blocks_total - self.blocks_used - self.blocks_cached

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold."""
        return self.blocks_used / self.blocks_total


class Scheduler:
    """By priority, and within one first come, first served. `schedule` plans a step, `commit` books its tokens; both
    on the engine thread."""

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int):
        assert max_num_batched_tokens >= max_num_seqs >= 1
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._waiting: list[Group] = []  # by rank
        self._running: dict[int, Group] = {}
        self._preemptions = 0
        self._cached_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_total=self.blocks.num_blocks,
            blocks_used=self.blocks.num_used,
            blocks_cached=self.blocks.num_cached,
            blocks_shared=self.blocks.num_shared,
            block_size=self.blocks.block_size,
            preemptions=self._preemptions,
            cached_tokens=self._cached_tokens,
            evictions=self.blocks.counters.evictions,
            copies=self.blocks.counters.copies,
        )

    @property
    def running(self) -> tuple[Group, ...]:
        """Requests that hold blocks, by arrival."""
        return tuple(self._running.values())

    @property
    def empty_slots(self) -> int:
        """Slots of the sequences' blocks that hold no token: between steps, the rest of the last block of each."""
        last = {one.blocks[-1]: one for group in self._running.values() for one in group.sequences if one.blocks}
        return sum(len(one.blocks) * self.blocks.block_size - one.computed for one in last.values())

    def add(self, request: GenerateRequest) -> None:
        insort(self._waiting, Group.of(request), key=_rank)

    def abort(self, key: int) -> bool:
        """Drop a request wherever it is; its blocks are free at once. False where it had ended already."""
        group = self._find(key)
        if group is None:
            return False
        self._remove(group)
        self._release(group)
        return True

    def end(self, key: int, index: int) -> bool:
        """End one sample, whose text has met a stop string; its blocks are free at once. False where it had ended."""
        group = self._find(key)
        sequence = next((one for one in group.sequences if one.index == index), None) if group else None
        if group is None or sequence is None:
            return False
        self._end(group, sequence)
        return True

    def schedule(self) -> Plan | None:
        """The next step, or None where nothing can run."""
        draft = _Draft(self.max_num_batched_tokens)
        preempted = self._preemptions
        for group, sequence in self._running_in_order():
            if group.key in self._running:  # an earlier one in this loop may have taken its blocks
                self._extend(group, sequence, draft)
        if self._preemptions == preempted:
            self._admit(draft)
        return draft.plan()

    def commit(self, plan: Plan, token_ids: list[int]) -> list[TokenDelta]:
        """Book a step that ran: one token id per draw, in the plan's order."""
        self.blocks.finish(plan.copies)
        drawn = iter(token_ids)
        deltas = []
        for chunk in plan.chunks:
            group = self._running[chunk.sequence.request.key]
            self._book(chunk)
            if not group.forked and group.leader.computed == group.leader.num_prompt:
                self._fork(group)
            for sequence in chunk.draws:
                deltas.append(self._append(group, sequence, next(drawn)))
        assert next(drawn, None) is None, "more tokens than draws"
        return deltas

    def fail(self, plan: Plan, message: str) -> list[TokenDelta]:
        """A step that could not run ends the requests in it, and no other. What it wrote is nobody's content."""
        self.blocks.finish(plan.copies)
        error = RequestError(ErrorCode.INTERNAL, message)
        keys = dict.fromkeys(chunk.sequence.key for chunk in plan.chunks)
        return [TokenDelta(key, error=error) for key in keys if self.abort(key)]

    def check(self) -> None:
        """Assert every invariant of scheduler and pool; for tests and idle moments."""
        assert sum(len(group.sequences) for group in self._running.values()) <= self.max_num_seqs
        for sequence in self._sequences():
            assert 0 <= sequence.computed <= len(sequence.tokens)
            assert sequence.computed <= len(sequence.blocks) * self.blocks.block_size
        assert [group.rank for group in self.running] == sorted(group.rank for group in self.running)
        assert [group.rank for group in self._waiting] == sorted(group.rank for group in self._waiting)
        assert not any(sequence.blocks for group in self._waiting for sequence in group.sequences)
        self.blocks.check([sequence.blocks for sequence in self._sequences()])

    def _sequences(self) -> Iterator[Sequence]:
        for group in (*self._running.values(), *self._waiting):
            yield from group.sequences

    def _running_in_order(self) -> list[tuple[Group, Sequence]]:
        """Decode first, so that a long prompt never delays the streams that already flow; then by rank."""
        decoding: list[tuple[Group, Sequence]] = []
        feeding: list[tuple[Group, Sequence]] = []
        for group in self._running.values():  # which are in order: `check` says so
            for sequence in group.active:
                (decoding if len(sequence.tokens) - sequence.computed == 1 else feeding).append((group, sequence))
        return decoding + feeding

    def _extend(self, group: Group, sequence: Sequence, draft: _Draft) -> None:
        """Plan the sequence's next chunk, taking blocks from the last in rank that run if the pool is dry."""
        end = len(sequence.tokens) if group.forked else group.feed
        length = min(end - sequence.computed, draft.budget)
        if length == 0:
            return
        while not self._make_room(group, sequence, sequence.computed + length, draft):
            victim = self._last
            self._preempt(victim, draft)
            if victim is group:
                return
        draft.put(group, sequence, length)

    def _make_room(self, group: Group, sequence: Sequence, num_tokens: int, draft: _Draft) -> bool:
        """Blocks for `num_tokens` tokens, the one to be written into next its own. False where the pool is dry."""
        table, size = sequence.blocks, self.blocks.block_size
        index = sequence.computed // size
        if index < len(table) and self.blocks.is_shared(table[index]):
            copy = self.blocks.make_writable(table, index)
            if copy is None:
                return False
            draft.copy(group, copy)
        return num_tokens <= len(table) * size or self._grow(group, table, num_tokens)

    def _grow(self, group: Group, table: list[int], num_tokens: int) -> bool:
        before = len(table)
        grown = self.blocks.grow(table, num_tokens)
        group.blocks_new += len(table) - before
        return grown

    def _admit(self, draft: _Draft) -> None:
        """Let waiting requests in, in order. One enters only if the blocks of all its tokens are available and not
        promised to a prompt still being fed; so prompts do not push each other out half-way."""
        room = self._room() if self._waiting else _Room(0, 0)
        while self._waiting and draft.budget > 0:
            group = self._waiting[0]
            hit = self._fit(group, room)
            if hit is not None:
                self._enter(group, hit, draft)
                room.seqs -= len(group.sequences)
                room.promised += self._needs(group) - self._holds(group)
            elif self._running and self._last.rank[0] > group.rank[0]:
                self._preempt(self._last, draft)
                room = self._room()
            else:
                return

    def _room(self) -> _Room:
        running = self._running.values()
        return _Room(
            seqs=self.max_num_seqs - sum(len(group.sequences) for group in running),
            promised=sum(max(0, self._needs(group) - self._holds(group)) for group in running),
        )

    def _enter(self, group: Group, hit: Hit, draft: _Draft) -> None:
        leader = group.leader
        leader.blocks = self.blocks.adopt(hit)
        group.blocks_reused += len(hit.blocks)
        leader.computed = len(hit.blocks) * self.blocks.block_size
        length = min(group.feed - leader.computed - hit.partial_tokens, draft.budget)
        held = leader.computed + hit.partial_tokens + length
        if hit.partial is not None:
            copy = self.blocks.append_copy(leader.blocks, hit.partial)
            assert copy, "a block that was counted available is not"
            draft.copy(group, copy)
            leader.computed += hit.partial_tokens
        grown = self._grow(group, leader.blocks, held)
        assert grown, "blocks that were counted available are not"
        if group.preemptions == 0:
            draft.entered.append(group.key)
            group.cached_tokens = leader.computed
            self._cached_tokens += leader.computed
        last = self._last if self._running else None
        self._running[self._waiting.pop(0).key] = group
        if last and last.rank > group.rank:
            self._running = {one.key: one for one in sorted(self.running, key=_rank)}
        draft.put(group, leader, length)

    @property
    def _last(self) -> Group:
        """Of those that run, the newest of the lowest priority."""
        return next(reversed(self._running.values()))

    def _fit(self, group: Group, room: _Room) -> Hit | None:
        """What the cache has for a request, if all its tokens and samples fit then. What a hit brings back into use is
        no longer available, and nor is what a copy is made from: a copy that leaves no room for the rest is done
        without."""
        if len(group.sequences) > room.seqs:
            return None
        available = self.blocks.num_available - room.promised
        hit = self.blocks.match(group.leader.chain, group.leader.tokens[: group.feed])
        needed = self._needs(group) - len(hit.blocks) + sum(map(self.blocks.is_cached, hit.blocks))
        if needed > available:
            return None
        if hit.partial is not None and needed + self.blocks.is_cached(hit.partial) > available:
            return Hit(hit.blocks)
        return hit

    def _needs(self, group: Group) -> int:
        """Blocks of all the group's tokens so far: full ones of the prompt once, the rest for each sample."""
        return self._once(group) + sum(self.blocks.blocks_for(len(one.tokens)) for one in group.sequences)

    def _holds(self, group: Group) -> int:
        once = self._once(group) if group.forked else 0
        return once + sum(len(one.blocks) for one in group.sequences)

    def _once(self, group: Group) -> int:
        """What to add to a count over samples, so that the blocks they share count once."""
        return -(len(group.sequences) - 1) * (group.leader.num_prompt // self.blocks.block_size)

    def _preempt(self, group: Group, draft: _Draft) -> None:
        """Back to the queue, with all its samples; their tokens are kept and computed again, so none changes."""
        self.blocks.finish(draft.drop(group))
        del self._running[group.key]
        self._release(group)
        group.forked = len(group.sequences) == 1
        group.preemptions += 1
        self._preemptions += 1
        insort(self._waiting, group, key=_rank)

    def _release(self, group: Group) -> None:
        for sequence in group.sequences:
            self.blocks.release(sequence.blocks)
            sequence.computed = 0

    def _book(self, chunk: Chunk) -> None:
        """The chunk's keys and values are in the pages now: blocks that it filled become known by their content."""
        sequence, size = chunk.sequence, self.blocks.block_size
        first, sequence.computed = sequence.computed // size, chunk.start + chunk.length
        for index in range(first, sequence.computed // size):
            self.blocks.seal(sequence.blocks[index], sequence.chain, sequence.tokens, index)

    def _fork(self, group: Group) -> None:
        leader = group.leader
        for sequence in group.sequences[1:]:
            sequence.blocks = self.blocks.fork(leader.blocks)
            sequence.computed = leader.computed
            sequence.chain = leader.chain[: leader.num_prompt // self.blocks.block_size + 1]
        group.forked = True

    def _append(self, group: Group, sequence: Sequence, token: int) -> TokenDelta:
        sequence.tokens.append(token)
        request, generated = sequence.request, sequence.generated
        finish = None
        if token in request.stop_ids and generated >= request.sampling.min_tokens:
            finish = FinishReason.STOP
        elif generated >= request.sampling.max_tokens:
            finish = FinishReason.LENGTH
        if finish:
            self._end(group, sequence)
        return TokenDelta(request.key, (token,), finish, None, sequence.index, group.usage)

    def _end(self, group: Group, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        group.sequences.remove(sequence)
        if not group.sequences:
            self._remove(group)

    def _find(self, key: int) -> Group | None:
        return self._running.get(key) or next((group for group in self._waiting if group.key == key), None)

    def _remove(self, group: Group) -> None:
        if self._running.pop(group.key, None) is None:
            self._waiting.remove(group)


def _rank(group: Group) -> tuple[int, int]:
    return group.rank
