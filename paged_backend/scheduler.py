"""Continuous batching with chunked prefill: who computes what in the next step. Integers only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from paged_backend.block_manager import BlockManager
from paged_backend.request import ErrorCode, FinishReason, GenerateRequest, RequestError, TokenDelta
from paged_backend.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `start + length` of a sequence. Decode is a chunk of length 1, a prefill chunk that is
    not the prompt's last is one that does not sample; there is no other difference."""

    sequence: Sequence
    start: int
    length: int
    samples: bool

    def __post_init__(self) -> None:
        assert self.length >= 1 and self.start == self.sequence.computed, self
        assert self.samples == (self.start + self.length == len(self.sequence.tokens)), self


@dataclass(frozen=True)
class Plan:
    """One step: chunks in the order of their rows, decode first."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class _Draft:
    """A plan in the making: what each sequence computes, and how many tokens the step can still take."""

    def __init__(self, budget: int):
        self.budget = budget
        self.chunks: dict[int, Chunk] = {}

    def put(self, sequence: Sequence, length: int) -> None:
        samples = length == sequence.pending
        self.chunks[sequence.key] = Chunk(sequence, sequence.computed, length, samples)
        self.budget -= length

    def drop(self, key: int) -> None:
        if chunk := self.chunks.pop(key, None):
            self.budget += chunk.length


@dataclass(frozen=True)
class SchedulerStats:
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    preemptions: int


class Scheduler:
    """First come, first served. `schedule` plans a step, `commit` books its tokens; both on the engine thread."""

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int):
        assert max_num_batched_tokens >= max_num_seqs >= 1
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            len(self._running), len(self._waiting), self.blocks.num_blocks, self.blocks.num_used, self._preemptions
        )

    def add(self, request: GenerateRequest) -> None:
        self._waiting.append(Sequence.of(request))

    def abort(self, key: int) -> bool:
        """Drop a request wherever it is; its blocks are free at once. False where it had ended already."""
        if sequence := self._running.pop(key, None):
            self.blocks.release(sequence.blocks)
            return True
        for sequence in self._waiting:
            if sequence.key == key:
                self._waiting.remove(sequence)
                return True
        return False

    def abort_all(self) -> list[int]:
        """Drop every request; their keys."""
        keys = [sequence.key for sequence in self._sequences()]
        for key in keys:
            self.abort(key)
        return keys

    def schedule(self) -> Plan | None:
        """The next step, or None where nothing can run."""
        draft = _Draft(self.max_num_batched_tokens)
        preempted = self._preemptions
        for sequence in self._running_in_order():
            if sequence.key in self._running:  # an earlier one in this loop may have taken its blocks
                self._extend(sequence, draft)
        if self._preemptions == preempted:
            self._admit(draft)
        return Plan(tuple(draft.chunks.values())) if draft.chunks else None

    def commit(self, plan: Plan, token_ids: list[int]) -> list[TokenDelta]:
        """Book a step that ran: one token id per sampling chunk, in the plan's order."""
        drawn = iter(token_ids)
        deltas = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed += chunk.length
            if chunk.samples:
                deltas.append(self._append(sequence, next(drawn)))
        assert next(drawn, None) is None, "more tokens than sampling chunks"
        return deltas

    def fail(self, plan: Plan, message: str) -> list[TokenDelta]:
        """A step that could not run ends the requests in it, and no other."""
        error = RequestError(ErrorCode.INTERNAL, message)
        return [TokenDelta(chunk.sequence.key, error=error) for chunk in plan.chunks if self.abort(chunk.sequence.key)]

    def check(self) -> None:
        """Assert every invariant of scheduler and pool; for tests and idle moments."""
        assert len(self._running) <= self.max_num_seqs
        for sequence in self._running.values():
            assert 0 <= sequence.computed <= len(sequence.tokens)
            assert sequence.computed <= len(sequence.blocks) * self.blocks.block_size
        assert all(not sequence.blocks and sequence.computed == 0 for sequence in self._waiting)
        self.blocks.check(sequence.blocks for sequence in self._sequences())

    def _sequences(self) -> Iterator[Sequence]:
        yield from self._running.values()
        yield from self._waiting

    def _running_in_order(self) -> list[Sequence]:
        """Decode first, so that a long prompt never delays the streams that already flow; then by arrival."""
        return sorted(self._running.values(), key=lambda sequence: (sequence.pending > 1, sequence.key))

    def _extend(self, sequence: Sequence, draft: _Draft) -> None:
        """Plan the sequence's next chunk, taking blocks from the newest running ones if the pool is dry."""
        length = min(sequence.pending, draft.budget)
        if length == 0:
            return
        while not self.blocks.grow(sequence.blocks, sequence.computed + length):
            victim = self._running[max(self._running)]
            self._preempt(victim)
            draft.drop(victim.key)
            if victim is sequence:
                return
        draft.put(sequence, length)

    def _admit(self, draft: _Draft) -> None:
        """Let waiting requests in, in order. One enters only if the blocks of all its tokens are free and not
        promised to a prompt still being fed; so prompts do not push each other out half-way."""
        promised = sum(
            self.blocks.blocks_for(len(sequence.tokens)) - len(sequence.blocks) for sequence in self._running.values()
        )
        while self._waiting and draft.budget > 0 and len(self._running) < self.max_num_seqs:
            sequence = self._waiting[0]
            needed = self.blocks.blocks_for(len(sequence.tokens))
            if needed > self.blocks.num_free - promised:
                return
            length = min(sequence.pending, draft.budget)
            grown = self.blocks.grow(sequence.blocks, length)
            assert grown, "blocks that were counted free are not"
            promised += needed - len(sequence.blocks)
            self._running[self._waiting.popleft().key] = sequence
            draft.put(sequence, length)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, before all newer ones; its tokens are kept and computed again, so none changes."""
        del self._running[sequence.key]
        self.blocks.release(sequence.blocks)
        sequence.computed = 0
        sequence.preemptions += 1
        self._preemptions += 1
        position = next((i for i, other in enumerate(self._waiting) if other.key > sequence.key), len(self._waiting))
        self._waiting.insert(position, sequence)

    def _append(self, sequence: Sequence, token: int) -> TokenDelta:
        sequence.tokens.append(token)
        finish = None
        if token in sequence.request.stop_ids and sequence.generated >= sequence.request.sampling.min_tokens:
            finish = FinishReason.STOP
        elif sequence.generated >= sequence.request.sampling.max_tokens:
            finish = FinishReason.LENGTH
        if finish:
            del self._running[sequence.key]
            self.blocks.release(sequence.blocks)
        return TokenDelta(sequence.key, (token,), finish)
