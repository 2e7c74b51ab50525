"""Token constraints of all rows of a step: allowed tokens, guides, bad words, min_tokens, logit_bias, thinking budget.

The order is vLLM's: first allowed_token_ids, bad words and min_tokens mask out tokens, then logit_bias is added.
Penalties, temperature and the top-k, top-p and min-p filters follow. A token that the thinking budget forces gets a
bias that outweighs all of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paged_backend.kv.sequence import SamplePosition
from paged_backend.kv.sequence import Sequence as Sample
from paged_backend.sampling.masks import ConstrainedRows, Mask, apply_mask, build_mask


@dataclass(frozen=True, eq=False)
class Bias:
    """Values to add to logits, each applied only if the row's latest token equals `condition`.

    The condition is evaluated on the device because the host may not know the latest token yet.
    """

    rows: Tensor  # [num_values] int64
    tokens: Tensor  # [num_values] int64; a token may occur several times
    values: Tensor  # [num_values] float32; -infinity: the token cannot be sampled
    latest: Tensor  # [num_values] int64; the row's latest token or its placeholder
    condition: Tensor  # [num_values] int64; equal to `latest` for an unconditional value


@dataclass(frozen=True, eq=False)
class Constraints:
    """The constraints of a step; None for a kind that no row uses."""

    mask: Mask | None
    bias: Bias | None


# A token that a row cannot or must sample: (row, token, latest, condition), the last two as in Bias.
Rule = tuple[int, int, int, int]

FORCED = 1e12  # outweighs logits, logit_bias and penalties, and stays finite when divided by temperatures


def prepare(sample_positions: Sequence[SamplePosition]) -> Constraints | None:
    """Collect the constraints of these tokens on the host. Returns None if no token has any."""
    rows = [
        (row, seq, position) for row, (seq, position) in enumerate(sample_positions) if seq.request.constrains_logits
    ]
    if not rows:
        return None
    bans = [(row, *ban) for row, sequence, position in rows for ban in _bans(sequence, position)]
    forced = [(row, *token) for row, sequence, position in rows for token in _forced(sequence, position)]
    mask, bias = build_mask(rows, _excluded_tokens(rows, bans)), _bias(rows, bans, forced)
    return Constraints(mask, bias) if mask or bias else None


def resolve_tokens(constraints: Constraints, resolve: Callable[[Tensor], Tensor]) -> Constraints:
    """Replace placeholders by sampled tokens. `resolve` does so for one tensor."""
    bias = constraints.bias
    return constraints if bias is None else replace(constraints, bias=replace(bias, latest=resolve(bias.latest)))


def apply_constraints(logits: Tensor, constraints: Constraints) -> Tensor:
    """Return logits [num_rows, vocab], of any float dtype, in float32 with the constraints applied.

    Log probabilities may be passed in place of logits.
    """
    logits = logits.float()
    if constraints.mask is not None:
        logits = apply_mask(logits, constraints.mask)
    if constraints.bias is not None:
        bias = constraints.bias
        values = bias.values.where(bias.latest == bias.condition, 0.0)
        logits = logits.index_put((bias.rows, bias.tokens), values, accumulate=True)
    return logits


def _bans(sequence: Sample, position: int) -> Iterator[tuple[int, int, int]]:
    """Yield (token, latest, condition) for the bans that depend on the output's length and tokens.

    These are stop tokens before min_tokens and the last token of a bad word whose beginning has been generated.
    """
    request, tokens = sequence.request, sequence.tokens
    if position - sequence.num_prompt < request.sampling.min_tokens and not request.guides:
        for token in request.stop_ids:
            yield token, 0, 0
    if not request.bad_word_endings or position == sequence.num_prompt:
        return
    latest = tokens[position - 1]
    for condition in request.bad_word_endings if latest < 0 else (latest,):
        for before, last in request.bad_word_endings.get(condition, ()):
            start = position - 1 - len(before)
            if start >= sequence.num_prompt and tokens[start : position - 1] == before:
                yield last, latest, condition


def _forced(sequence: Sample, position: int) -> Iterator[tuple[int, int, int]]:
    """Yield (token, latest, condition) for the token that the thinking budget forces."""
    budget = sequence.request.thinking
    if budget is None:
        return
    reasoning = sequence.reasoning(position)
    if reasoning.length < position:  # the latest token is not known
        if (opening := budget.opening_token(reasoning)) is not None:
            yield budget.end[0], sequence.tokens[position - 1], opening
    elif (token := budget.forced_token(reasoning)) is not None:
        yield token, 0, 0


def _excluded_tokens(rows: ConstrainedRows, bans: Sequence[Rule]) -> dict[int, list[int]]:
    """Return, by row with a guide, the tokens that other constraints exclude."""
    excluded = {
        row: [token for token, value in zip(*sequence.request.biases, strict=True) if value == -math.inf]
        for row, sequence, _ in rows
        if sequence.request.guides
    }
    for row, token, *_ in bans if excluded else ():
        if row in excluded:
            excluded[row].append(token)
    return excluded


def _bias(rows: ConstrainedRows, bans: Sequence[Rule], forced: Sequence[Rule]) -> Bias | None:
    unconditional = [(row, *sequence.request.biases) for row, sequence, _ in rows if sequence.request.biases[0]]
    if not (unconditional or bans or forced):
        return None
    counts = [len(tokens) for _, tokens, _ in unconditional]
    rules = np.array([*bans, *forced], dtype=np.int64).reshape(-1, 4)
    rule_values = np.repeat(np.array([-np.inf, FORCED], dtype=np.float32), [len(bans), len(forced)])
    no_condition = np.zeros(sum(counts), dtype=np.int64)
    columns = (
        [np.repeat(np.array([row for row, _, _ in unconditional], dtype=np.int64), counts), rules[:, 0]],
        [*(np.frombuffer(tokens, np.int64) for _, tokens, _ in unconditional), rules[:, 1]],
        [*(np.frombuffer(values, np.float32) for *_, values in unconditional), rule_values],
        [no_condition, rules[:, 2]],
        [no_condition, rules[:, 3]],
    )
    return Bias(*(torch.from_numpy(np.concatenate(column)) for column in columns))
