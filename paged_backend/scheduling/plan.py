"""The plan of one step, as integers: which blocks to move and copy, and which tokens to compute for which sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paged_backend.api.trace import RequestTrace
from paged_backend.scheduling.adapter_slots import AdapterLoad
from paged_backend.scheduling.block_manager import Copy
from paged_backend.scheduling.host_offload import BlockTransfer
from paged_backend.scheduling.sequence import Sequence
from paged_backend.scheduling.state_slots import NO_STATE_COPIES, StateCopies


class Allocation(NamedTuple):
    """The blocks allocated to a sequence for a chunk."""

    new: int
    copied: int  # new blocks that are copies on write, a part of `new`


NO_BLOCKS = Allocation(0, 0)


@dataclass(slots=True)
class Chunk:
    """Tokens `start` to `start + length` of a sequence, computed in one step: prefill, decode and speculation alike.

    `sampled_sequences` are the sequences that sample a token after the chunk's last token: none in the middle of a
    prompt or without output; the sequence itself in decode; all sequences of the group at the end of the prompt. If the
    last tokens are draft tokens, one token is also sampled before each of them.
    """

    sequence: Sequence
    start: int
    length: int
    sampled_sequences: tuple[Sequence, ...]
    allocated: Allocation = NO_BLOCKS  # counted in the usage unless the sequence ends before the commit
    forks: tuple[Sequence, ...] = ()  # sequences that share the chunk's blocks once it is computed
    draft_tokens: tuple[int, ...] = ()
    draft_slots: tuple[int, ...] = ()  # slots for the recurrent states after each draft token
    scored: range = range(0)  # prompt positions whose next token gets log probabilities
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

    def add_draft_tokens(self, tokens: list[int], num_new_blocks: int, state_slots: tuple[int, ...] = ()) -> None:
        """Add these draft tokens to the chunk, which verifies them. num_new_blocks: blocks allocated for them.
        state_slots: slots for the recurrent states after each."""
        self.draft_tokens, self.draft_slots = tuple(tokens), state_slots
        self.length += len(tokens)
        if num_new_blocks:
            self.allocated = Allocation(self.allocated.new + num_new_blocks, self.allocated.copied)


@dataclass(frozen=True)
class Costs:
    """Measured seconds that decide whether copying is cheaper than recomputing."""

    token: float = 1.0  # time to compute a token, in a full step
    copy: float = 0.0  # time to copy a block on the device
    move: float = 0.0  # time to copy a block between device and host
    move_state: float = 0.0  # time to copy the state of a sequence between device and host


class TracedWork(NamedTuple):
    """Work of a step for a traced request: prefill, or moving its blocks between device and host. Not decode."""

    trace: RequestTrace
    name: str
    attributes: Mapping[str, int]


@dataclass(frozen=True)
class Plan:
    """The plan of one step, in order of execution: moves out, moves in, copies, then the chunks in the order of their
    rows, decode first."""

    chunks: tuple[Chunk, ...]
    moves_out: tuple[BlockTransfer, ...] = ()  # device to host
    moves_in: tuple[BlockTransfer, ...] = ()  # host to device
    copies: tuple[Copy, ...] = ()
    admitted: tuple[int, ...] = ()  # keys of requests that are computed for the first time
    planned_at: float = 0.0  # time by the scheduler's clock
    prefill_tokens: int | None = None  # prompt tokens in a step that also decodes; None in a step without decode
    loads: tuple[AdapterLoad, ...] = ()  # adapters to load before the step
    adapters: Mapping[bytes, int] = field(default_factory=dict)  # slots of the adapters in use, by digest
    has_prompt_outputs: bool = False  # whether any chunk has `scored` or `ends_request` set
    traced: tuple[TracedWork, ...] = ()
    states: StateCopies = NO_STATE_COPIES  # of recurrent layers, before the chunks

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def add_to_traces(self, finished_at: float) -> None:
        """Add the step's work to the traces of its requests."""
        for work in self.traced:
            work.trace.add(work.name, self.planned_at, finished_at, **work.attributes)
