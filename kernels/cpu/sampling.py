"""Drawing tokens on a CPU, row by row with numpy, whose sort and argmax of one row are many times as fast as PyTorch's.

The result is that of `kernels.sampling`: the largest of logit * scale + noise. Most tokens need no logarithm. With
S, log(CANDIDATES) below the log of the row's summed exponentials, a token's score reaches S only if its noise number w
is at most its probability * CANDIDATES, since the noise, -log(-log(1 - w)), is below -log(w). About CANDIDATES tokens
pass; if the best of them reaches S, no other token can be better.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from kernels.draws import Draws

CANDIDATES = 16.0  # expected; that none reaches S has a probability of exp(-16), and then more are looked at
ROUNDING = 1.001  # what the float32 sums and products of that bound may be wrong by, and more
NEAR = 16.0  # nats below the largest: where a filter looks first


def noise_bits(seeds: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The integers of `kernels.sampling`, [len(seeds), len(tokens)] uint32; seeds and positions int64."""
    return np.stack([_row_bits(key, _token_hashes(tokens)) for key in _keys(seeds, positions)])


def sample(logits: Tensor, draws: Draws | None) -> Tensor:
    """As `kernels.sampling.sample`."""
    rows = logits.float().numpy()
    if draws is None:
        return torch.from_numpy(_best(rows))
    scales = draws.scales.numpy()
    keys = _keys(draws.seeds.numpy(), draws.positions.numpy())
    hashes = _vocabulary(rows.shape[-1])
    tokens = _best(rows)
    for row in np.flatnonzero(scales):
        logits_of = _without_nan(rows[row])
        if not np.isfinite(logits_of[tokens[row]]):
            continue  # an infinite one is the best whatever the noise
        scale, allowed = scales[row], None
        if draws.filters is not None:
            limits = [float(values[row]) for values in vars(draws.filters).values()]
            allowed = _allowed(logits_of, float(scale), *limits)
        if allowed is None:
            tokens[row] = _draw(logits_of, scale, keys[row], hashes)
        else:
            scores = _scores(logits_of[allowed], scale, _row_bits(keys[row], hashes[allowed]))
            tokens[row] = allowed[scores.argmax()]
    return torch.from_numpy(tokens)


def _best(rows: np.ndarray) -> np.ndarray:  # [num_rows] int64
    tokens = rows.argmax(-1)  # the first NaN, where there is one
    for row in np.flatnonzero(np.isnan(rows[np.arange(len(rows)), tokens])):
        tokens[row] = _without_nan(rows[row]).argmax()
    return tokens


def _without_nan(logits: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(logits), -np.inf, logits) if np.isnan(logits.max()) else logits


def _draw(logits: np.ndarray, scale: np.float32, key: np.uint64, hashes: np.ndarray) -> int:
    bits = _row_bits(key, hashes)
    probs = torch.from_numpy(logits * scale).softmax(0).numpy()
    numbers, log_sum = bits.astype(np.float32), _log_sum(logits, scale, probs)
    factor = CANDIDATES
    while True:
        allowed = np.flatnonzero(numbers <= probs * np.float32(factor * ROUNDING * 2**32))
        if len(allowed):
            scores = _scores(logits[allowed], scale, bits[allowed])
            best = scores.argmax()
            if scores[best] >= log_sum - np.log(factor) or len(allowed) == len(logits):
                return int(allowed[best])
        factor *= CANDIDATES


def _log_sum(logits: np.ndarray, scale: np.float32, probs: np.ndarray) -> float:
    """The log of the summed exponentials of logits * scale."""
    top = logits.argmax()
    return float(logits[top] * scale) - float(np.log(probs[top]))


def _scores(logits: np.ndarray, scale: np.float32, bits: np.ndarray) -> np.ndarray:  # float32
    numbers = np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return logits * scale - np.log(-np.log1p(-numbers)).astype(np.float32)


def _allowed(logits: np.ndarray, scale: float, top_k: float, top_p: float, margin: float) -> np.ndarray | None:
    """The tokens that the row's filters leave, or None: all."""
    vocab, top = len(logits), logits.max()
    if top_k >= vocab and top_p >= 1 and margin == np.inf:
        return None
    least = top - np.float32(margin)
    if top_k < vocab or top_p < 1:
        near = logits[logits >= top - np.float32(NEAR / scale)]
        found = _least(near, logits, scale, int(top_k), top_p)
        least = max(least, _least(logits, logits, scale, int(top_k), top_p) if found is None else found)
    return np.flatnonzero(logits >= least)


def _least(near: np.ndarray, logits: np.ndarray, scale: float, top_k: int, top_p: float) -> np.float32 | None:
    """The least logit that top_k and top_p leave, looked for among the largest logits, `near`; None: it is below."""
    vocab, complete = len(logits), len(near) == len(logits)
    ordered = np.sort(near)[::-1]
    least = ordered[-1]
    if top_k < vocab:
        if top_k > len(ordered):
            return None
        least = ordered[top_k - 1]
        ordered = ordered[ordered >= least]
    elif not complete and top_p >= 1:
        return None
    if top_p >= 1:
        return least
    weights = np.exp((ordered - ordered[0]) * np.float32(scale), dtype=np.float64)
    mass = weights.cumsum()
    total = mass[-1]
    if top_k >= vocab and not complete:
        total = np.exp((logits - ordered[0]) * np.float32(scale)).sum(dtype=np.float64)
        if mass[-1] < top_p * total:
            return None
    return ordered[np.count_nonzero(mass - weights < top_p * total) - 1]


# --- the noise: what these are for is said in kernels/sampling.py ---------------------------------------------------


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
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x9E3779B1)
    x ^= x >> np.uint32(15)
    return x
