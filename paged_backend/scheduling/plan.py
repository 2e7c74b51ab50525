"""The plan of one step, as integers: which blocks to move and copy, and which tokens to compute for which sequence; and
the results of the step, as the runner returns them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paged_backend.api.errors import RequestError
from paged_backend.api.request import HiddenState
from paged_backend.api.trace import RequestTrace
from paged_backend.kv.blocks import NO_BLOCKS, Allocation, BlockManager
from paged_backend.kv.ledger import NO_TRANSFERS, Transfers
from paged_backend.kv.sequence import Sequence
from paged_backend.scheduling.adapter_slots import AdapterLoad, AdapterSlots
from paged_backend.scheduling.beam_search import Candidate
from paged_backend.scheduling.group import Group

MAX_SCORED = 256  # prompt positions with optional outputs in a step: each needs the logits of the whole vocabulary


@dataclass(slots=True)
class Chunk:
    """Tokens `start` to `start + length` of a sequence, computed in one step: prefill, decode and speculation alike.

    `sampled_sequences` are the sequences that sample a token after the chunk's last token: no sequence in the middle of
    a prompt or without output; the sequence itself in decode; all sequences of the group at the end of the prompt. If
    the last tokens are draft tokens, one token is also sampled before each of them.
    """

    sequence: Sequence
    start: int
    length: int
    sampled_sequences: tuple[Sequence, ...]
    allocated: Allocation = NO_BLOCKS  # counted in the usage unless the sequence ends before the commit
    forks: tuple[Sequence, ...] = ()  # sequences that share the chunk's blocks once it is computed
    draft_tokens: tuple[int, ...] = ()
    draft_states: tuple[int, ...] = ()  # blocks for the states of recurrent layers after each draft token
    scored: range = range(0)  # prompt positions whose next token gets optional outputs
    ends_request: bool = False  # whether the chunk ends the prompt of a request without output

    @property
    def first_sampled(self) -> int:
        """The position of the first token that is sampled."""
        return self.start + self.length - len(self.draft_tokens)

    @property
    def is_decode(self) -> bool:
        """Whether the chunk computes one token of the output, and draft tokens after it."""
        return self.first_sampled == self.start + 1 and self.start >= self.sequence.num_prompt

    @property
    def embeds(self) -> bool:
        """True if the chunk ends the prompt of an embedding request, which gets the hidden state of its last token."""
        return self.sequence.request.embeds and self.ends_request

    def add_draft_tokens(self, tokens: list[int], allocated: Allocation, states: tuple[int, ...] = ()) -> None:
        """Add these draft tokens to the chunk, which verifies them. allocated: blocks allocated for them. states:
        blocks for the states of recurrent layers after each of them."""
        self.draft_tokens, self.draft_states = tuple(tokens), states
        self.length += len(tokens)
        if allocated.new:
            self.allocated = Allocation(self.allocated.new + allocated.new, self.allocated.copied)


@dataclass(frozen=True)
class Costs:
    """Measured seconds that decide whether copying is cheaper than recomputing."""

    token: float = 1.0  # time to compute a token, in a full step
    copy: float = 0.0  # time to copy a page on the device
    move: float = 0.0  # time to copy a page between device and host


class TracedWork(NamedTuple):
    """Work of a step for a traced request: prefill, or moving its blocks between device and host. Not decode."""

    trace: RequestTrace
    name: str
    attributes: Mapping[str, int]


@dataclass(frozen=True)
class Plan:
    """The plan of one step, in order of execution: transfers, adapter loads, then the chunks in the order of their
    rows, decode first."""

    chunks: tuple[Chunk, ...] = ()
    transfers: Transfers = NO_TRANSFERS
    admitted: tuple[int, ...] = ()  # keys of requests that are computed for the first time
    planned_at: float = 0.0  # time by the scheduler's clock
    prefill_tokens: int | None = None  # prompt tokens in a step that also decodes; None in a step without decode
    loads: tuple[AdapterLoad, ...] = ()  # adapters to load before the step
    adapters: Mapping[bytes, int] = field(default_factory=dict)  # slots of the adapters in use, by digest
    has_prompt_outputs: bool = False  # whether any chunk has `scored` or `ends_request` set
    traced: tuple[TracedWork, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def add_to_traces(self, finished_at: float) -> None:
        """Add the step's work to the traces of its requests."""
        for work in self.traced:
            work.trace.add(work.name, self.planned_at, finished_at, **work.attributes)


class PlanBuilder:
    """Builds a plan and keeps the remaining budgets of the step."""

    def __init__(self, budget: int, planned_at: float, *, in_flight: bool, max_scored: int = MAX_SCORED):
        """budget: tokens of the step. in_flight: whether another step is in flight; then no request may be
        preempted."""
        self.budget = budget
        self.scored_budget = max_scored  # prompt positions that may still get optional outputs
        self.planned_at = planned_at
        self.in_flight = in_flight
        self.blocked = False  # whether a request waits for the commit of the step in flight
        self.prefill_tokens: int | None = None
        self.chunks: list[Chunk] = []
        self.admitted: list[int] = []
        self._has_traces = False  # whether any chunk belongs to a traced request
        self._moved: list[TracedWork] = []
        self._has_prompt_outputs = False

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

    def remove(self, group: Group) -> None:
        """Remove the chunks of a request."""
        removed = [chunk for chunk in self.chunks if chunk.sequence.request is group.request]
        self.budget += sum(chunk.length for chunk in removed)
        self.scored_budget += sum(len(chunk.scored) for chunk in removed)
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence.request is not group.request]

    def build(self, blocks: BlockManager, slots: AdapterSlots) -> Plan | None:
        """Return the plan with all planned transfers and adapter loads; None if it has no chunk."""
        if not self.chunks:
            return None
        if blocks.states:
            blocks.states.keep(chunk.sequence for chunk in self.chunks)
        return Plan(
            chunks=tuple(self.chunks),
            transfers=blocks.ledger.take(),
            admitted=tuple(self.admitted),
            planned_at=self.planned_at,
            prefill_tokens=self.prefill_tokens,
            loads=slots.take_loads(),
            adapters=slots.slots_of(chunk.sequence.request for chunk in self.chunks),
            has_prompt_outputs=self._has_prompt_outputs,
            traced=(*self._moved, *self._traced_chunks()),
        )

    def _traced_chunks(self) -> Iterator[TracedWork]:
        for chunk in self.chunks if self._has_traces else ():
            trace = chunk.sequence.request.trace
            if trace and not chunk.is_decode:
                attributes = {"paged_llm.first_token": chunk.start, "paged_llm.tokens": chunk.length}
                yield TracedWork(trace, "prefill", attributes)


@dataclass(frozen=True)
class StepResult:
    """The results of a step, by sampled sequence or by chunk.

    The sequences in `Chunk.sampled_sequences` are numbered from 0 over all chunks, in the plan's order. A sequence or
    chunk without a value is missing from the mapping.
    """

    tokens: Items[list[int]]  # per sequence: the sampled token; or accepted draft tokens, then the bonus token
    # By output and sequence: a value per token.
    values: Mapping[str, Mapping[int, list[Any]]] = field(default_factory=dict)
    candidates: Mapping[int, list[Candidate]] = field(default_factory=dict)  # by sequence, for live beams
    errors: Mapping[int, RequestError] = field(default_factory=dict)  # by sequence: why it has no token
    # By output and chunk: a value per scored position.
    prompt_values: Mapping[str, Mapping[int, list[Any]]] = field(default_factory=dict)
    hidden_states: Mapping[int, HiddenState] = field(default_factory=dict)  # by chunk, for embedding requests
    prompt_errors: Mapping[int, RequestError] = field(default_factory=dict)  # by chunk: why it lacks prompt results

    @classmethod
    def of_tokens(cls, tokens: Iterable[int]) -> StepResult:
        """Return a result with one sampled token for each sampled sequence and nothing else."""
        return cls([[token] for token in tokens])


def accept_draft_tokens(sampled: Items[int], draft_tokens: Items[int]) -> list[int]:
    """Return the tokens that verification accepts: `sampled` up to and including the first that differs from its draft.

    sampled: the token sampled before each draft token, and the token after the last (the bonus token).
    """
    accepted = 0
    while accepted < len(draft_tokens) and sampled[accepted] == draft_tokens[accepted]:
        accepted += 1
    return list(sampled[: accepted + 1])
