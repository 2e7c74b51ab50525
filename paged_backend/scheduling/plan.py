"""One step of the engine, as integers: what is to be moved, copied and computed, and for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paged_backend.scheduling.adapter_slots import AdapterSlots, Load
from paged_backend.scheduling.block_manager import BlockManager, Copy, Move
from paged_backend.scheduling.sequence import Group, Sequence

MOST_SCORED = 256  # rows of prompts in a step, whose logits take memory for each token of the vocabulary


@dataclass(slots=True)
class Chunk:
    """Tokens `start` to `start + length` of a sequence, and the sequences that draw a token after the last of them:
    none where more of the prompt is to come or no output is wanted, its own in decode, all of its group's at the end of
    their prompt. The last of the tokens may be guesses: then one is drawn before each of them, too."""

    sequence: Sequence
    start: int
    length: int
    draws: tuple[Sequence, ...]
    forks: tuple[Sequence, ...] = ()  # who shares its blocks from then on
    draft_tokens: tuple[int, ...] = ()
    scored: range = range(0)  # positions in the prompt after which the next token is to be scored
    ends_all: bool = False  # whether it ends a prompt that no token is to follow
    blocks_new: int = 0  # that its sequence, which may turn out to have ended, was given for it
    blocks_copied: int = 0  # of those

    @property
    def first_draw(self) -> int:
        """The position of the first token that it draws."""
        return self.start + self.length - len(self.draft_tokens)

    @property
    def embeds(self) -> bool:
        """Whether the hidden state of its last token is what its request asks for."""
        return self.sequence.request.embeds and self.ends_all


@dataclass(frozen=True)
class Costs:
    """What decides whether a copy is cheaper than computing again. Seconds, measured when the model is loaded."""

    token: float = 1.0  # to compute one, in a full step
    copy: float = 0.0  # to copy a block on the device
    move: float = 0.0  # to copy a block between device and host


@dataclass(frozen=True)
class Plan:
    """One step. First the moves out, then those in, then the copies; then chunks in the order of their rows, decode
    first."""

    chunks: tuple[Chunk, ...]
    moves_out: tuple[Move, ...] = ()  # device to host
    moves_in: tuple[Move, ...] = ()  # host to device
    copies: tuple[Copy, ...] = ()
    entered: tuple[int, ...] = ()  # keys of requests that compute for the first time
    began: float = 0.0  # when it was planned, by the scheduler's clock
    fed: int | None = None  # tokens of prompts beside sequences that decode; None where none does
    loads: tuple[Load, ...] = ()  # adapters to be put on the device
    adapters: Mapping[bytes, int] = field(default_factory=dict)  # the slots of those that are used, by content
    has_prompt_outputs: bool = False  # whether chunks may be scored, or end all

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass
class Draft:
    """A plan in the making: what each group computes, and how many tokens the step can still take."""

    budget: int
    began: float = 0.0
    scores: int = MOST_SCORED  # rows of prompts that may still be scored
    has_prompt_outputs: bool = False
    fed: int | None = None
    chunks: list[Chunk] = field(default_factory=list)
    copies: dict[int, list[Copy]] = field(default_factory=dict)
    moves_in: dict[int, list[Move]] = field(default_factory=dict)
    entered: list[int] = field(default_factory=list)

    def room(self, group: Group, start: int, length: int) -> int:
        """How many of `length` tokens of a prompt that is scored, from `start` on, the step can still take."""
        unscored = group.unscored(start, start + length)
        return length if len(unscored) <= self.scores else unscored.start + self.scores - start

    def put(self, group: Group, sequence: Sequence, length: int) -> Chunk:
        start = sequence.computed
        draws: tuple[Sequence, ...] = ()
        last = start + length == len(sequence.tokens)
        if last and group.has_output:
            draws = (sequence,) if group.forked else tuple(group.sequences)
        self.chunks.append(chunk := Chunk(sequence, start, length, draws))
        self.budget -= length
        if group.scores_prompt or not group.has_output:
            chunk.scored, chunk.ends_all = group.unscored(start, start + length), last and not group.has_output
            self.scores -= len(chunk.scored)
            self.has_prompt_outputs = True
        return chunk

    def copy(self, group: Group, copy: Copy) -> None:
        group.blocks_new += 1
        group.blocks_copied += 1
        self.copies.setdefault(group.key, []).append(copy)

    def bring(self, group: Group, moves: list[Move]) -> None:
        if moves:
            group.blocks_new += len(moves)
            group.blocks_from_host += len(moves)
            self.moves_in.setdefault(group.key, []).extend(moves)

    def drop(self, group: Group) -> tuple[list[Copy], list[Move]]:
        """Take a group out; the copies and moves that it no longer needs."""
        dropped = [chunk for chunk in self.chunks if chunk.sequence.request is group.request]
        self.budget += sum(chunk.length for chunk in dropped)
        self.scores += sum(len(chunk.scored) for chunk in dropped)
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence.request is not group.request]
        return self.copies.pop(group.key, []), self.moves_in.pop(group.key, [])

    def plan(self, blocks: BlockManager, slots: AdapterSlots) -> Plan | None:
        if not self.chunks:
            return None
        return Plan(
            tuple(self.chunks), blocks.take_moves_out(), _flat(self.moves_in), _flat(self.copies), tuple(self.entered),
            self.began, self.fed, slots.take_loads(), slots.of(chunk.sequence.request for chunk in self.chunks),
            self.has_prompt_outputs,
        )  # fmt: skip


def _flat(parts: dict[int, list[Any]]) -> tuple[Any, ...]:
    return tuple(one for part in parts.values() for one in part)
