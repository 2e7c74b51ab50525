"""Packs a plan of integers into the tensors of one batch: the tokens of every chunk, end to end in one row."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from paged_backend.kv.sequence import SamplePosition
from paged_backend.models.lora import AdapterRows, adapter_rows
from paged_backend.models.state_rows import PageRows, StateRows, state_rows
from paged_backend.sampling.outputs import OutputRows, request_prompt_rows
from paged_backend.sampling.sampler import SamplingBatch, prepare, resolve_tokens
from paged_backend.scheduling.plan import Chunk, Plan
from paged_kernels.paging import Paging, SharedPrefixes, find_prefix_groups

# Takes a kind of layer and its block tables [num_seqs, max_blocks] int32; returns tables of the pages of these blocks.
PageTables: TypeAlias = Callable[[int, np.ndarray], list[np.ndarray]]


def consecutive_page_tables(count: int = 1) -> PageTables:
    """Return a function that returns page tables of sequences with one block table, whose blocks have `count` pages one
    after the other, of all kinds of layers."""
    return lambda kind, tables: [tables * np.int32(count) + np.int32(page) for page in range(count)]


BLOCKS_ARE_PAGES = consecutive_page_tables()


def consecutive_pages(count: int) -> PageRows:
    """Return a function that returns the pages of blocks with states: `count` pages that begin at each block."""
    return lambda blocks: np.array(blocks)[:, None] + np.arange(count)


class UniformBatch(NamedTuple):
    """A batch with the same number of rows for every sequence, as some CUDA graphs expect it."""

    queries: int  # rows per sequence
    seqs: int  # maximum sequences in a step


class DraftCheck(NamedTuple):
    """The draft tokens of one sequence, to compare with its sampled tokens."""

    first_sample: int  # index of the sampled token that is compared with the first draft token
    row: int  # row of the first draft token
    draft_tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Drafting:
    """The rounds in which a draft model proposes tokens, in the batch that verifies them. Round i proposes draft token
    i of every sequence with more than i draft tokens. Sequences with the most draft tokens come first."""

    rows: Tensor  # [num_checks] int64: row of the token before the first draft token
    seqs: Tensor  # [num_checks] int64: the sequence's index in the batch
    counts: tuple[int, ...]  # sequences that take part in each round
    sampling: tuple[SamplingBatch, ...]  # sampling inputs of each round


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The tensors of a step, with all chunks end to end in one row."""

    input_ids: Tensor  # [1, num_tokens] int64; -1 - i is a placeholder for sample i of the previous step
    position_ids: Tensor  # [1, num_tokens] int64
    pagings: tuple[Paging, ...]  # one for each page of a block; they differ in slots and block tables only
    sample_rows: Tensor  # [num_samples] int64: the rows whose logits are needed, in order
    logit_rows: Tensor | None = None  # [num_sampled] int64: row of the logits per token; None: one row each, in order
    sampling: SamplingBatch = SamplingBatch()  # noqa: RUF009 (it is immutable)
    uses_previous_step: bool = False  # whether there are placeholders for tokens of the previous step
    checks: tuple[DraftCheck, ...] = ()
    drafting: Drafting | None = None  # None: no draft model proposes tokens
    hidden_rows: Tensor | None = None  # [num_hidden] int64: the rows whose hidden states are needed
    hidden_chunks: tuple[int, ...] = ()  # chunks of hidden_rows
    adapters: AdapterRows | None = None  # None: no row uses a LoRA adapter
    state_rows: StateRows | None = None  # None: the model has no recurrent layers

    @property
    def paging(self) -> Paging:
        """The addresses in the first page of each block, and the lengths of the sequences."""
        return self.pagings[0]

    @property
    def is_replayable(self) -> bool:
        """Whether a CUDA graph can run the batch: graphs return the base model's logits and nothing else."""
        return self.hidden_rows is None and self.adapters is None

    def resolved(self, previous: Tensor) -> PackedBatch:
        """Return the batch with its placeholders replaced by the previous step's tokens [num_sampled] int64, on the
        device."""
        resolve = partial(resolve_placeholders, previous=previous)
        return replace(self, input_ids=resolve(self.input_ids), sampling=resolve_tokens(self.sampling, resolve))


def pack(
    plan: Plan,
    *,
    block_size: int,
    draft: bool = False,
    gqa_group: int | None = None,
    uniform: UniformBatch | None = None,
    page_tables: PageTables = BLOCKS_ARE_PAGES,
    state_pages: PageRows | None = None,
) -> PackedBatch:
    """Pack a plan into tensors on the host.

    draft: whether a draft model will propose the plan's draft tokens. gqa_group: query heads per KV head if attention
    can read a shared prefix once for several sequences, else None. uniform: pad steps with draft tokens to this batch
    if they fit and share no prefixes; padding rows hold tokens that were computed before, they write no keys and
    values, and their logits are not used. page_tables: see `BlockManager`; by default blocks are pages. state_pages:
    see `States.page_rows`; None: the model has no recurrent layers, else the last block table of a sequence ends with
    the block of its states.
    """
    chunks = plan.chunks
    num_kinds = len(chunks[0].sequence.tables) - (state_pages is not None)
    rows = _pack_rows(chunks, block_size, gqa_group, uniform, page_tables, num_kinds)
    row_ends = rows.query_starts[1:]
    sample_rows, logit_rows, sampling = _sampling(plan, row_ends)
    hidden_chunks = (
        tuple(index for index, chunk in enumerate(chunks) if chunk.embeds) if plan.has_prompt_outputs else ()
    )
    return PackedBatch(
        input_ids=torch.from_numpy(np.array([rows.tokens], np.int64)),
        position_ids=torch.from_numpy(rows.positions[None]),
        pagings=_pagings(rows),
        sample_rows=torch.from_numpy(sample_rows),
        logit_rows=None if logit_rows is None else torch.from_numpy(logit_rows),
        sampling=sampling,
        uses_previous_step=min(rows.tokens) < 0,
        checks=_checks(chunks, row_ends),
        drafting=_drafting(chunks, row_ends) if draft else None,
        hidden_rows=torch.tensor([row_ends[index] - 1 for index in hidden_chunks]) if hidden_chunks else None,
        hidden_chunks=hidden_chunks,
        adapters=_adapter_rows(plan, rows.lengths) if plan.adapters else None,
        state_rows=_state_rows(chunks, state_pages) if state_pages else None,
    )


class _Rows(NamedTuple):
    """The rows of a batch."""

    tokens: list[int]
    positions: np.ndarray  # [num_tokens] int64
    slots: list[np.ndarray]  # for each page of a block [num_tokens] int64; -1 for padding rows
    tables: list[np.ndarray]  # for each page of a block [num_seqs, max_blocks] int32
    context_lens: list[int]
    lengths: list[int]  # rows of each sequence
    query_starts: list[int]  # [num_seqs + 1]
    shared: SharedPrefixes | None


def _pack_rows(
    chunks: tuple[Chunk, ...],
    block_size: int,
    gqa_group: int | None,
    uniform: UniformBatch | None,
    page_tables: PageTables,
    num_kinds: int,
) -> _Rows:
    """Pack the rows. Calls NumPy little: a call takes some microseconds, and a step with few rows needs no more time in
    Python."""
    firsts = [chunk.start for chunk in chunks]
    ends = [chunk.start + chunk.length for chunk in chunks]
    lengths = [chunk.length for chunk in chunks]
    tables, shared = _block_tables(chunks, num_kinds), None
    if gqa_group is not None:
        shared = find_prefix_groups(
            tables[0], np.array(ends), np.array(lengths), block_size=block_size, group=gqa_group
        )  # fmt: skip
    if shared is None and uniform:  # sharing prefixes requires one row per sequence, so no padding
        lengths = _padded_lengths(lengths, ends, uniform)
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    query_starts = [0, *itertools.accumulate(lengths)]
    owner, positions = np.arange(len(chunks)), np.array(starts, np.int64)
    if query_starts[-1] > len(chunks):  # not one row each
        owner = owner.repeat(lengths)
        positions = np.arange(query_starts[-1]) + (positions - query_starts[:-1])[owner]
    pages = [table for kind, of_kind in enumerate(tables) for table in page_tables(kind, of_kind)]
    columns, offsets = np.divmod(positions, block_size)
    slots = [of_page[owner, columns].astype(np.int64) * block_size + offsets for of_page in pages]
    if starts != firsts:
        is_padding = positions < np.array(firsts)[owner]
        for of_page in slots:
            of_page[is_padding] = -1
    return _Rows(_tokens(chunks, starts), positions, slots, pages, ends, lengths, query_starts, shared)


def _pagings(rows: _Rows) -> tuple[Paging, ...]:
    context_lens = torch.from_numpy(np.array(rows.context_lens, np.int32))
    query_starts = torch.from_numpy(np.array(rows.query_starts, np.int32))
    max_query_len, max_context_len = max(rows.lengths), max(rows.context_lens)
    return tuple(
        Paging(
            slots=torch.from_numpy(slots),
            block_tables=torch.from_numpy(tables),
            context_lens=context_lens,
            query_starts=query_starts,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
            shared=rows.shared,
        )
        for slots, tables in zip(rows.slots, rows.tables, strict=True)
    )


def _sampling(plan: Plan, row_ends: list[int]) -> tuple[np.ndarray, np.ndarray | None, SamplingBatch]:
    """Return `sample_rows`, `logit_rows` and `sampling` of the batch."""
    chunks = plan.chunks
    sample_positions: list[SamplePosition] = []
    rows: list[int] = []  # rows that are sampled from
    counts: list[int] = []  # how often
    for chunk, row_end in zip(chunks, row_ends, strict=True):
        if chunk.sampled_sequences:
            end, num_drafts = chunk.start + chunk.length, len(chunk.draft_tokens)
            positions = range(end - num_drafts, end + 1)
            sample_positions += [(sequence, at) for sequence in chunk.sampled_sequences for at in positions]
            rows += range(row_end - 1 - num_drafts, row_end)
            counts += [len(chunk.sampled_sequences)] * (1 + num_drafts)
    sample_rows = np.array(rows, np.int64)
    logit_rows = np.repeat(np.arange(len(counts)), counts) if len(sample_positions) > len(rows) else None
    sampling = prepare(sample_positions)
    if plan.has_prompt_outputs and any(chunk.scored for chunk in chunks):
        sampled_from = np.repeat(sample_rows, counts)
        scored = _scored_rows(chunks, row_ends)
        sample_rows = np.union1d(sample_rows, scored)
        logit_rows = sample_rows.searchsorted(sampled_from)
        prompts = _prompt_outputs(chunks, torch.from_numpy(sample_rows.searchsorted(scored)))
        sampling = replace(sampling, outputs=sampling.outputs + prompts)
    return sample_rows, logit_rows, sampling


def _adapter_rows(plan: Plan, lengths: list[int]) -> AdapterRows:
    adapters = [chunk.sequence.request.adapter for chunk in plan.chunks]
    slots = np.array([plan.adapters[adapter.digest] if adapter else -1 for adapter in adapters], dtype=np.int64)
    return adapter_rows(np.repeat(slots, lengths))


def _state_rows(chunks: tuple[Chunk, ...], page_rows: PageRows) -> StateRows:
    blocks = [chunk.sequence.tables[-1][-1] for chunk in chunks]
    starts, lengths, drafts = zip(*((chunk.start, chunk.length, chunk.draft_states) for chunk in chunks), strict=True)
    return state_rows(blocks, starts, lengths, drafts, page_rows)


def _checks(chunks: tuple[Chunk, ...], row_ends: list[int]) -> tuple[DraftCheck, ...]:
    checks, first = [], 0
    for chunk, end in zip(chunks, row_ends, strict=True):
        if chunk.draft_tokens:
            checks.append(DraftCheck(first, end - len(chunk.draft_tokens), chunk.draft_tokens))
        first += len(chunk.sampled_sequences) + len(chunk.draft_tokens)
    return tuple(checks)


def _scored_rows(chunks: tuple[Chunk, ...], row_ends: list[int]) -> np.ndarray:
    firsts = [end - chunk.start - chunk.length for chunk, end in zip(chunks, row_ends, strict=True)]
    rows = [first + position for chunk, first in zip(chunks, firsts, strict=True) for position in chunk.scored]
    return np.array(rows, dtype=np.int64)


def _prompt_outputs(chunks: tuple[Chunk, ...], rows: Tensor) -> tuple[OutputRows, ...]:
    """Return the optional outputs of scored positions. rows: [num_scored] int64, the row of each in the logits."""
    scored = [(index, chunk, position) for index, chunk in enumerate(chunks) for position in chunk.scored]
    return request_prompt_rows(
        [chunk.sequence.request.prompt_outputs for _, chunk, _ in scored],
        [index for index, _, _ in scored],
        rows,
        [chunk.sequence.tokens[position + 1] for _, chunk, position in scored],
    )


def _drafting(chunks: tuple[Chunk, ...], row_ends: list[int]) -> Drafting | None:
    drafted = [(index, chunk) for index, chunk in enumerate(chunks) if chunk.draft_tokens]
    if not drafted:
        return None
    drafted.sort(key=lambda item: -len(item[1].draft_tokens))
    rounds = [
        [(chunk.sequence, chunk.first_sampled + number) for _, chunk in drafted if number < len(chunk.draft_tokens)]
        for number in range(len(drafted[0][1].draft_tokens))
    ]
    return Drafting(
        rows=torch.tensor([row_ends[index] - len(chunk.draft_tokens) - 1 for index, chunk in drafted]),
        seqs=torch.tensor([index for index, _ in drafted]),
        counts=tuple(map(len, rounds)),
        sampling=tuple(map(prepare, rounds)),
    )


def _padded_lengths(lengths: list[int], ends: list[int], uniform: UniformBatch) -> list[int]:
    """Return the number of rows of each sequence. lengths, ends: numbers of its tokens that the step computes, and that
    are computed after the step."""
    if len(ends) <= uniform.seqs and 1 < max(lengths) <= uniform.queries <= min(ends):
        return [uniform.queries] * len(lengths)
    return lengths


def _tokens(chunks: tuple[Chunk, ...], starts: list[int]) -> list[int]:
    return [
        token
        for chunk, start in zip(chunks, starts, strict=True)
        for token in chunk.sequence.tokens[start : chunk.start + chunk.length]
    ]


def _block_tables(chunks: tuple[Chunk, ...], num_kinds: int) -> list[np.ndarray]:
    """Return the block tables of each kind of layer that keeps tokens, [num_seqs, max_blocks] int32."""
    width = max([len(chunk.sequence.tables[0]) for chunk in chunks])
    tables = np.zeros((num_kinds, len(chunks), width), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        for kind, table in enumerate(chunk.sequence.tables[:num_kinds]):
            tables[kind, row, : len(table)] = table
    return list(tables)


def resolve_placeholders(tokens: Tensor, previous: Tensor) -> Tensor:
    """Replace placeholders for tokens of the previous step. previous: [num_sampled] int64, its sampled tokens. Where
    logits were not finite, that token is negative; it is replaced by 0, because the step needs a valid token."""
    return tokens.where(tokens >= 0, previous[(-1 - tokens).clamp(min=0)].clamp(min=0))
