"""Draw the next token of every row at once.

The random number of a row is a pure function of (seed, position): what else is in the batch, and whether the
row was preempted and computed again, cannot change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_backend.beam_search import Candidate, num_candidates
from paged_backend.request import SamplingParams
from paged_backend.sequence import Sequence

PADDING = 2**62  # in place of a token, beyond every vocabulary
LEAST = 1e-6  # of what divides logits, so that they stay finite in float32, and of top_p, so that a token stays


@dataclass(frozen=True, eq=False)
class Penalties:
    """Rows with a penalty, and the tokens they have seen, padded."""

    rows: Tensor  # [num_rows] int64
    seen: Tensor  # [num_rows, width] int64: prompt and output
    generated: Tensor  # [num_rows, width] int64: output alone
    repetition: Tensor  # [num_rows, 1] float32
    presence: Tensor  # [num_rows, 1] float32
    frequency: Tensor  # [num_rows, 1] float32


@dataclass(frozen=True, eq=False)
class Filters:
    """Rows that draw from the likeliest tokens only."""

    rows: Tensor  # [num_rows] int64: into the rows of Draws
    top_k: Tensor  # [num_rows, 1] int64; the vocabulary's size or more: off
    top_p: Tensor  # [num_rows, 1] float32; 1: off
    min_p: Tensor  # [num_rows, 1] float32; 0: off
    max_top_k: int  # the largest top_k
    sort: bool  # whether a row needs more than its top_k in order


@dataclass(frozen=True, eq=False)
class Draws:
    """Rows that are not greedy."""

    rows: Tensor  # [num_rows] int64
    temperature: Tensor  # [num_rows, 1] float32
    uniform: Tensor  # [num_rows, 1] float64 in [0, 1)
    filters: Filters | None


@dataclass(frozen=True, eq=False)
class Beams:
    """Rows of live beams, which do not draw but want the likeliest tokens."""

    rows: Tensor  # [num_rows] int64
    most: int  # tokens of each


@dataclass(frozen=True, eq=False)
class Likeliest:
    """The likeliest tokens of live beams, the first first."""

    rows: Tensor  # [num_rows] int64
    tokens: Tensor  # [num_rows, most] int64
    log_probs: Tensor  # [num_rows, most] float32

    def to_host(self) -> Likeliest:
        """On its way there; not to be read before the device has got that far."""
        return Likeliest(*(one.to("cpu", non_blocking=True) for one in (self.rows, self.tokens, self.log_probs)))

    def by_row(self) -> Iterator[tuple[int, list[Candidate]]]:
        for row, *candidates in zip(self.rows.tolist(), self.tokens.tolist(), self.log_probs.tolist(), strict=True):
            yield row, [Candidate(token, value) for token, value in zip(*candidates, strict=True)]


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """How to draw, prepared on the host; what no row of the batch asks for is None and costs nothing."""

    banned: Tensor | None  # [2, num_banned] int64: (row, token) pairs that must not be drawn
    penalties: Penalties | None
    draws: Draws | None
    beams: Beams | None


Draw = tuple[Sequence, int]  # a sequence, and the position of the token to draw: there may be later ones already


def prepare(draws: Rows[Draw]) -> SamplingBatch:
    """Gather what `sample` needs for these draws, in their order; on the host."""
    return SamplingBatch(_banned(draws), _penalties(draws), _draws(draws), _beams(draws))


def follow(batch: SamplingBatch, known: Callable[[Tensor], Tensor]) -> SamplingBatch:
    """known: puts tokens in place of what stands for them."""
    if batch.penalties is None:
        return batch
    seen, generated = known(batch.penalties.seen), known(batch.penalties.generated)
    return replace(batch, penalties=replace(batch.penalties, seen=seen, generated=generated))


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


def likeliest(logits: Tensor, batch: SamplingBatch) -> Likeliest | None:
    """Of live beams the likeliest tokens. What is banned stays out, but counts in the others' probabilities, as in
    transformers."""
    if batch.beams is None:
        return None
    rows, logits = batch.beams.rows, logits.float()
    log_probs = logits[rows].log_softmax(-1)
    if batch.banned is not None:
        allowed = torch.ones_like(logits, dtype=torch.bool).index_put_(tuple(batch.banned), torch.tensor(False))
        log_probs = log_probs.where(allowed[rows], float("-inf"))
    best = log_probs.topk(min(batch.beams.most, log_probs.shape[-1]), -1)
    return Likeliest(rows, best.indices, best.values)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter-based generator: BLAKE2b of (seed, position), 24 bits as float32 holds."""
    key = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 8) / 2**24


def _column(values: Rows[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


def _draws(draws: Rows[Draw]) -> Draws | None:
    rows = [(row, *draw) for row, draw in enumerate(draws) if _is_random(draw[0].request.sampling)]
    if not rows:
        return None
    params = [seq.request.sampling for _, seq, _ in rows]
    return Draws(
        rows=torch.tensor([row for row, _, _ in rows]),
        temperature=_column([max(one.temperature, LEAST) for one in params], torch.float32),
        uniform=_column([uniform(seq.seed, position - seq.num_prompt) for _, seq, position in rows], torch.float64),
        filters=_filters(params),
    )


def _is_random(params: SamplingParams) -> bool:
    return params.temperature > 0 and params.beam_width == 1


def _beams(draws: Rows[Draw]) -> Beams | None:
    rows = [row for row, (seq, _) in enumerate(draws) if seq.request.sampling.beam_width > 1]
    if not rows:
        return None
    requests = [draws[row][0].request for row in rows]
    return Beams(torch.tensor(rows), max(num_candidates(one.sampling, one.stop_ids) for one in requests))


def _filters(params: Rows[SamplingParams]) -> Filters | None:
    rows = [(row, one) for row, one in enumerate(params) if one.top_k or one.top_p < 1 or one.min_p]
    if not rows:
        return None
    off = 2**31
    top_k = [one.top_k or off for _, one in rows]
    return Filters(
        rows=torch.tensor([row for row, _ in rows]),
        top_k=_column(top_k, torch.int64),
        top_p=_column([max(one.top_p, LEAST) for _, one in rows], torch.float32),
        min_p=_column([one.min_p for _, one in rows], torch.float32),
        max_top_k=max([k for k in top_k if k != off], default=1),
        sort=any(one.top_p < 1 and not one.top_k for _, one in rows),
    )


def _draw(logits: Tensor, draws: Draws) -> Tensor:
    """Invert the cumulative distribution, in the order of token ids, at the row's random number."""
    probs = torch.softmax(logits / draws.temperature, -1)
    if draws.filters:
        filtered = _filter(probs[draws.filters.rows], draws.filters)
        probs = probs.index_put((draws.filters.rows,), filtered)
    mass = probs.cumsum(-1, dtype=torch.float64)
    index = torch.searchsorted(mass, draws.uniform * mass[:, -1:], right=True)
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1, keepdim=True)
    return index.minimum(last).squeeze(-1)  # rounding must not lead past the last token that has any mass


def _filter(probs: Tensor, filters: Filters) -> Tensor:
    """Zero what is not likely enough: each filter is a least probability, so ties stay or go together and nothing
    depends on the order in which a sort leaves them. top_p counts the mass that top_k left."""
    vocab = probs.shape[-1]
    if filters.sort:
        ordered = probs.sort(dim=-1, descending=True).values
    else:
        ordered = probs.topk(min(filters.max_top_k, vocab), -1).values
    last = filters.top_k.clamp(max=ordered.shape[-1]) - 1
    least = ordered.gather(-1, last).where(filters.top_k < vocab, 0)
    probs = probs.where(probs >= least, 0)
    ordered = ordered.where(ordered >= least, 0)
    reached = (ordered.cumsum(-1) - ordered) < filters.top_p * probs.sum(-1, keepdim=True)
    least = ordered.gather(-1, reached.sum(-1, keepdim=True) - 1).where(filters.top_p < 1, 0)
    least = least.maximum(filters.min_p * ordered[:, :1])
    return probs.where(probs >= least, 0)


def _penalties(draws: Rows[Draw]) -> Penalties | None:
    rows = [(row, *draw) for row, draw in enumerate(draws) if draw[0].request.sampling.has_penalty]
    if not rows:
        return None
    params = [seq.request.sampling for _, seq, _ in rows]
    width = max(position for _, _, position in rows)

    def padded(tokens: list[list[int]]) -> Tensor:
        return torch.tensor([one + [PADDING] * (width - len(one)) for one in tokens], dtype=torch.int64)

    return Penalties(
        rows=torch.tensor([row for row, _, _ in rows]),
        seen=padded([seq.tokens[:position] for _, seq, position in rows]),
        generated=padded([seq.tokens[seq.num_prompt : position] for _, seq, position in rows]),
        repetition=_column([max(one.repetition_penalty, LEAST) for one in params], torch.float32),
        presence=_column([one.presence_penalty for one in params], torch.float32),
        frequency=_column([one.frequency_penalty for one in params], torch.float32),
    )


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
    index = tokens.clamp(max=vocab)
    return counts.scatter_add_(1, index, torch.ones_like(index, dtype=counts.dtype))[:, :vocab]


def _banned(draws: Rows[Draw]) -> Tensor | None:
    """Until min_tokens are out, no token that would end the output may be drawn."""
    pairs = [
        (row, token)
        for row, (seq, position) in enumerate(draws)
        if position - seq.num_prompt < seq.request.sampling.min_tokens
        for token in sorted(seq.request.stop_ids)
    ]
    return torch.tensor(pairs, dtype=torch.int64).T if pairs else None
