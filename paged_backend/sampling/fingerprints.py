"""Fingerprints of logits: 128 bits of a row that change with each of its bits, and with the order of its elements.

They are computed on the device before penalties, constraints and temperature, with integers that wrap around, so the
order of summation does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paged_backend.api.token_outputs import Fingerprint, split_fingerprints
from paged_backend.sampling.logprobs import rows_at_a_time

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def compute(logits: Tensor, tokens: Tensor, num_top: Sequence[int]) -> tuple[Tensor]:
    """Return the fingerprints [num_rows, 2] int64 of logits [num_rows, vocab] of float32, bfloat16 or float16. The
    other arguments have no effect."""
    return (torch.cat([fingerprints(part) for part in logits.split(rows_at_a_time(logits))]),)


def read(tensors: Sequence[Tensor], num_top: Sequence[int], num_tokens: int) -> Iterator[list[Fingerprint]]:
    """Yield the fingerprint of each row, once for each of its tokens."""
    return ([fingerprint] * num_tokens for fingerprint in split_fingerprints(tensors[0].numpy().tobytes()))


def fingerprints(logits: Tensor) -> Tensor:  # [num_rows, 2] int64
    """Return the fingerprint of each row of logits [num_rows, vocab]: two sums of its bits times odd constants."""
    bits = logits.contiguous().view(_INTEGERS[logits.dtype]).long()
    return torch.stack([(bits * key).sum(-1) for key in _keys(bits.shape[-1], bits.device)], -1)


@lru_cache(maxsize=4)
def _keys(vocab: int, device: torch.device) -> Tensor:  # [2, vocab] int64
    """Return the constants that the elements of a row are multiplied by: odd outputs of SplitMix64 (Steele et al.)."""
    state = np.arange(1, 2 * vocab + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).view(2, vocab).to(device)
