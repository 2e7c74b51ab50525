"""Draw the next token of every row at once.

The random number of a row is a pure function of (seed, position): what else is in the batch, and whether the
row was preempted and computed again, cannot change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.request import SamplingParams
from paged_backend.sequence import Sequence


@dataclass(frozen=True, eq=False)
class Penalties:
    """Rows with a penalty, and the tokens they have seen; padding points one past the vocabulary."""

    rows: Tensor  # [num_rows] int64
    seen: Tensor  # [num_rows, width] int64: prompt and output
    generated: Tensor  # [num_rows, width] int64: output alone
    repetition: Tensor  # [num_rows, 1] float32
    presence: Tensor  # [num_rows, 1] float32
    frequency: Tensor  # [num_rows, 1] float32


@dataclass(frozen=True, eq=False)
class Draws:
    """Rows that are not greedy, and how each wants its token drawn. Filters that no row uses are None."""

    rows: Tensor  # [num_rows] int64
    temperature: Tensor  # [num_rows, 1] float32
    uniform: Tensor  # [num_rows, 1] float32 in [0, 1)
    top_k: Tensor | None  # [num_rows, 1] int64
    top_p: Tensor | None  # [num_rows, 1] float32
    min_p: Tensor | None  # [num_rows, 1] float32
    max_top_k: int | None  # the largest top_k, where every row has one


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """How to draw, prepared on the host; what no row of the batch asks for is None and costs nothing."""

    banned: Tensor | None  # [2, num_banned] int64: (row, token) pairs that must not be drawn
    penalties: Penalties | None
    draws: Draws | None


def prepare(sequences: Rows[Sequence], device: torch.device) -> SamplingBatch:
    """Gather what `sample` needs for these rows, in their order."""
    return SamplingBatch(_banned(sequences, device), _penalties(sequences, device), _draws(sequences, device))


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [num_rows, vocab] of any float type -> token ids [num_rows] int64."""
    logits = logits.float()
    if batch.penalties:
        logits = _penalise(logits, batch.penalties)
    if batch.banned is not None:
        logits = logits.index_put((batch.banned[0], batch.banned[1]), logits.new_tensor(float("-inf")))
    tokens = logits.argmax(-1)
    if batch.draws:
        tokens[batch.draws.rows] = _draw(logits[batch.draws.rows], batch.draws)
    return tokens


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter-based generator: BLAKE2b of (seed, position), 24 bits as float32 holds."""
    key = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 8) / 2**24


def _draws(sequences: Rows[Sequence], device: torch.device) -> Draws | None:
    rows = [(row, seq) for row, seq in enumerate(sequences) if seq.request.sampling.temperature > 0]
    if not rows:
        return None
    params = [seq.request.sampling for _, seq in rows]

    def column(values: Rows[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    def unless_all(off: float, pick: Callable[[SamplingParams], float]) -> Tensor | None:
        values = [pick(one) for one in params]
        return None if all(value == off for value in values) else column(values)

    top_k = [one.top_k for one in params]
    return Draws(
        rows=torch.tensor([row for row, _ in rows], device=device),
        temperature=column([one.temperature for one in params]),
        uniform=column([uniform(seq.request.seed, seq.generated) for _, seq in rows]),
        top_k=column(top_k, torch.int64) if any(top_k) else None,
        top_p=unless_all(1.0, lambda one: one.top_p),
        min_p=unless_all(0.0, lambda one: one.min_p),
        max_top_k=max(top_k) if all(top_k) else None,
    )


def _draw(logits: Tensor, draws: Draws) -> Tensor:
    """Invert the cumulative distribution at the row's random number, over the tokens that pass its filters."""
    probs = torch.softmax(logits / draws.temperature, -1)
    if draws.top_k is None and draws.top_p is None:
        ids = None
    elif draws.max_top_k is not None:
        probs, ids = probs.topk(min(draws.max_top_k, probs.shape[-1]), -1)
    else:
        probs, ids = probs.sort(-1, descending=True, stable=True)
    if ids is not None:
        probs = _filter_sorted(probs, draws)
    if draws.min_p is not None:
        probs = probs.where(probs >= draws.min_p * probs.amax(-1, keepdim=True), 0)
    chosen = _invert(probs, draws.uniform)
    return (chosen if ids is None else ids.gather(-1, chosen)).squeeze(-1)


def _filter_sorted(probs: Tensor, draws: Draws) -> Tensor:
    """Zero what top_k, then top_p cut off; `probs` descend along the last dimension.

    top_p keeps the smallest set of tokens whose mass, among those that top_k left, reaches it.
    """
    if draws.top_k is not None:
        limit = draws.top_k.where(draws.top_k > 0, probs.shape[-1])
        probs = probs.where(torch.arange(probs.shape[-1], device=probs.device) < limit, 0)
    if draws.top_p is not None:
        before = probs.cumsum(-1) - probs
        probs = probs.where(before < draws.top_p * probs.sum(-1, keepdim=True), 0)
    return probs


def _invert(probs: Tensor, number: Tensor) -> Tensor:
    """The first index whose cumulative mass exceeds `number` of the total; never one of mass zero."""
    mass = probs.double().cumsum(-1)
    index = torch.searchsorted(mass, number * mass[:, -1:], right=True)
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1, keepdim=True)
    return index.minimum(last)


def _penalties(sequences: Rows[Sequence], device: torch.device) -> Penalties | None:
    rows = [(row, seq) for row, seq in enumerate(sequences) if _has_penalty(seq.request.sampling)]
    if not rows:
        return None
    params = [seq.request.sampling for _, seq in rows]
    width = max(len(seq.tokens) for _, seq in rows)

    def padded(tokens: list[list[int]]) -> Tensor:
        return torch.tensor([one + [-1] * (width - len(one)) for one in tokens], dtype=torch.int64, device=device)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    return Penalties(
        rows=torch.tensor([row for row, _ in rows], device=device),
        seen=padded([seq.tokens for _, seq in rows]),
        generated=padded([seq.tokens[len(seq.request.prompt_token_ids) :] for _, seq in rows]),
        repetition=column([one.repetition_penalty for one in params]),
        presence=column([one.presence_penalty for one in params]),
        frequency=column([one.frequency_penalty for one in params]),
    )


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    """Repetition divides positive logits and multiplies negative ones (Keskar et al. 2019, over prompt and
    output); presence and frequency are subtracted (over the output, as in OpenAI's API)."""
    rows = logits[penalties.rows]
    seen = _counts(penalties.seen, rows) > 0
    rows = rows.where(~seen, torch.where(rows > 0, rows / penalties.repetition, rows * penalties.repetition))
    counts = _counts(penalties.generated, rows)
    rows = rows - penalties.presence * (counts > 0) - penalties.frequency * counts
    return logits.index_put((penalties.rows,), rows)


def _counts(tokens: Tensor, rows: Tensor) -> Tensor:  # [num_rows, vocab] float32
    vocab = rows.shape[-1]
    counts = rows.new_zeros(rows.shape[0], vocab + 1)
    index = tokens.where(tokens >= 0, vocab)
    return counts.scatter_add_(1, index, torch.ones_like(index, dtype=counts.dtype))[:, :vocab]


def _banned(sequences: Rows[Sequence], device: torch.device) -> Tensor | None:
    """Until min_tokens are out, no token that would end the output may be drawn."""
    pairs = [
        (row, token)
        for row, seq in enumerate(sequences)
        if seq.generated < seq.request.sampling.min_tokens
        for token in sorted(seq.request.stop_ids)
    ]
    return torch.tensor(pairs, dtype=torch.int64, device=device).T if pairs else None
