"""Token sampling on a CPU: the largest logits in C++, and random rows one by one with numpy, whose sort of a row is
many times as fast as PyTorch's.

The result is the same as in `paged_kernels.sampling`: the token with the largest logit * scale + noise. The noise takes
a logarithm, so it is computed for few tokens only. First come the tokens whose number w is below SMALL_W. The noise of
all others is at most MAX_OTHER_NOISE; it is computed only if their logit is large enough to exceed the best score.
"""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from paged_kernels.cpu import native
from paged_kernels.sampling_metadata import SamplingMetadata

SMALL_W = 2.0**-8
MAX_OTHER_NOISE = -math.log(-math.log1p(-SMALL_W))  # 5.54
SEARCH_RANGES = (4.0, 10.0, np.inf)  # nats below the largest logit, the ranges that a filter searches in turn


def noise_bits(seeds: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the random bits [len(seeds), len(tokens)] uint32 of int64 seeds and positions."""
    return np.stack([_row_bits(key, _token_hashes(tokens)) for key in _keys(seeds, positions)])


def sample(logits: Tensor, metadata: SamplingMetadata | None, *, out: Tensor | None = None) -> Tensor:
    """Compute `paged_kernels.sampling.sample`."""
    tokens = best_tokens(logits, out=out)
    if metadata is not None:
        _sample_rows(tokens.numpy(), logits, metadata)
    return tokens


def best_tokens(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute `native.best_tokens`, with numpy if there are no C++ kernels."""
    if native.levels():
        return native.best_tokens(logits, out=out)
    rows = logits.float().numpy()
    tokens = rows.argmax(-1)  # index of the first NaN if there is one
    tokens[~np.isfinite(rows[np.arange(len(rows)), tokens])] = -1
    best = torch.from_numpy(tokens)
    return best if out is None else out.copy_(best)


def _sample_rows(tokens: np.ndarray, logits: Tensor, metadata: SamplingMetadata) -> None:
    """Replace the best tokens of the rows that do not sample greedily."""
    scales = metadata.scales.numpy()
    keys = _keys(metadata.seeds.numpy(), metadata.positions.numpy())
    hashes = _vocabulary(logits.shape[-1])
    for row in np.flatnonzero(scales):
        if tokens[row] < 0:
            continue
        logits_of, scale, kept = logits[row].float().numpy(), scales[row], None
        if metadata.filters is not None:
            kept = _kept_tokens(logits_of, scale, *(values[row].item() for values in vars(metadata.filters).values()))
        if kept is None:
            tokens[row] = _sample_row(logits_of, scale, keys[row], hashes)
        else:
            scores = _scores(logits_of[kept], scale, _row_bits(keys[row], hashes[kept]))
            tokens[row] = kept[scores.argmax()]


def _sample_row(logits: np.ndarray, scale: np.float32, key: np.uint64, hashes: np.ndarray) -> int:
    bits = _row_bits(key, hashes)
    lucky = np.flatnonzero(bits < np.uint32(SMALL_W * 2**32))
    least = -np.inf
    if len(lucky):
        best = _scores(logits[lucky], scale, bits[lucky]).max()
        least = best - MAX_OTHER_NOISE - 1e-3 - 1e-6 * abs(best)  # lowest logit to consider, with a margin for rounding
    likely = np.flatnonzero(logits * scale >= np.float32(least))
    tokens = np.union1d(lucky, likely)
    return int(tokens[_scores(logits[tokens], scale, bits[tokens]).argmax()])


def _scores(logits: np.ndarray, scale: np.float32, bits: np.ndarray) -> np.ndarray:  # float32
    numbers = np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return logits * scale - np.log(-np.log1p(-numbers)).astype(np.float32)


def _kept_tokens(logits: np.ndarray, scale: np.float32, top_k: int, top_p: float, margin: float) -> np.ndarray | None:
    """Return the tokens that the row's filters keep, or None for all."""
    vocab, top = len(logits), logits.max()
    if top_k >= vocab and top_p >= 1 and margin == np.inf:
        return None
    least = top - np.float32(margin)
    if top_k < vocab or top_p < 1:
        least = max(least, _threshold(logits, top, scale, top_k, top_p))
    return np.flatnonzero(logits >= least)


def _threshold(logits: np.ndarray, top: np.float32, scale: np.float32, top_k: int, top_p: float) -> np.float32:
    """Return the smallest logit that top_k and top_p keep."""
    total = None  # sum of all weights, or with top_k of the weights that it keeps
    if top_k >= len(logits):
        total = _weights(logits, top, scale).sum(dtype=np.float64)
    for reach in SEARCH_RANGES:
        near = logits.take(np.flatnonzero(logits >= top - np.float32(reach) / scale))
        ordered = np.sort(near)[::-1]
        if total is None:
            if len(ordered) < min(top_k, len(logits)):
                continue
            ordered = ordered[ordered >= ordered[top_k - 1]]
            if top_p >= 1:
                break
        weights = _weights(ordered, top, scale).astype(np.float64)
        mass = weights.cumsum()
        wanted = top_p * (mass[-1] if total is None else total)
        if mass[-1] >= wanted:
            ordered = ordered[: np.count_nonzero(mass - weights < wanted)]
            break
    return ordered[-1]


def _weights(logits: np.ndarray, top: np.float32, scale: np.float32) -> np.ndarray:  # float32
    return np.exp((logits - top) * scale)


# --- noise: the generator is described in paged_kernels/sampling.py


def _keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:  # [num_rows] uint64
    golden = np.uint64(0x9E3779B97F4A7C15)
    return _mix64(_mix64(seeds.astype(np.uint64) + golden) + positions.astype(np.uint64) * golden)


def _mix64(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _token_hashes(tokens: np.ndarray) -> np.ndarray:  # uint32
    h = tokens.astype(np.uint32)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


@cache
def _vocabulary(size: int) -> np.ndarray:
    return _token_hashes(np.arange(size))


def _row_bits(key: np.uint64, hashes: np.ndarray) -> np.ndarray:
    x = hashes ^ np.uint32(int(key) & 0xFFFFFFFF)
    x *= np.uint32(int(key) >> 32 | 1)
    shifted = x >> np.uint32(16)
    x ^= shifted
    x *= np.uint32(0x9E3779B1)
    x ^= np.right_shift(x, np.uint32(15), out=shifted)
    return x
