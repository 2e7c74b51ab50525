"""Sample the next token of all rows of a step at once.

The random numbers of a row are a pure function of its seed and position, so neither the other rows of the batch nor a
preemption with recomputation changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.token_outputs import NOTHING
from paged_backend.kv.sequence import SamplePosition
from paged_backend.sampling import constraints
from paged_backend.sampling.constraints import Constraints, apply_constraints
from paged_backend.sampling.outputs import OutputRows, Source, TopTokens, request_rows
from paged_backend.scheduling.beam_search import num_candidates
from paged_kernels import ops
from paged_kernels.sampling_metadata import SamplingFilters, SamplingMetadata

PADDING = 2**62  # pads rows of tokens; beyond every vocabulary
TOP_K_OFF = 2**31 - 1  # value of top_k that keeps every token of any vocabulary
EPSILON = 1e-6  # lower bound of divisors of logits, so that these stay finite in float32, and of top_p


@dataclass(frozen=True, eq=False)
class Penalties:
    """The rows with a penalty, their padded tokens and penalty values."""

    rows: Tensor  # [num_rows] int64
    seen: Tensor  # [num_rows, width] int64; prompt and output tokens
    generated: Tensor  # [num_rows, width] int64; output tokens
    repetition: Tensor  # [num_rows, 1] float32
    presence: Tensor  # [num_rows, 1] float32
    frequency: Tensor  # [num_rows, 1] float32


@dataclass(frozen=True, eq=False)
class BeamRows:
    """The rows of live beams, which take the top tokens instead of sampling one."""

    rows: Tensor  # [num_rows] int64
    num_candidates: int  # top tokens per row


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """Sampling inputs of a step, prepared on the host. A feature that no row uses is None and costs nothing."""

    constraints: Constraints | None = None
    penalties: Penalties | None = None
    metadata: SamplingMetadata | None = None  # None: all rows sample greedily
    beams: BeamRows | None = None
    outputs: tuple[OutputRows, ...] = ()

    @property
    def changes_logits(self) -> bool:
        """Whether a row has constraints or penalties. They change its logits before it is sampled."""
        return self.constraints is not None or self.penalties is not None


GREEDY = SamplingBatch()


def prepare(sample_positions: Rows[SamplePosition]) -> SamplingBatch:
    """Build the sampling inputs of these tokens on the host. Row i of the logits belongs to the i-th of them."""
    if all(sequence.request.is_greedy for sequence, _ in sample_positions):
        return GREEDY
    return SamplingBatch(
        constraints.prepare(sample_positions),
        _penalties(sample_positions),
        _metadata(sample_positions),
        _beams(sample_positions),
        _outputs(sample_positions),
    )


def resolve_tokens(batch: SamplingBatch, resolve: Callable[[Tensor], Tensor]) -> SamplingBatch:
    """Replace placeholders by the tokens that the previous step sampled. `resolve` does so for one tensor."""
    if batch.constraints:
        batch = replace(batch, constraints=constraints.resolve_tokens(batch.constraints, resolve))
    if batch.penalties:
        seen, generated = resolve(batch.penalties.seen), resolve(batch.penalties.generated)
        batch = replace(batch, penalties=replace(batch.penalties, seen=seen, generated=generated))
    return batch


def sample(logits: Tensor, batch: SamplingBatch, *, out: Tensor | None = None) -> Tensor:
    """Sample token ids [num_rows] int64 from logits [num_rows, vocab] of any float dtype. They are written to `out` if
    it is given."""
    return ops.sample(process_logits(logits, batch), batch.metadata, out=out)


def process_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the logits after constraints and penalties, as used by `sample`.

    Returns `logits` unchanged if no row has a constraint or penalty.
    """
    if batch.constraints:
        logits = apply_constraints(logits, batch.constraints)
    if batch.penalties:
        logits = _apply_penalties(logits.float(), batch.penalties)
    return logits


def top_tokens(logits: Tensor, batch: SamplingBatch) -> TopTokens | None:
    """Return the most likely next tokens of live beams, or None if the step has none.

    As in transformers, constraints apply to the log probabilities: a masked token still contributes to the softmax
    denominator of the others.
    """
    if batch.beams is None:
        return None
    rows, logits = batch.beams.rows, logits.float()
    log_probs = logits[rows].log_softmax(-1)
    if batch.constraints:
        log_probs = apply_constraints(logits.index_put((rows,), log_probs), batch.constraints)[rows]
    best = log_probs.topk(min(batch.beams.num_candidates, log_probs.shape[-1]), -1)
    return TopTokens(rows, best.indices, best.values)


def _array(values: Rows[Any], dtype: torch.dtype) -> Tensor:
    """Return a tensor on the host."""
    return torch.tensor(values, dtype=dtype)


def _column(values: Rows[float], dtype: torch.dtype) -> Tensor:
    return _array(values, dtype)[:, None]


def _metadata(sample_positions: Rows[SamplePosition]) -> SamplingMetadata | None:
    params = [seq.request.sampling for seq, _ in sample_positions]
    if not any(map(_is_random, params)):
        return None
    return SamplingMetadata(
        scales=_array([1 / _temperature(p) if _is_random(p) else 0 for p in params], torch.float32),
        seeds=_array([_signed(seq.seed) for seq, _ in sample_positions], torch.int64),
        positions=_array([position - seq.num_prompt for seq, position in sample_positions], torch.int64),
        filters=_filters(params),
    )


def pad_metadata(metadata: SamplingMetadata | None, num_rows: int, *, device: torch.device) -> SamplingMetadata:
    """Return the metadata of `num_rows` rows, with filters. Rows that are added sample greedily."""
    filters = metadata.filters if metadata else None

    def column(values: Tensor | None, padding: float, dtype: torch.dtype) -> Tensor:
        padded = torch.full((num_rows,), padding, dtype=dtype, device=device)
        if values is not None:
            padded[: len(values)] = values
        return padded

    return SamplingMetadata(
        column(metadata and metadata.scales, 0, torch.float32),
        column(metadata and metadata.seeds, 0, torch.int64),
        column(metadata and metadata.positions, 0, torch.int64),
        SamplingFilters(
            column(filters and filters.top_k, TOP_K_OFF, torch.int32),
            column(filters and filters.top_p, 1, torch.float32),
            column(filters and filters.margin, math.inf, torch.float32),
        ),
    )


def _temperature(params: SamplingParams) -> float:
    return max(params.temperature, EPSILON)


def _signed(seed: int) -> int:
    """Return the low 64 bits of a seed as a signed int64."""
    return (seed + 2**63) % 2**64 - 2**63


def _is_random(params: SamplingParams) -> bool:
    return params.temperature > 0 and params.beam_width == 1


def _beams(sample_positions: Rows[SamplePosition]) -> BeamRows | None:
    rows = [row for row, (seq, _) in enumerate(sample_positions) if seq.request.sampling.beam_width > 1]
    if not rows:
        return None
    requests = [sample_positions[row][0].request for row in rows]
    candidates = max(num_candidates(request.sampling, request.stop_ids) for request in requests)
    return BeamRows(_array(rows, torch.int64), candidates)


def _outputs(sample_positions: Rows[SamplePosition]) -> tuple[OutputRows, ...]:
    requested = [seq.request.token_outputs for seq, _ in sample_positions]
    if not any(requested):
        return ()
    is_beam = [seq.request.sampling.beam_width > 1 for seq, _ in sample_positions]
    sampled = [NOTHING if beam else outputs for beam, outputs in zip(is_beam, requested, strict=True)]
    beams = [outputs for beam, outputs in zip(is_beam, requested, strict=True) if beam]
    return request_rows(Source.SAMPLED, sampled) + request_rows(Source.BEAMS, beams)


def _filters(params: Rows[SamplingParams]) -> SamplingFilters | None:
    if not any(_is_random(p) and (p.top_k or p.top_p < 1 or p.min_p) for p in params):
        return None
    margins = [-math.log(p.min_p) * _temperature(p) if p.min_p else math.inf for p in params]
    return SamplingFilters(
        top_k=_array([p.top_k or TOP_K_OFF for p in params], torch.int32),
        top_p=_array([max(p.top_p, EPSILON) for p in params], torch.float32),
        margin=_array(margins, torch.float32),
    )


def _penalties(sample_positions: Rows[SamplePosition]) -> Penalties | None:
    rows = [
        (row, seq, position) for row, (seq, position) in enumerate(sample_positions) if seq.request.sampling.has_penalty
    ]
    if not rows:
        return None
    params = [seq.request.sampling for _, seq, _ in rows]
    width = max(position for _, _, position in rows)

    def padded(tokens: list[list[int]]) -> Tensor:
        return _array([row + [PADDING] * (width - len(row)) for row in tokens], torch.int64)

    return Penalties(
        rows=_array([row for row, _, _ in rows], torch.int64),
        seen=padded([seq.tokens[:position] for _, seq, position in rows]),
        generated=padded([seq.tokens[seq.num_prompt : position] for _, seq, position in rows]),
        repetition=_column([max(p.repetition_penalty, EPSILON) for p in params], torch.float32),
        presence=_column([p.presence_penalty for p in params], torch.float32),
        frequency=_column([p.frequency_penalty for p in params], torch.float32),
    )


def _apply_penalties(logits: Tensor, penalties: Penalties) -> Tensor:
    """Apply repetition, presence and frequency penalties to logits [num_rows, vocab] float32.

    The repetition penalty divides positive logits and multiplies negative ones for every token of prompt and output
    (Keskar et al. 2019). The presence and frequency penalties are subtracted and count the output alone, as in OpenAI's
    API.
    """
    rows = logits[penalties.rows]
    seen = _counts(penalties.seen, rows) > 0
    rows = rows.where(~seen, torch.where(rows > 0, rows / penalties.repetition, rows * penalties.repetition))
    counts = _counts(penalties.generated, rows)
    rows = rows - penalties.presence * (counts > 0) - penalties.frequency * counts
    return logits.index_put((penalties.rows,), rows)


def _counts(tokens: Tensor, rows: Tensor) -> Tensor:  # [num_rows, vocab] float32
    """Count how often each vocabulary token occurs in tokens [num_rows, width]. `rows` gives shape and device."""
    vocab = rows.shape[-1]
    counts = rows.new_zeros(rows.shape[0], vocab + 1)
    index = tokens.clamp(max=vocab)
    return counts.scatter_add_(1, index, torch.ones_like(index, dtype=counts.dtype))[:, :vocab]
