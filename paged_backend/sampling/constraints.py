"""What requests forbid and favour of the tokens that they may draw, for all rows of a step at once.

In vLLM's order: tokens that are not allowed, bad words, and what would end the output before `min_tokens` are out can
no longer be drawn; then `logit_bias` is added. Penalties, temperature and filters come after all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paged_backend.sampling.masks import ConstrainedRows, Mask, apply_mask, build_mask
from paged_backend.scheduling.sequence import Draw
from paged_backend.scheduling.sequence import Sequence as Sample


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


Ban = tuple[int, int, int, int]  # a row, a token that it cannot draw, and `latest` and `wanted` as in a Bias


def prepare(draws: Sequence[Draw]) -> Constraints | None:
    """On the host; None where nothing is asked for, or not any more."""
    asking = [(row, *draw) for row, draw in enumerate(draws) if draw[0].request.constrains_logits]
    if not asking:
        return None
    bans = [(row, *ban) for row, sequence, position in asking for ban in _bans(sequence, position)]
    mask, bias = build_mask(asking, _forbidden(asking, bans)), _bias(asking, bans)
    return Constraints(mask, bias) if mask or bias else None


def resolve_tokens(constraints: Constraints, known: Callable[[Tensor], Tensor]) -> Constraints:
    """known: puts tokens in place of what stands for them."""
    bias = constraints.bias
    return constraints if bias is None else replace(constraints, bias=replace(bias, latest=known(bias.latest)))


def apply_constraints(logits: Tensor, constraints: Constraints) -> Tensor:
    """logits [num_rows, vocab] of any float type -> the same in float32, constraints applied. They may as well be log
    probabilities."""
    logits = logits.float()
    if constraints.mask is not None:
        logits = apply_mask(logits, constraints.mask)
    if constraints.bias is not None:
        bias = constraints.bias
        values = bias.values.where(bias.latest == bias.wanted, 0.0)
        logits = logits.index_put((bias.rows, bias.tokens), values, accumulate=True)
    return logits


def _bans(sequence: Sample, position: int) -> Iterator[tuple[int, int, int]]:
    """What follows from how far the output is, and from its tokens."""
    request, tokens = sequence.request, sequence.tokens
    if position - sequence.num_prompt < request.sampling.min_tokens and not request.guides:
        for token in request.stop_ids:
            yield token, 0, 0
    if not request.bad_word_endings or position == sequence.num_prompt:
        return
    latest = tokens[position - 1]
    for wanted in request.bad_word_endings if latest < 0 else (latest,):
        for before, last in request.bad_word_endings.get(wanted, ()):
            start = position - 1 - len(before)
            if start >= sequence.num_prompt and tokens[start : position - 1] == before:
                yield last, latest, wanted


def _forbidden(asking: ConstrainedRows, bans: Sequence[Ban]) -> dict[int, list[int]]:
    """Of rows with a guide, the tokens that they cannot draw whatever it says."""
    found = {
        row: [token for token, value in zip(*sequence.request.biases, strict=True) if value == -math.inf]
        for row, sequence, _ in asking
        if sequence.request.guides
    }
    for row, token, *_ in bans if found else ():
        if row in found:
            found[row].append(token)
    return found


def _bias(asking: ConstrainedRows, bans: Sequence[Ban]) -> Bias | None:
    always = [(row, *sequence.request.biases) for row, sequence, _ in asking if sequence.request.biases[0]]
    if not always and not bans:
        return None
    counts = [len(tokens) for _, tokens, _ in always]
    of_bans = np.array(bans, dtype=np.int64).reshape(-1, 4)
    any_will_do = np.zeros(sum(counts), dtype=np.int64)
    columns = (
        [np.repeat(np.array([row for row, _, _ in always], dtype=np.int64), counts), of_bans[:, 0]],
        [*(np.frombuffer(tokens, np.int64) for _, tokens, _ in always), of_bans[:, 1]],
        [*(np.frombuffer(values, np.float32) for *_, values in always), np.full(len(bans), -np.inf, np.float32)],
        [any_will_do, of_bans[:, 2]],
        [any_will_do, of_bans[:, 3]],
    )
    return Bias(*(torch.from_numpy(np.concatenate(column)) for column in columns))
