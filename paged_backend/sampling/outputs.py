"""Compute the optional outputs of a step on the device, and read them on the host (api/token_outputs.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_backend.api.token_outputs import FINGERPRINTS, LOGPROBS, Requested
from paged_backend.sampling import fingerprints, logprobs

MAX_PROMPT_ROWS = 64  # prompt rows at a time, which bounds the float32 copies of their logits


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The most likely next tokens of live beams, the most likely first."""

    rows: Tensor  # [num_beams] int64
    tokens: Tensor  # [num_beams, num_candidates] int64
    log_probs: Tensor  # [num_beams, num_candidates] float32

    def to_host(self) -> TopTokens:
        """Start a non-blocking copy to the host. Synchronize with the device before reading the result."""
        return TopTokens(*(tensor.to("cpu", non_blocking=True) for tensor in (self.rows, self.tokens, self.log_probs)))


class Computation(NamedTuple):
    """How an output is computed for rows of logits, and read. A row has one or more tokens: the sampled one, the
    candidates of a beam, or the next token of the prompt."""

    # From logits [num_rows, vocab] of any float dtype, tokens [num_rows, num_tokens] int64, and how many of the most
    # likely tokens the values of each row describe, to tensors with a first dimension of num_rows.
    compute: Callable[[Tensor, Tensor, Sequence[int]], tuple[Tensor, ...]]
    # From these tensors on the host, the same numbers, and num_tokens, to the values of the tokens of each row.
    read: Callable[[Sequence[Tensor], Sequence[int], int], Iterator[list[Any]]]


COMPUTATIONS: Mapping[str, Computation] = {
    LOGPROBS.name: Computation(logprobs.compute, logprobs.read),
    FINGERPRINTS.name: Computation(fingerprints.compute, fingerprints.read),
}


class Source(Enum):
    """What the rows of an output are."""

    SAMPLED = "sampled"  # sampled tokens
    BEAMS = "beams"  # live beams
    PROMPT = "prompt"  # positions of the prompt


@dataclass(frozen=True, eq=False)
class OutputRows:
    """The rows of a step for which an output is requested."""

    name: str
    source: Source
    rows: Tensor  # [num_rows] int64: indices into the sampled tokens, the live beams or the logits
    num_top: tuple[int, ...]  # by row
    owners: tuple[int, ...]  # by row: the sampled token, live beam or chunk that gets the values
    tokens: Tensor | None = None  # [num_rows] int64: the next tokens of the prompt


@dataclass(frozen=True, eq=False)
class OutputValues:
    """The values of an output, as tensors."""

    of: OutputRows
    num_tokens: int  # per row
    tensors: tuple[Tensor, ...]

    def to_host(self) -> OutputValues:
        """Start a non-blocking copy to the host. Synchronize with the device before reading the result."""
        return replace(self, tensors=tuple(tensor.to("cpu", non_blocking=True) for tensor in self.tensors))

    def by_row(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the owner of each row with the values of its tokens."""
        values = COMPUTATIONS[self.of.name].read(self.tensors, self.of.num_top, self.num_tokens)
        return zip(self.of.owners, values, strict=True)


def request_rows(source: Source, requested: Sequence[Requested]) -> tuple[OutputRows, ...]:
    """Return the rows of each output. requested: the requested outputs of each sampled token or live beam."""
    output_rows: list[OutputRows] = []
    for name in dict.fromkeys(name for outputs in requested for name in outputs):
        rows = [row for row, outputs in enumerate(requested) if name in outputs]
        num_top = tuple(requested[row][name] for row in rows)
        output_rows.append(OutputRows(name, source, torch.tensor(rows), num_top, owners=tuple(rows)))
    return tuple(output_rows)


def request_prompt_rows(
    requested: Sequence[Requested], owners: Sequence[int], rows: Tensor, tokens: Sequence[int]
) -> tuple[OutputRows, ...]:
    """Return the rows of each output, at most MAX_PROMPT_ROWS at a time.

    Each argument has a value for each scored position. requested: its outputs. owners: its chunk. rows: [num_positions]
    int64, its row in the logits. tokens: the token after it.
    """
    output_rows: list[OutputRows] = []
    for name in dict.fromkeys(name for outputs in requested for name in outputs):
        positions = [position for position, outputs in enumerate(requested) if name in outputs]
        for start in range(0, len(positions), MAX_PROMPT_ROWS):
            part = positions[start : start + MAX_PROMPT_ROWS]
            output_rows.append(
                OutputRows(
                    name,
                    Source.PROMPT,
                    rows[part],
                    num_top=tuple(requested[position][name] for position in part),
                    owners=tuple(owners[position] for position in part),
                    tokens=torch.tensor([tokens[position] for position in part]),
                )
            )
    return tuple(output_rows)


def compute_outputs(
    requested: Sequence[OutputRows],
    logits: Tensor,
    tokens: Tensor,
    beams: TopTokens | None,
    prompt_logits: Tensor,
) -> tuple[OutputValues, ...]:
    """Compute the requested outputs of a step.

    logits: [num_sampled, vocab] of float32, bfloat16 or float16. tokens: [num_sampled] int64, the sampled tokens.
    beams: candidates of the live beams. prompt_logits: [num_sample_rows, vocab].
    """
    computed = []
    for output in requested:
        match output.source:
            case Source.SAMPLED:
                scored, row_logits = tokens[output.rows, None].clamp(min=0), logits[output.rows]
            case Source.BEAMS:
                assert beams
                scored, row_logits = beams.tokens[output.rows], logits[beams.rows[output.rows]]
            case Source.PROMPT:
                assert output.tokens is not None
                scored, row_logits = output.tokens[:, None], prompt_logits[output.rows]
        tensors = COMPUTATIONS[output.name].compute(row_logits, scored, output.num_top)
        computed.append(OutputValues(output, scored.shape[-1], tensors))
    return tuple(computed)
