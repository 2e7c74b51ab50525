"""Log probabilities of tokens under the model's own distribution.

They are log_softmax of the model's logits in float32, before penalties, constraints, temperature and filters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.api.request import Logprobs, TokenLogprob

MAX_PROMPT_ROWS = 64  # prompt rows per pass, which bounds the float32 copies of their logits


@dataclass(frozen=True, eq=False)
class LogprobRows:
    """The rows whose request asks for log probabilities."""

    rows: Tensor  # [num_rows] int64
    counts: tuple[int, ...]  # top tokens to return for each row


@dataclass(frozen=True, eq=False)
class PromptLogprobRows:
    """Prompt rows to score, and the prompt token that follows each."""

    logprob_rows: LogprobRows
    tokens: Tensor  # [num_rows] int64


@dataclass(frozen=True, eq=False)
class LogprobsTensors:
    """Log probabilities and ranks of each row's scored tokens, followed by those of its top tokens.

    The first `num_scored` columns are the sampled tokens or the candidates of a beam. The remaining columns are the top
    tokens, the most probable first. All rows have as many columns as the largest request of the step needs.
    """

    rows: Tensor  # [num_rows] int64
    counts: tuple[int, ...]  # top tokens to return for each row
    num_scored: int
    tokens: Tensor  # [num_rows, num_scored + max(counts)] int64
    log_probs: Tensor  # [num_rows, num_scored + max(counts)] float32
    ranks: Tensor  # [num_rows, num_scored + max(counts)] int64; 1 is the most probable token

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, logprob_rows: LogprobRows) -> LogprobsTensors:
        """Compute the log probabilities of `tokens` and of the top tokens.

        logits [num_rows, vocab] of any float dtype and tokens [num_rows, num_scored] hold the rows in `logprob_rows`.
        """
        logits, counts = logits.float(), logprob_rows.counts
        best = logits.topk(min(max(counts), logits.shape[-1]), -1)
        found = torch.cat((tokens, best.indices), -1)
        higher = [(logits > logits.gather(-1, column[:, None])).sum(-1) for column in tokens.unbind(-1)]
        # Every token above a top token is a top token itself.
        higher_than_best = (best.values[:, None, :] > best.values[:, :, None]).sum(-1)
        # A masked token has log probability -infinity, which JSON cannot represent.
        log_probs = logits.log_softmax(-1).gather(-1, found).clamp(min=torch.finfo(torch.float32).min)
        ranks = 1 + torch.cat((torch.stack(higher, -1), higher_than_best), -1)
        return cls(logprob_rows.rows, counts, tokens.shape[-1], found, log_probs, ranks)

    def to_host(self) -> LogprobsTensors:
        """Start a non-blocking copy to the host. Synchronize with the device before reading the result."""
        on_device = (self.rows, self.tokens, self.log_probs, self.ranks)
        rows, *others = (tensor.to("cpu", non_blocking=True) for tensor in on_device)
        return LogprobsTensors(rows, self.counts, self.num_scored, *others)

    def by_row(self) -> Iterator[tuple[int, list[Logprobs]]]:
        """Yield each row with the log probabilities to return for each of its scored tokens."""
        lists = (tensor.tolist() for tensor in (self.rows, self.tokens, self.log_probs, self.ranks))
        for count, row, *columns in zip(self.counts, *lists, strict=True):
            entries = list(map(TokenLogprob, *columns))
            scored, top = entries[: self.num_scored], entries[self.num_scored : self.num_scored + count]
            yield row, [(token, *(entry for entry in top if entry.token != token.token)) for token in scored]


def compute_prompt_logprobs(logits: Tensor, prompts: PromptLogprobRows) -> tuple[LogprobsTensors, ...]:
    """Compute prompt log probabilities from logits [num_samples, vocab], `MAX_PROMPT_ROWS` rows at a time."""
    requested, parts = prompts.logprob_rows, []
    for start in range(0, len(requested.counts), MAX_PROMPT_ROWS):
        part = slice(start, start + MAX_PROMPT_ROWS)
        rows = LogprobRows(requested.rows[part], requested.counts[part])
        parts.append(LogprobsTensors.of(logits[rows.rows], prompts.tokens[part, None], rows))
    return tuple(parts)
