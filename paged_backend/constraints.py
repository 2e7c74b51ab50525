"""What requests forbid and favour of the tokens that they may draw, for all rows of a step at once.

In vLLM's order: tokens that are not allowed, bad words, and what would end the output before `min_tokens` are out can
no longer be drawn; then `logit_bias` is added. Penalties, temperature and filters come after all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_backend.masks import Mask, apply, gather
from paged_backend.sequence import Draw
from paged_backend.sequence import Sequence as Sample


@dataclass(frozen=True, eq=False)
class Bias:
    """What is added to logits, each value where the row's latest token is the wanted one. That token may not be known
    on the host yet."""

    rows: Tensor  # [num_values] int64
    tokens: Tensor  # [num_values] int64: whose logits; one may come several times
    values: Tensor  # [num_values] float32; -infinity: the token cannot be drawn
    latest: Tensor  # [num_values] int64, or what stands for it
    wanted: Tensor  # [num_values] int64; as `latest` where any will do


@dataclass(frozen=True, eq=False)
class Constraints:
    """Those of a step; what no row asks for is None."""

    mask: Mask | None
    bias: Bias | None


Entry = tuple[int, int, float, int, int]  # of a Bias, in its order


def prepare(draws: Sequence[Draw]) -> Constraints | None:
    """On the host; None where no row asks for anything."""
    asking = [(row, *draw) for row, draw in enumerate(draws) if draw[0].request.is_constrained]
    if not asking:
        return None
    entries = [entry for one in asking for entry in _entries(*one)]
    forbidden: dict[int, list[int]] = {}
    for row, token, value, *_ in entries:
        if value == -math.inf:
            forbidden.setdefault(row, []).append(token)
    return Constraints(gather(asking, forbidden), _bias(entries))


def follow(constraints: Constraints, known: Callable[[Tensor], Tensor]) -> Constraints:
    """known: puts tokens in place of what stands for them."""
    bias = constraints.bias
    return constraints if bias is None else replace(constraints, bias=replace(bias, latest=known(bias.latest)))


def constrained(logits: Tensor, constraints: Constraints) -> Tensor:
    """logits [num_rows, vocab] of any float type -> the same in float32, constraints applied. They may as well be log
    probabilities."""
    logits = logits.float()
    if constraints.mask is not None:
        logits = apply(logits, constraints.mask)
    if constraints.bias is not None:
        bias = constraints.bias
        values = bias.values.where(bias.latest == bias.wanted, 0.0)
        logits = logits.index_put((bias.rows, bias.tokens), values, accumulate=True)
    return logits


def _bias(entries: Sequence[Entry]) -> Bias | None:
    if not entries:
        return None
    rows, tokens, values, latest, wanted = zip(*entries, strict=True)
    return Bias(
        torch.tensor(rows), torch.tensor(tokens), torch.tensor(values, dtype=torch.float32), torch.tensor(latest),
        torch.tensor(wanted),
    )  # fmt: skip


def _entries(row: int, sequence: Sample, position: int) -> Iterator[Entry]:
    request, generated = sequence.request, position - sequence.num_prompt
    if generated < request.sampling.min_tokens and not request.guides:
        for token in request.stop_ids:
            yield row, token, -math.inf, 0, 0
    for token, value in request.sampling.logit_bias:
        yield row, token, value, 0, 0
    for *before, last in request.bad_words:
        if not before:
            yield row, last, -math.inf, 0, 0
        elif len(before) <= generated:
            *others, latest = sequence.tokens[position - len(before) : position]
            if others == before[:-1] and (latest < 0 or latest == before[-1]):
                yield row, last, -math.inf, latest, before[-1]
