"""Log probabilities under the model's own distribution: log_softmax of its logits in float32, before penalties,
constraints, temperature and filters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.api.request import Logprobs, TokenLogprob

AT_ONCE = 64  # rows of prompts: float32 copies of their logits are made


@dataclass(frozen=True, eq=False)
class LogprobRows:
    """Rows whose log probabilities are asked for."""

    rows: Tensor  # [num_rows] int64
    counts: tuple[int, ...]  # how many of the likeliest tokens, of each row


@dataclass(frozen=True, eq=False)
class PromptLogprobRows:
    """Rows of prompts, and the tokens that follow in them."""

    asked: LogprobRows
    tokens: Tensor  # [num_rows] int64


@dataclass(frozen=True, eq=False)
class LogprobsTensors:
    """Of every row `num_told` tokens that were drawn, or may be, and the likeliest, as many for every row as any asks
    for."""

    rows: Tensor  # [num_rows] int64
    counts: tuple[int, ...]  # how many of the likeliest each row asks for
    num_told: int
    tokens: Tensor  # [num_rows, num_told + most] int64: the likeliest come last, the first first
    log_probs: Tensor  # [num_rows, num_told + most] float32
    ranks: Tensor  # [num_rows, num_told + most] int64

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, asked: LogprobRows) -> LogprobsTensors:
        """logits [num_rows, vocab] of any float type and tokens [num_rows, num_told] of the rows that are asked for."""
        logits, counts = logits.float(), asked.counts
        best = logits.topk(min(max(counts), logits.shape[-1]), -1)
        found = torch.cat((tokens, best.indices), -1)
        higher = [(logits > logits.gather(-1, one[:, None])).sum(-1) for one in tokens.unbind(-1)]
        # What is higher than one of the best is among them.
        higher_than_best = (best.values[:, None, :] > best.values[:, :, None]).sum(-1)
        # JSON has no infinity, which a model may give for tokens that it never draws.
        log_probs = logits.log_softmax(-1).gather(-1, found).clamp(min=torch.finfo(torch.float32).min)
        ranks = 1 + torch.cat((torch.stack(higher, -1), higher_than_best), -1)
        return cls(asked.rows, counts, tokens.shape[-1], found, log_probs, ranks)

    def to_host(self) -> LogprobsTensors:
        """On its way there; not to be read before the device has got that far."""
        there = (self.rows, self.tokens, self.log_probs, self.ranks)
        rows, *others = (one.to("cpu", non_blocking=True) for one in there)
        return LogprobsTensors(rows, self.counts, self.num_told, *others)

    def by_row(self) -> Iterator[tuple[int, list[Logprobs]]]:
        """What is told of each of a row's tokens."""
        lists = (one.tolist() for one in (self.rows, self.tokens, self.log_probs, self.ranks))
        for count, row, *columns in zip(self.counts, *lists, strict=True):
            entries = list(map(TokenLogprob, *columns))
            told, likeliest = entries[: self.num_told], entries[self.num_told : self.num_told + count]
            yield row, [(own, *(one for one in likeliest if one.token != own.token)) for own in told]


def compute_prompt_logprobs(logits: Tensor, prompts: PromptLogprobRows) -> tuple[LogprobsTensors, ...]:
    """logits [num_samples, vocab], of which `prompts` names rows."""
    asked, found = prompts.asked, []
    for start in range(0, len(asked.counts), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        some = LogprobRows(asked.rows[part], asked.counts[part])
        found.append(LogprobsTensors.of(logits[some.rows], prompts.tokens[part, None], some))
    return tuple(found)
