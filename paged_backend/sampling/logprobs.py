"""Log probabilities of tokens under the model's own distribution.

They are log_softmax of the model's logits in float32, before penalties, constraints, temperature and filters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paged_backend.api.request import Logprobs, TokenLogprob

MAX_PROMPT_ROWS = 64  # prompt rows per pass, which bounds the float32 copies of their logits
ALIGNED = 4  # PyTorch's kernel on GPUs sums the elements of a row in an order that depends on its address modulo 16
CPU_ELEMENTS = 2**19  # logits that a CPU converts to int64 at a time, so that they stay in its cache


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
        best = _top_tokens(logits, min(max(counts), logits.shape[-1]))
        best_logits = logits.gather(-1, best)
        found = torch.cat((tokens, best), -1)
        higher = [(logits > logits.gather(-1, column[:, None])).sum(-1) for column in tokens.unbind(-1)]
        # Every token above a top token is a top token itself.
        higher_than_best = (best_logits[:, None, :] > best_logits[:, :, None]).sum(-1)
        # A masked token has log probability -infinity, which JSON cannot represent.
        log_probs = _log_softmax(logits).gather(-1, found).clamp(min=torch.finfo(torch.float32).min)
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


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log_softmax of logits [num_rows, vocab] float32, the same for a row wherever it is in the batch."""
    if padding := -logits.shape[-1] % ALIGNED:
        logits = functional.pad(logits, (0, padding), value=-math.inf)  # adds exact zeros to the sum
    return logits.log_softmax(-1)


def _top_tokens(logits: Tensor, count: int) -> Tensor:  # [num_rows, count] int64
    """Return the most likely tokens of each row of logits [num_rows, vocab] float32, best first. Of tokens with the
    same logit, which are common in 16 bits, the one with the lower id comes first, however many are returned."""
    vocab = logits.shape[-1]
    if count == 0:
        return torch.zeros(len(logits), 0, dtype=torch.int64, device=logits.device)
    ids = torch.arange(vocab - 1, -1, -1, device=logits.device)
    parts = logits.split(rows_at_a_time(logits))
    return torch.cat([(_sortable(part).long() << 32 | ids).topk(count, -1).indices for part in parts])


def rows_at_a_time(logits: Tensor) -> int:
    """Return how many rows of logits [num_rows, vocab] to convert to int64 at a time."""
    return MAX_PROMPT_ROWS if logits.is_cuda else max(1, CPU_ELEMENTS // logits.shape[-1])


def _sortable(logits: Tensor) -> Tensor:
    """Return int32 values in the order of float32 values, in which 0 and -0 are equal."""
    bits = (logits + 0.0).view(torch.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def compute_prompt_logprobs(logits: Tensor, prompts: PromptLogprobRows) -> tuple[LogprobsTensors, ...]:
    """Compute prompt log probabilities from logits [num_samples, vocab], `MAX_PROMPT_ROWS` rows at a time."""
    requested, parts = prompts.logprob_rows, []
    for start in range(0, len(requested.counts), MAX_PROMPT_ROWS):
        part = slice(start, start + MAX_PROMPT_ROWS)
        rows = LogprobRows(requested.rows[part], requested.counts[part])
        parts.append(LogprobsTensors.of(logits[rows.rows], prompts.tokens[part, None], rows))
    return tuple(parts)
