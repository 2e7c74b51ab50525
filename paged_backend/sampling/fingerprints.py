"""Fingerprints of logits: 128 bits of a row that change with each of its bits, and with the order of its elements.

They are computed on the device before penalties, constraints and temperature, with integers that wrap around, so the
order of summation does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from paged_backend.api.request import FINGERPRINT_BYTES, Fingerprint
from paged_backend.sampling.logprobs import rows_at_a_time

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True, eq=False)
class FingerprintRows:
    """The rows whose request asks for a digest of its logits."""

    sampled: Tensor  # [num_sampled] int64: indices into the sampled tokens
    prompts: Tensor  # [num_scored] int64: indices into the step's sample rows
    samples: tuple[int, ...]  # the values of `sampled`, on the host
    prompt_chunks: tuple[tuple[int, int], ...]  # (chunk, number of rows) of `prompts`


@dataclass(frozen=True, eq=False)
class FingerprintTensors:
    """The fingerprints of a step."""

    rows: FingerprintRows
    values: Tensor  # [num_sampled + num_scored, 2] int64

    def to_host(self) -> FingerprintTensors:
        """Start a non-blocking copy to the host. Synchronize with the device before reading the result."""
        return replace(self, values=self.values.to("cpu", non_blocking=True))

    def by_sample(self) -> Iterator[tuple[int, Fingerprint]]:
        """Yield each index of a sampled token with the fingerprint of its row."""
        return zip(self.rows.samples, self._read(0), strict=False)

    def by_chunk(self) -> Iterator[tuple[int, list[Fingerprint]]]:
        """Yield each chunk with the fingerprints of its scored rows."""
        first = len(self.rows.samples)
        for chunk, count in self.rows.prompt_chunks:
            yield chunk, self._read(first)[:count]
            first += count

    def _read(self, first: int) -> list[Fingerprint]:
        data = self.values[first:].numpy().tobytes()
        return [data[start : start + FINGERPRINT_BYTES] for start in range(0, len(data), FINGERPRINT_BYTES)]


def compute_fingerprints(sampled_logits: Tensor, logits: Tensor, rows: FingerprintRows) -> FingerprintTensors:
    """Compute the fingerprints of a step's rows.

    sampled_logits: [num_sampled_tokens, vocab] of float32, bfloat16 or float16. logits: [num_sample_rows, vocab].
    """
    parts = chain(_split(sampled_logits, rows.sampled), _split(logits, rows.prompts))
    return FingerprintTensors(rows, torch.cat([fingerprints(part) for part in parts]))


def fingerprints(logits: Tensor) -> Tensor:  # [num_rows, 2] int64
    """Return the fingerprint of each row of logits [num_rows, vocab]: two sums of its bits times odd constants."""
    bits = logits.contiguous().view(_INTEGERS[logits.dtype]).long()
    return torch.stack([(bits * key).sum(-1) for key in _keys(bits.shape[-1], bits.device)], -1)


def _split(logits: Tensor, rows: Tensor) -> Iterator[Tensor]:
    return (logits[part] for part in rows.split(rows_at_a_time(logits)))


@lru_cache(maxsize=4)
def _keys(vocab: int, device: torch.device) -> Tensor:  # [2, vocab] int64
    """Return the constants that the elements of a row are multiplied by: odd outputs of SplitMix64 (Steele et al.)."""
    state = np.arange(1, 2 * vocab + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).view(2, vocab).to(device)
