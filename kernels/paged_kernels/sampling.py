"""Token sampling for every row without a sort: the token with the largest logit / temperature + noise.

With Gumbel noise, -log(-log(u)), that token has the probability softmax gives it (Gumbel 1954; Maddison et al. 2014,
"A* Sampling"), and the maximum is found in one pass, in any order. The noise of a token is a function of (seed,
position, token id) alone, from a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1,
2, 3"). Its integers are the same on every device, and do not depend on the rest of the batch:

    key  = mix64(mix64(seed + G) + position * G)             one per row; k0 and k1 are its low and high half
    x    = (mix32(token) ^ k0) * (k1 | 1);  x ^= x >> 16     one per token
    x   *= 0x9E3779B1;                      x ^= x >> 15
    w    = (x + 1/2) / 2**32,  noise = -log(-log(1 - w)), from -2.8 to 22.9

mix64 is the finalizer of SplitMix64 (Steele et al. 2014) and G its increment, mix32 the finalizer of MurmurHash3. The
usual choice, Philox4x32 with 7 rounds, takes six times as long in numpy and would dominate the sampling time on a CPU.

A filter keeps the logits above a threshold. It is found by bisection over the bits of a float, which as integers have
the same order as floats. This is exact and needs no sort, only 16 passes over a row that stays in the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.launch import Device, Launch, device_of
from paged_kernels.launch_table import power_of_two, row_tile
from paged_kernels.sampling_metadata import SamplingMetadata

# Tile of the filter's passes. It is not tuned, because it sets the order of the filter's sums, which affects tokens.
FILTER_TILE, FILTER_WARPS = 4096, 16
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
LOWEST = tl.constexpr(-2139095041)  # value of _sortable(-infinity)


@triton.jit
def _mix64(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _noise_bits(seed, position, token):  # type: ignore[no-untyped-def]
    """Return the random bits [n] uint32 of token [n] int32; seed and position are int64 scalars."""
    key = _mix64(seed.to(tl.uint64, bitcast=True) + GOLDEN)
    key = _mix64(key + position.to(tl.uint64, bitcast=True) * GOLDEN)
    h = token.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    x = (h ^ key.to(tl.uint32)) * ((key >> 32).to(tl.uint32) | 1)
    x = (x ^ (x >> 16)) * 0x9E3779B1
    return x ^ (x >> 15)


@triton.jit
def _noise(bits):  # type: ignore[no-untyped-def]
    w = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # For small w, where the noise is largest, 1 - w would lose too many bits: use a series.
    series = w * (1.0 + w * (0.5 + w * (0.33333334 + w * 0.25)))
    return -tl.log(tl.where(w < 0.015625, series, -tl.log(1.0 - w)))


@triton.jit
def _load(logits, row, stride_row, token, vocab):  # type: ignore[no-untyped-def]
    """Return logits [n] in float32; NaN and tokens past the vocabulary become -infinity."""
    x = tl.load(logits + row.to(tl.int64) * stride_row + token, mask=token < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def best_kernel(  # type: ignore[no-untyped-def]
    logits, scales, seeds, positions, thresholds, scores, tokens, vocab, stride_row,
    RANDOM: tl.constexpr, FILTERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the best score of one tile of a row, and the first token that has it. Grid: (num_rows, tiles).

    A tile with a logit that is NaN or infinity gets infinity and -1.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    invalid = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0) != 0
    score = tl.where(x == x, x, float("-inf"))
    if RANDOM:
        scale = tl.load(scales + row)
        if scale > 0:
            if FILTERS:
                score = tl.where(score >= tl.load(thresholds + row), score, float("-inf"))
            noise = _noise(_noise_bits(tl.load(seeds + row), tl.load(positions + row), token))
            score = score * scale + noise
    best = tl.max(score, 0)
    place = row * tl.num_programs(1) + tile
    first = tl.min(tl.where(score == best, token, 2147483647), 0)
    tl.store(scores + place, tl.where(invalid, float("inf"), best))
    tl.store(tokens + place, tl.where(invalid, -1, first))


@triton.jit
def first_best_kernel(scores, tokens, out, num_tiles, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the token of the best tile, the lowest of several. Grid: (num_rows,). -1 if all scores are -infinity."""
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    score = tl.load(scores + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    token = tl.load(tokens + row * num_tiles + tile, mask=tile < num_tiles, other=2147483647)
    best = tl.max(score, 0)
    first = tl.min(tl.where(score == best, token, 2147483647), 0)
    tl.store(out + row, tl.where(best == float("-inf"), -1, first).to(tl.int64))


@triton.jit
def _sortable(x):  # type: ignore[no-untyped-def]
    """Return int32 that sort like the float32 x. The two zeros differ, which does not affect the results."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(x, top, scale, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.full(x.shape, 1.0, tl.float32) if COUNT else tl.exp(tl.where(x == top, 0.0, (x - top) * scale))


@triton.jit
def _mass(logits, row, stride_row, vocab, top, scale, key, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum the weights of the logits from `key` on, in an order that depends on the vocabulary size alone."""
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocab, TILE):
        token = start + tl.arange(0, TILE)
        x = _load(logits, row, stride_row, token, vocab)
        total += tl.where(_sortable(x) >= key, _weight(x, top, scale, False), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _threshold_key(logits, row, stride_row, vocab, top, scale, low, wanted, COUNT: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the smallest integer from `low` on above which less than `wanted` remains, in tokens (COUNT) or in weight.

    Each pass finds two bits. A sum in the same order over fewer terms is never larger, so the result is well defined
    in floating point too.
    """
    high, low = _sortable(top).to(tl.int64), low.to(tl.int64)  # 64 bits, as their difference may exceed 32
    while low < high:
        step = high - low
        key1, key2, key3 = low + step // 4, low + step // 2, low + 3 * step // 4
        above1 = tl.zeros((TILE,), tl.float32)
        above2 = tl.zeros((TILE,), tl.float32)
        above3 = tl.zeros((TILE,), tl.float32)
        for start in range(0, vocab, TILE):
            token = start + tl.arange(0, TILE)
            x = _load(logits, row, stride_row, token, vocab)
            key, weight = _sortable(x), _weight(x, top, scale, COUNT)
            above1 += tl.where(key > key1.to(tl.int32), weight, 0.0)
            above2 += tl.where(key > key2.to(tl.int32), weight, 0.0)
            above3 += tl.where(key > key3.to(tl.int32), weight, 0.0)
        less1 = tl.sum(above1, 0) < wanted
        less2 = tl.sum(above2, 0) < wanted
        less3 = tl.sum(above3, 0) < wanted
        low = tl.where(less1, low, tl.where(less2, key1 + 1, tl.where(less3, key2 + 1, key3 + 1)))
        high = tl.where(less1, key1, tl.where(less2, key2, tl.where(less3, key3, high)))
    return low.to(tl.int32)


@triton.jit
def threshold_kernel(logits, scales, top_ks, top_ps, margins, thresholds, vocab, stride_row, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the smallest logit that the row's filters keep; -infinity without filters. Grid: (num_rows,)."""
    row = tl.program_id(0)
    scale, top_k, top_p = tl.load(scales + row), tl.load(top_ks + row), tl.load(top_ps + row)
    margin = tl.load(margins + row)
    if (scale == 0) | ((top_k >= vocab) & (top_p >= 1) & (margin == float("inf"))):
        tl.store(thresholds + row, float("-inf"))
        return
    tops = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(0, vocab, TILE):
        tops = tl.maximum(tops, _load(logits, row, stride_row, start + tl.arange(0, TILE), vocab))
    top = tl.max(tops, 0)
    key = tl.full((), LOWEST, tl.int32)
    if top_k < vocab:
        key = _threshold_key(logits, row, stride_row, vocab, top, scale, key, top_k.to(tl.float32), True, TILE)
    if top_p < 1:
        wanted = top_p * _mass(logits, row, stride_row, vocab, top, scale, key, TILE)
        key = _threshold_key(logits, row, stride_row, vocab, top, scale, key, wanted, False, TILE)
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(thresholds + row, tl.maximum(value, tl.where(margin == float("inf"), float("-inf"), top - margin)))


def plan_launch(logits: Tensor, metadata: SamplingMetadata | None, out: Tensor, *, device: Device) -> list[Launch]:
    """Return the launches of one call in order: filter thresholds, best token of each tile, best tile of each row."""
    num_rows, vocab = logits.shape
    tile = row_tile(device.chip, "sampling", width=vocab, rows=num_rows)
    num_tiles = triton.cdiv(vocab, tile.elements)
    scores = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    launches, thresholds = [], None
    common = dict(logits=logits, scales=metadata and metadata.scales, vocab=vocab, stride_row=logits.stride(0))
    if metadata is not None and metadata.filters is not None:
        thresholds = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        filters = dict(top_ks=metadata.filters.top_k, top_ps=metadata.filters.top_p, margins=metadata.filters.margin)
        arguments = dict(**common, **filters, thresholds=thresholds, TILE=FILTER_TILE, num_warps=FILTER_WARPS)
        launches.append(Launch(threshold_kernel, (num_rows,), arguments))
    best = dict(
        **common, seeds=metadata and metadata.seeds, positions=metadata and metadata.positions, thresholds=thresholds,
        scores=scores, tokens=tokens, RANDOM=metadata is not None, FILTERS=thresholds is not None, TILE=tile.elements,
        num_warps=tile.num_warps,
    )  # fmt: skip
    launches.append(Launch(best_kernel, (num_rows, num_tiles), best))
    first = dict(scores=scores, tokens=tokens, out=out, num_tiles=num_tiles, TILES=power_of_two(num_tiles), num_warps=1)
    return [*launches, Launch(first_best_kernel, (num_rows,), first)]


def sample(
    logits: Tensor,  # [num_rows, vocab] of any float type; rows may be strided
    metadata: SamplingMetadata | None,  # None: greedy for every row
    *,
    out: Tensor | None = None,  # [num_rows] int64; None: a new tensor
) -> Tensor:  # [num_rows] int64
    """Sample one token per row without synchronizing with the device, in two launches, or three with filters.

    Of equal scores the lowest token wins. A row that cannot be sampled gets -1: one of its logits is NaN or infinity,
    or all are -infinity.
    """
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device) if out is None else out
    if len(logits):
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        for planned in plan_launch(logits, metadata, out, device=device_of(logits.device)):
            planned.run()
    return out


@triton.jit
def _noise_kernel(seeds, positions, out, noise, num_tokens, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, token = tl.program_id(0), tl.arange(0, TILE)
    bits = _noise_bits(tl.load(seeds + row), tl.load(positions + row), token)
    tl.store(out + row * num_tokens + token, bits.to(tl.int64), mask=token < num_tokens)
    tl.store(noise + row * num_tokens + token, _noise(bits), mask=token < num_tokens)


def sampling_noise(seeds: Tensor, positions: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the kernels' random bits and noise, [num_rows, num_tokens] int64 and float32; for tests."""
    bits = torch.empty((len(seeds), num_tokens), dtype=torch.int64, device=seeds.device)
    noise = torch.empty_like(bits, dtype=torch.float32)
    tile = triton.next_power_of_2(num_tokens)
    _noise_kernel[(len(seeds),)](seeds, positions, bits, noise, num_tokens, TILE=tile)
    return bits, noise


def noise_bits_reference(seed: int, position: int, token: int) -> int:
    """Compute the random bits of a token with Python integers. The definition for tests; slow."""

    def mix64(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    key = mix64((mix64((seed + golden) % 2**64) + position * golden) % 2**64)
    token = (token ^ token >> 16) * 0x85EBCA6B % 2**32
    token = (token ^ token >> 13) * 0xC2B2AE35 % 2**32
    x = (token ^ token >> 16 ^ key % 2**32) * (key >> 32 | 1) % 2**32
    x = (x ^ x >> 16) * 0x9E3779B1 % 2**32
    return x ^ x >> 15


def sample_reference(logits: Tensor, metadata: SamplingMetadata | None) -> Tensor:
    """Sample one row at a time. The definition of `sample` for tests; slow."""
    tokens = []
    for row, values in enumerate(logits.float().cpu()):
        if not values.max().isfinite():  # true for NaN too, since max() is NaN if a logit is
            tokens.append(-1)
            continue
        scale = float(metadata.scales[row]) if metadata else 0.0
        scores = values.double()
        if metadata and scale:
            if metadata.filters:
                scores = scores.where(_kept_reference(scores, scale, metadata, row), -torch.inf)
            seed, position = int(metadata.seeds[row]), int(metadata.positions[row])
            bits = [noise_bits_reference(seed, position, token) for token in range(len(values))]
            numbers = (torch.tensor(bits, dtype=torch.float64) + 0.5) / 2**32
            scores = scores * scale - torch.log(-torch.log1p(-numbers))
        tokens.append(int((scores == scores.max()).nonzero()[0]))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _kept_reference(values: Tensor, scale: float, metadata: SamplingMetadata, row: int) -> Tensor:
    filters, top = metadata.filters, values.max()
    assert filters is not None
    ordered = values.sort(descending=True).values
    kept = values >= ordered[min(int(filters.top_k[row]), len(values)) - 1]
    weights = torch.where(values == top, 1.0, ((values - top) * scale).exp()) * kept
    if float(filters.top_p[row]) < 1:
        wanted = float(filters.top_p[row]) * weights.sum()
        distinct, place = values.unique(return_inverse=True)
        mass = weights.new_zeros(len(distinct)).index_add(0, place, weights).flip(0)  # from the largest value down
        above = (mass.cumsum(0) - mass).flip(0)[place]
        kept &= above < wanted
    margin = float(filters.margin[row])
    return kept if margin == torch.inf else kept & (values >= top - margin)
