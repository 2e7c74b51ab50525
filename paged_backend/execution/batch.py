"""From a plan of integers to the tensors of one packed row of tokens, and those to the device in one copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from paged_kernels.cascade import find_prefix_groups
from paged_kernels.paging import Paging, SharedPrefixes
from torch import Tensor

from paged_backend.models.adapter_rows import AdapterRows, adapter_rows
from paged_backend.sampling.logprobs import LogprobRows, PromptLogprobRows
from paged_backend.sampling.sampler import SamplingBatch, prepare
from paged_backend.scheduling.plan import Chunk, Plan

ALIGNMENT = 16  # bytes: what the widest type and the kernels ask for


class UniformBatch(NamedTuple):
    """Steps in which every sequence has as many rows, as recorded ones want them."""

    queries: int  # of a sequence
    seqs: int  # of a step, at most


class DraftCheck(NamedTuple):
    """Guesses of one sequence."""

    draw: int  # the one that is held against the first of them
    row: int  # of the first
    draft_tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Drafting:
    """How guesses are made in the batch that checks them: guess i of every sequence that wants as many, in turn."""

    rows: Tensor  # [num_checks] int64: of the token before the first guess; who wants most comes first
    seqs: Tensor  # [num_checks] int64: whose they are, as in the batch
    counts: tuple[int, ...]  # how many sequences want guess i
    sampling: tuple[SamplingBatch, ...]  # of guess i


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Every chunk of a step, end to end in one row."""

    input_ids: Tensor  # [1, num_tokens] int64; -1 - i: what draw i of the step before gives
    position_ids: Tensor  # [1, num_tokens] int64
    paging: Paging
    sample_rows: Tensor  # [num_samples] int64: the rows whose logits are wanted, in order
    draw_rows: Tensor | None  # [num_draws] int64: which of them each draw is from; None: one each, in order
    sampling: SamplingBatch
    uses_previous_step: bool  # whether anything stands for a token of the step before
    checks: tuple[DraftCheck, ...] = ()
    drafting: Drafting | None = None  # where guesses are made on the device
    prompt_chunks: tuple[tuple[int, int], ...] = ()  # chunks with prompt log probabilities, and how many rows of each
    hidden_rows: Tensor | None = None  # [num_hidden] int64: the rows whose hidden states are wanted
    hidden_chunks: tuple[int, ...] = ()  # the chunks that those rows belong to
    adapters: AdapterRows | None = None  # where any row goes through one

    @property
    def is_replayable(self) -> bool:
        """Whether a recorded step does all of it: those give logits, of the model itself, alone."""
        return self.hidden_rows is None and self.adapters is None


def pack(
    plan: Plan,
    *,
    block_size: int,
    draft: bool = False,
    group: int | None = None,
    uniform: UniformBatch | None = None,
) -> PackedBatch:
    """Pack a plan, on the host. draft: its guesses are yet to be made. group: query heads of a KV head, where attention
    can read a prefix that several sequences share once for all of them. uniform: what steps with guesses are brought to
    that are no larger and share nothing, by rows of tokens that were computed before, which write nothing and give
    nothing."""
    chunks = plan.chunks
    firsts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    ends = np.fromiter((chunk.start + chunk.length for chunk in chunks), np.int64, len(chunks))
    tables, lengths = _block_tables(chunks), ends - firsts
    shared = shared_prefixes(tables, ends, lengths, block_size=block_size, group=group) if group is not None else None
    if shared is None:  # only decode rows share
        lengths = _lengths(firsts, ends, uniform)
    starts = ends - lengths
    query_starts = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lengths)
    owner = np.repeat(np.arange(len(chunks)), lengths)
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    slots[positions < firsts[owner]] = -1
    tokens = _tokens(chunks, starts.tolist())
    drawing = [
        (sequence, position)
        for chunk in chunks
        for sequence in chunk.draws
        for position in range(chunk.first_draw, chunk.start + chunk.length + 1)
    ]
    row_ends = query_starts[1:].tolist()
    last = [row for chunk, end in zip(chunks, row_ends, strict=True) for row in _draw_rows(chunk, end)]
    counts = np.fromiter((count for _, count in last), np.int64, len(last))
    sample_rows = np.fromiter((row for row, _ in last), np.int64, len(last))
    draw_rows = np.repeat(np.arange(len(counts)), counts) if (counts > 1).any() else None
    sampling = prepare(drawing)
    if plan.has_prompt_outputs and any(chunk.scored for chunk in chunks):
        drawn_from = np.repeat(sample_rows, counts)
        scored = _scored_rows(chunks, row_ends)
        sample_rows = np.union1d(sample_rows, scored)
        draw_rows = np.searchsorted(sample_rows, drawn_from)
        sampling = replace(sampling, prompts=_prompts(chunks, np.searchsorted(sample_rows, scored)))
    hidden_chunks = tuple(index for index, chunk in enumerate(chunks) if not chunk.draws and chunk.embeds)
    return PackedBatch(
        input_ids=torch.from_numpy(tokens)[None],
        position_ids=torch.from_numpy(positions)[None],
        paging=Paging(
            slots=torch.from_numpy(slots),
            block_tables=torch.from_numpy(tables),
            context_lens=torch.from_numpy(ends.astype(np.int32)),
            query_starts=torch.from_numpy(query_starts.astype(np.int32)),
            max_query_len=int(lengths.max()),
            max_context_len=int(ends.max()),
            shared=shared,
        ),
        sample_rows=torch.from_numpy(sample_rows),
        draw_rows=None if draw_rows is None else torch.from_numpy(draw_rows),
        sampling=sampling,
        uses_previous_step=bool((tokens < 0).any()),
        checks=_checks(chunks, row_ends),
        drafting=_drafting(chunks, row_ends) if draft else None,
        prompt_chunks=tuple((index, len(chunk.scored)) for index, chunk in enumerate(chunks) if chunk.scored)
        if plan.has_prompt_outputs
        else (),
        hidden_rows=torch.tensor([row_ends[index] - 1 for index in hidden_chunks]) if hidden_chunks else None,
        hidden_chunks=hidden_chunks,
        adapters=_adapter_rows(plan, lengths) if plan.adapters else None,
    )


def _adapter_rows(plan: Plan, lengths: np.ndarray) -> AdapterRows:
    adapters = [chunk.sequence.request.adapter for chunk in plan.chunks]
    slots = np.array([plan.adapters[one.digest] if one else -1 for one in adapters], dtype=np.int64)
    return adapter_rows(np.repeat(slots, lengths))


def shared_prefixes(
    tables: np.ndarray, context_lens: np.ndarray, query_lens: np.ndarray, *, block_size: int, group: int
) -> SharedPrefixes | None:
    """As `paged_kernels.cascade.find_groups`, in tensors of the host."""
    groups = find_prefix_groups(tables, context_lens, query_lens, block_size=block_size, group=group)
    if groups is None:
        return None
    lens, members, starts = map(torch.from_numpy, (groups.lens, groups.members, groups.group_starts))
    return SharedPrefixes(lens, members, starts, groups.max_len)


def _draw_rows(chunk: Chunk, end: int) -> list[tuple[int, int]]:
    """The rows before `end` that a chunk draws from, and how often from each."""
    count = len(chunk.draws)
    return [(row, count) for row in range(end - 1 - len(chunk.draft_tokens), end)] if count else []


def _checks(chunks: tuple[Chunk, ...], row_ends: list[int]) -> tuple[DraftCheck, ...]:
    found, draw = [], 0
    for chunk, end in zip(chunks, row_ends, strict=True):
        if chunk.draft_tokens:
            found.append(DraftCheck(draw, end - len(chunk.draft_tokens), chunk.draft_tokens))
        draw += len(chunk.draws) + len(chunk.draft_tokens)
    return tuple(found)


def _scored_rows(chunks: tuple[Chunk, ...], row_ends: list[int]) -> np.ndarray:
    firsts = [end - chunk.start - chunk.length for chunk, end in zip(chunks, row_ends, strict=True)]
    rows = [first + position for chunk, first in zip(chunks, firsts, strict=True) for position in chunk.scored]
    return np.array(rows, dtype=np.int64)


def _prompts(chunks: tuple[Chunk, ...], rows: np.ndarray) -> PromptLogprobRows:
    """rows: of the logits, in which the chunks' scored positions are."""
    counts = [chunk.sequence.request.sampling.prompt_logprobs or 0 for chunk in chunks for _ in chunk.scored]
    tokens = [chunk.sequence.tokens[position + 1] for chunk in chunks for position in chunk.scored]
    return PromptLogprobRows(LogprobRows(torch.from_numpy(rows), tuple(counts)), torch.tensor(tokens))


def _drafting(chunks: tuple[Chunk, ...], row_ends: list[int]) -> Drafting | None:
    draft_ids = [(index, chunk) for index, chunk in enumerate(chunks) if chunk.draft_tokens]
    if not draft_ids:
        return None
    draft_ids.sort(key=lambda one: -len(one[1].draft_tokens))
    rounds = [
        [(chunk.sequence, chunk.first_draw + turn) for _, chunk in draft_ids if turn < len(chunk.draft_tokens)]
        for turn in range(len(draft_ids[0][1].draft_tokens))
    ]
    return Drafting(
        rows=torch.tensor([row_ends[index] - len(chunk.draft_tokens) - 1 for index, chunk in draft_ids]),
        seqs=torch.tensor([index for index, _ in draft_ids]),
        counts=tuple(map(len, rounds)),
        sampling=tuple(map(prepare, rounds)),
    )


def _lengths(firsts: np.ndarray, ends: np.ndarray, uniform: UniformBatch | None) -> np.ndarray:
    """Rows of each sequence, from how many tokens are computed before and after the step."""
    lengths: np.ndarray = ends - firsts
    if uniform and len(ends) <= uniform.seqs and 1 < lengths.max() <= uniform.queries <= ends.min():
        return np.full_like(lengths, uniform.queries)
    return lengths


def _tokens(chunks: tuple[Chunk, ...], starts: list[int]) -> np.ndarray:
    tokens = [
        t
        for chunk, start in zip(chunks, starts, strict=True)
        for t in chunk.sequence.tokens[start : chunk.start + chunk.length]
    ]
    return np.array(tokens, dtype=np.int64)


def _block_tables(chunks: tuple[Chunk, ...]) -> np.ndarray:  # [num_seqs, max_blocks] int32
    width = max(len(chunk.sequence.blocks) for chunk in chunks)
    tables = np.zeros((len(chunks), width), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.sequence.blocks)] = chunk.sequence.blocks
    return tables


def resolve_placeholders(tokens: Tensor, drawn: Tensor) -> Tensor:
    """Put what the step before drew, [num_draws] int64, in place of what stands for it."""
    return tokens.where(tokens >= 0, drawn[(-1 - tokens).clamp(min=0)])


class _Buffer:
    """Page-locked memory, and when the device has taken what was in it."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.taken = torch.cuda.Event()

    def reserve(self, size: int) -> Tensor:
        self.taken.synchronize()
        if len(self.bytes) < size:
            self.bytes = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        return self.bytes[:size]


T = TypeVar("T")


class DeviceUpload:
    """Takes the tensors of a dataclass, and of those in it, to the device. To a GPU all go in one copy from page-locked
    memory, which the host does not wait for; there are two such buffers, so that one is filled while the other is
    read."""

    def __init__(self, device: torch.device | None):
        """device: None where the tensors are there already."""
        self._device = device
        self._buffers = [_Buffer(), _Buffer()] if device is not None and device.type == "cuda" else []

    def __call__(self, tree: T, head: Tensor | None = None) -> T:
        """The same on the device. head: where the first bytes have to go, for somebody who looks for them there; they
        take a copy of their own."""
        if not self._buffers:
            if head is not None:
                _fill(head, _parts(tree))
            return tree
        self._buffers.reverse()
        parts, fixed = _parts(tree), 0 if head is None else len(head)
        here = self._buffers[0].reserve(_ends(parts)[-1])
        _fill(here, parts)
        if head is not None:
            head.copy_(here[:fixed], non_blocking=True)
        there = here[fixed:].to(self._device, non_blocking=True)
        self._buffers[0].taken.record()
        return self.views(tree, there, fixed)

    @staticmethod
    def size_of(tree: Any) -> int:
        return _ends(_parts(tree))[-1]

    @staticmethod
    def views(tree: T, there: Tensor, left_out: int = 0) -> T:
        """A tree of tensors that lie in `there` [bytes] uint8, one after the other; the first `left_out` bytes of them
        lie elsewhere and stay as they are."""
        starts = iter([0, *_ends(_parts(tree))])

        def view(part: Tensor) -> Tensor:
            start = next(starts) - left_out
            return part if start < 0 else there[start : start + part.nbytes].view(part.dtype).view(part.shape)

        return _map(tree, view)


def _parts(tree: Any) -> list[Tensor]:
    parts: list[Tensor] = []

    def take(part: Tensor) -> Tensor:
        parts.append(part)
        return part

    _map(tree, take)
    return parts


def _ends(parts: list[Tensor]) -> list[int]:
    return list(itertools.accumulate(-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts))


def _fill(memory: Tensor, parts: list[Tensor]) -> None:
    """Write parts one after the other, as far as there is memory."""
    for part, start in zip(parts, [0, *_ends(parts)], strict=False):
        if start == len(memory):
            break
        memory[start : start + part.nbytes].copy_(part.contiguous().view(-1).view(torch.uint8))


def _map(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass with every tensor in it, and in those in it, changed; always in the same order."""
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) is tuple:
        return tuple(_map(one, change) for one in tree)
    if not is_dataclass(tree):
        return tree
    return replace(tree, **{one.name: _map(getattr(tree, one.name), change) for one in fields(tree)})
