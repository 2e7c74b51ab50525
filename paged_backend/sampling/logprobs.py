"""Log probabilities of tokens under the model's own distribution.

They are log_softmax of the model's logits in float32, before penalties, constraints, temperature and filters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from paged_backend.api.token_outputs import Logprobs, TokenLogprob

ALIGNED = 4  # PyTorch's kernel on GPUs sums the elements of a row in an order that depends on its address modulo 16
CPU_ELEMENTS = 2**19  # logits that a CPU converts to int64 at a time, so that they stay in its cache


ROWS_AT_A_TIME = 64  # on a GPU


def compute(logits: Tensor, tokens: Tensor, num_top: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, log probabilities and ranks of each row's tokens, followed by the same of its most likely tokens.

    logits: [num_rows, vocab] of any float dtype. tokens: [num_rows, num_tokens] int64. num_top: number of most likely
    tokens, by row; all rows get the highest of these numbers. The results are [num_rows, num_tokens + max(num_top)], of
    int64, float32 and int64; rank 1 is the most likely token.
    """
    logits = logits.float()
    best = _top_tokens(logits, min(max(num_top), logits.shape[-1]))
    best_logits = logits.gather(-1, best)
    all_tokens = torch.cat((tokens, best), -1)
    higher = [(logits > logits.gather(-1, column[:, None])).sum(-1) for column in tokens.unbind(-1)]
    # Every token above a top token is a top token itself.
    higher_than_best = (best_logits[:, None, :] > best_logits[:, :, None]).sum(-1)
    # A masked token has log probability -infinity, which JSON cannot represent.
    log_probs = _log_softmax(logits).gather(-1, all_tokens).clamp(min=torch.finfo(torch.float32).min)
    ranks = 1 + torch.cat((torch.stack(higher, -1), higher_than_best), -1)
    return all_tokens, log_probs, ranks


def read(tensors: Sequence[Tensor], num_top: Sequence[int], num_tokens: int) -> Iterator[list[Logprobs]]:
    """Yield the log probabilities of the tokens of each row, from the results of `compute` on the host."""
    lists = (tensor.tolist() for tensor in tensors)
    for count, *columns in zip(num_top, *lists, strict=True):
        entries = list(map(TokenLogprob, *columns))
        scored, top = entries[:num_tokens], entries[num_tokens : num_tokens + count]
        yield [(token, *(entry for entry in top if entry.token != token.token)) for token in scored]


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log_softmax of logits [num_rows, vocab] float32, the same for a row wherever it is in the batch."""
    if padding := -logits.shape[-1] % ALIGNED:
        logits = functional.pad(logits, (0, padding), value=-math.inf)  # adds exact zeros to the sum
    return logits.log_softmax(-1)


def _top_tokens(logits: Tensor, count: int) -> Tensor:  # [num_rows, count] int64
    """Return the most likely tokens of each row of logits [num_rows, vocab] float32, best first. Among tokens with the
    same logit, which are common in 16 bits, lower ids come first, however many are returned."""
    vocab = logits.shape[-1]
    if count == 0:
        return torch.zeros(len(logits), 0, dtype=torch.int64, device=logits.device)
    ids = torch.arange(vocab - 1, -1, -1, device=logits.device)
    parts = logits.split(rows_at_a_time(logits))
    return torch.cat([(_sortable(part).long() << 32 | ids).topk(count, -1).indices for part in parts])


def rows_at_a_time(logits: Tensor) -> int:
    """Return how many rows of logits [num_rows, vocab] to convert to a wider type at a time."""
    return ROWS_AT_A_TIME if logits.is_cuda else max(1, CPU_ELEMENTS // logits.shape[-1])


def _sortable(logits: Tensor) -> Tensor:
    """Return int32 values in the order of float32 values, in which 0 and -0 are equal."""
    bits = (logits + 0.0).view(torch.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)
