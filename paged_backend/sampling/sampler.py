"""Draw the next token of every row at once.

The random numbers of a row are a pure function of (seed, position): what else is in the batch, and whether the
row was preempted and computed again, cannot change them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Any

import torch
from paged_kernels import ops
from paged_kernels.draws import SamplingFilters, SamplingMetadata
from torch import Tensor

from paged_backend.api.sampling_params import SamplingParams
from paged_backend.sampling import constraints
from paged_backend.sampling.constraints import Constraints, apply_constraints
from paged_backend.sampling.logprobs import LogprobRows, LogprobsTensors, PromptLogprobRows
from paged_backend.scheduling.beam_search import Candidate, num_candidates
from paged_backend.scheduling.sequence import Draw

PADDING = 2**62  # in place of a token, beyond every vocabulary
OFF = 2**31 - 1  # as top_k: as many as any vocabulary has
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
class Beams:
    """Rows of live beams, which do not draw but want the likeliest tokens."""

    rows: Tensor  # [num_rows] int64
    most: int  # tokens of each
    asked: LogprobRows | None  # which of `rows`


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """The likeliest tokens of live beams, the first first."""

    rows: Tensor  # [num_rows] int64
    tokens: Tensor  # [num_rows, most] int64
    log_probs: Tensor  # [num_rows, most] float32
    scores: LogprobsTensors | None = None  # of these tokens, in some of the rows

    def to_host(self) -> TopLogprobs:
        """On its way there; not to be read before the device has got that far."""
        there = (one.to("cpu", non_blocking=True) for one in (self.rows, self.tokens, self.log_probs))
        return TopLogprobs(*there, self.scores and self.scores.to_host())

    def by_row(self) -> Iterator[tuple[int, list[Candidate]]]:
        told = dict(self.scores.by_row()) if self.scores else {}
        lists = zip(self.rows.tolist(), self.tokens.tolist(), self.log_probs.tolist(), strict=True)
        for place, (row, *candidates) in enumerate(lists):
            yield row, list(map(Candidate, *candidates, *([told[place]] if place in told else [])))


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """How to draw, prepared on the host; what no row of the batch asks for is None and costs nothing."""

    constraints: Constraints | None = None
    penalties: Penalties | None = None
    draws: SamplingMetadata | None = None  # None: all rows are greedy
    beams: Beams | None = None
    asked: LogprobRows | None = None
    prompts: PromptLogprobRows | None = None  # rows of all that are sampled, not of the draws


def prepare(draws: Rows[Draw]) -> SamplingBatch:
    """Gather what `sample` needs for these draws, in their order; on the host."""
    return SamplingBatch(constraints.prepare(draws), _penalties(draws), _draws(draws), _beams(draws), _asked(draws))


def resolve_tokens(batch: SamplingBatch, known: Callable[[Tensor], Tensor]) -> SamplingBatch:
    """known: puts tokens in place of what stands for them."""
    if batch.constraints:
        batch = replace(batch, constraints=constraints.resolve_tokens(batch.constraints, known))
    if batch.penalties:
        seen, generated = known(batch.penalties.seen), known(batch.penalties.generated)
        batch = replace(batch, penalties=replace(batch.penalties, seen=seen, generated=generated))
    return batch


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [num_rows, vocab] of any float type -> token ids [num_rows] int64."""
    return ops.sample(process_logits(logits, batch), batch.draws)


def process_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """What `sample` draws from: logits after constraints and penalties. They stay as they are where no row asks for
    either."""
    if batch.constraints:
        logits = apply_constraints(logits, batch.constraints)
    if batch.penalties:
        logits = _penalise(logits.float(), batch.penalties)
    return logits


def top_logprobs(logits: Tensor, batch: SamplingBatch) -> TopLogprobs | None:
    """Of live beams the likeliest tokens. Constraints apply to log probabilities, as in transformers: what cannot be
    drawn counts in the others' nevertheless."""
    if batch.beams is None:
        return None
    rows, logits = batch.beams.rows, logits.float()
    log_probs = logits[rows].log_softmax(-1)
    if batch.constraints:
        log_probs = apply_constraints(logits.index_put((rows,), log_probs), batch.constraints)[rows]
    best = log_probs.topk(min(batch.beams.most, log_probs.shape[-1]), -1)
    scores = None
    if asked := batch.beams.asked:
        scores = LogprobsTensors.of(logits[rows][asked.rows], best.indices[asked.rows], asked)
    return TopLogprobs(rows, best.indices, best.values, scores)


def compute_logprobs(logits: Tensor, tokens: Tensor, batch: SamplingBatch) -> LogprobsTensors | None:
    """Of rows that ask. tokens [num_rows] int64: what was drawn."""
    if batch.asked is None:
        return None
    rows = batch.asked.rows
    return LogprobsTensors.of(logits[rows], tokens[rows, None], batch.asked)


def _array(values: Rows[Any], dtype: torch.dtype) -> Tensor:
    """Everything that `prepare` hands over is made here."""
    return torch.tensor(values, dtype=dtype)


def _column(values: Rows[float], dtype: torch.dtype) -> Tensor:
    return _array(values, dtype)[:, None]


def _draws(draws: Rows[Draw]) -> SamplingMetadata | None:
    params = [seq.request.sampling for seq, _ in draws]
    if not any(map(_is_random, params)):
        return None
    return SamplingMetadata(
        scales=_array([1 / _temperature(one) if _is_random(one) else 0 for one in params], torch.float32),
        seeds=_array([_signed(seq.seed) for seq, _ in draws], torch.int64),
        positions=_array([position - seq.num_prompt for seq, position in draws], torch.int64),
        filters=_filters(params),
    )


def _temperature(params: SamplingParams) -> float:
    return max(params.temperature, LEAST)


def _signed(seed: int) -> int:
    """Its low 64 bits, as int64 holds them."""
    return (seed + 2**63) % 2**64 - 2**63


def _is_random(params: SamplingParams) -> bool:
    return params.temperature > 0 and params.beam_width == 1


def _beams(draws: Rows[Draw]) -> Beams | None:
    rows = [row for row, (seq, _) in enumerate(draws) if seq.request.sampling.beam_width > 1]
    if not rows:
        return None
    requests = [draws[row][0].request for row in rows]
    most = max(num_candidates(one.sampling, one.stop_ids) for one in requests)
    return Beams(_array(rows, torch.int64), most, _asking([one.logprobs for one in requests]))


def _asked(draws: Rows[Draw]) -> LogprobRows | None:
    return _asking([seq.request.logprobs if seq.request.sampling.beam_width == 1 else None for seq, _ in draws])


def _asking(counts: Rows[int | None]) -> LogprobRows | None:
    found = [(row, count) for row, count in enumerate(counts) if count is not None]
    if not found:
        return None
    return LogprobRows(_array([row for row, _ in found], torch.int64), tuple(count for _, count in found))


def _filters(params: Rows[SamplingParams]) -> SamplingFilters | None:
    if not any(_is_random(one) and (one.top_k or one.top_p < 1 or one.min_p) for one in params):
        return None
    margins = [-math.log(one.min_p) * _temperature(one) if one.min_p else math.inf for one in params]
    return SamplingFilters(
        top_k=_array([one.top_k or OFF for one in params], torch.int32),
        top_p=_array([max(one.top_p, LEAST) for one in params], torch.float32),
        margin=_array(margins, torch.float32),
    )


def _penalties(draws: Rows[Draw]) -> Penalties | None:
    rows = [(row, *draw) for row, draw in enumerate(draws) if draw[0].request.sampling.has_penalty]
    if not rows:
        return None
    params = [seq.request.sampling for _, seq, _ in rows]
    width = max(position for _, _, position in rows)

    def padded(tokens: list[list[int]]) -> Tensor:
        return _array([one + [PADDING] * (width - len(one)) for one in tokens], torch.int64)

    return Penalties(
        rows=_array([row for row, _, _ in rows], torch.int64),
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
