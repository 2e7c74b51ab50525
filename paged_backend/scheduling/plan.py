"""The plan of one step, as integers: which blocks to move and copy, and which tokens to compute for which sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paged_backend.scheduling.adapter_slots import AdapterLoad
from paged_backend.scheduling.block_manager import Copy
from paged_backend.scheduling.host_offload import Move
from paged_backend.scheduling.sequence import Sequence


class Allocation(NamedTuple):
    """Blocks that a sequence was given for a chunk."""

    new: int
    copied: int  # of the new ones, those of a copy-on-write


NO_BLOCKS = Allocation(0, 0)


@dataclass(slots=True)
class Chunk:
    """Tokens `start` to `start + length` of a sequence, computed in one step: prefill, decode and speculation alike.

    `draws` are the sequences that sample a token after the last of them: none where more of the prompt is to come or no
    output is wanted, its own in decode, all of its group's at the end of their prompt. The last of the tokens may be
    draft tokens; then one token is also sampled before each of those.
    """

    sequence: Sequence
    start: int
    length: int
    draws: tuple[Sequence, ...]
    allocated: Allocation = NO_BLOCKS  # counted in the request's usage unless the sequence has ended by the commit
    forks: tuple[Sequence, ...] = ()  # sequences that share its blocks from then on
    draft_tokens: tuple[int, ...] = ()
    scored: range = range(0)  # positions of the prompt after which the next token gets log probabilities
    ends_request: bool = False  # whether it ends the prompt of a request without output

    @property
    def first_draw(self) -> int:
        """The position of the first token that is sampled."""
        return self.start + self.length - len(self.draft_tokens)

    @property
    def embeds(self) -> bool:
        """True if the chunk ends the prompt of an embedding request, which gets the hidden state of its last token."""
        return self.sequence.request.embeds and self.ends_request

    def add_draft_tokens(self, tokens: list[int], num_new_blocks: int) -> None:
        """Verify these tokens in the chunk as well. num_new_blocks: that the sequence was given for them."""
        self.draft_tokens = tuple(tokens)
        self.length += len(tokens)
        if num_new_blocks:
            self.allocated = Allocation(self.allocated.new + num_new_blocks, self.allocated.copied)


@dataclass(frozen=True)
class Costs:
    """Measured seconds that decide whether copying is cheaper than recomputing."""

    token: float = 1.0  # to compute a token, in a full step
    copy: float = 0.0  # to copy a block on the device
    move: float = 0.0  # to copy a block between device and host


@dataclass(frozen=True)
class Plan:
    """One step: first the moves out, then the moves in, then the copies, then the chunks in the order of their rows,
    decode first."""

    chunks: tuple[Chunk, ...]
    moves_out: tuple[Move, ...] = ()  # device to host
    moves_in: tuple[Move, ...] = ()  # host to device
    copies: tuple[Copy, ...] = ()
    admitted: tuple[int, ...] = ()  # keys of requests that compute for the first time
    planned_at: float = 0.0  # by the scheduler's clock
    prefill_tokens: int | None = None  # prompt tokens beside sequences that decode; None where none decodes
    loads: tuple[AdapterLoad, ...] = ()  # adapters to be loaded first
    adapters: Mapping[bytes, int] = field(default_factory=dict)  # slots of the adapters in use, by digest
    has_prompt_outputs: bool = False  # whether any chunk has `scored` or `ends_request` set

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)
