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

A filter keeps the logits from a threshold on. The threshold is found without a sort, and with one pass over the row:

1. The first launch reads all logits. Of each group of neighboring tokens it stores the largest logit, and for top_p of
   each tile its part of the softmax's denominator.
2. The second launch has one program per row. It chooses a bound from the maxima of the groups. If k maxima are at least
   the bound, so are at least k logits, and these have at least the probability of the k maxima.
3. It reads the groups whose maximum reaches the bound. Their logits from the bound on are the candidates.
4. Bisection finds the threshold among the candidates. It is exact: it takes place over the bits of a float, which as
   integers have the order of floats.
5. The token with the best score from the threshold on is the result.

If there are too many candidates, or they have too little probability for top_p, steps 4 and 5 read the whole row.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.launch import Device, Launch, device_of
from paged_kernels.launch_table import RowTile, power_of_two, row_tile
from paged_kernels.sampling_metadata import SamplingMetadata

# Tiles of the two launches with filters. They are not tuned, because they set the order of the filters' sums, which
# affects tokens.
FILTER_TILE, SEARCH_TILE = RowTile(4096, 8), RowTile(2048, 8)
STAGES = 3  # steps of a loop over a row, or over its groups, that are loaded or used at the same time
GROUP, STEP = 32, 32  # tokens of a group; groups that are read at once
MAX_GROUPS = 2048  # groups that are read for top_p if the maxima of more have too little mass
MAX_CANDIDATES = 8192
# Zero bits at the end of every float32 that was converted from the type. Bisection leaves them out.
ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13}
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
LARGEST = tl.constexpr(3.4028234663852886e38)  # finite float32


class Draw(NamedTuple):
    """The sampling parameters of a row, as in `SamplingMetadata` and `SamplingFilters`."""

    scale: Any
    seed: Any
    position: Any
    top_k: Any
    top_p: Any
    margin: Any


class Part(NamedTuple):
    """Some logits of a row, in the order of their tokens."""

    logits: Any  # pointer
    tokens: Any  # pointer; None: tokens 0 to count - 1
    count: Any


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
def best_kernel(  # type: ignore[no-untyped-def]
    logits, scales, seeds, positions, top_ks, top_ps, margins, scores, tokens, maxima, masses, vocab, stride_row,
    RANDOM: tl.constexpr, FILTERS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the best score of one tile of a row, and the first token that has it. Grid: (num_rows, tiles).

    A tile with a logit that is NaN or infinity gets infinity and -1. Of a row with filters, find the largest logit of
    the tile and of each group instead, where infinity replaces NaN, and with top_p alone the tile's weight relative to
    its largest logit.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    place = row * tl.num_programs(1) + tile
    if FILTERS:
        draw = _load_draw(scales, seeds, positions, top_ks, top_ps, margins, row)
        if _is_filtered(draw, vocab):
            _store_maxima(x, place, draw, vocab, scores, maxima, masses, GROUP)
        else:
            _store_best(x, token, place, row, scales, seeds, positions, scores, tokens, RANDOM)
    else:
        _store_best(x, token, place, row, scales, seeds, positions, scores, tokens, RANDOM)


@triton.jit
def _store_best(x, token, place, row, scales, seeds, positions, scores, tokens, RANDOM: tl.constexpr):  # type: ignore[no-untyped-def]
    invalid = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0) != 0
    score = tl.where(x == x, x, float("-inf"))
    if RANDOM:
        scale = tl.load(scales + row)
        if scale > 0:
            score = score * scale + _noise(_noise_bits(tl.load(seeds + row), tl.load(positions + row), token))
    best = tl.max(score, 0)
    first = tl.min(tl.where(score == best, token, 2147483647), 0)
    tl.store(scores + place, tl.where(invalid, float("inf"), best))
    tl.store(tokens + place, tl.where(invalid, -1, first))


@triton.jit
def _store_maxima(x, place, draw, vocab, scores, maxima, masses, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    GROUPS: tl.constexpr = x.shape[0] // GROUP
    x = tl.where(x == x, x, float("inf"))
    found = tl.max(tl.reshape(x, [GROUPS, GROUP]), 1)
    top = tl.max(found, 0)
    tl.store(maxima + place.to(tl.int64) * GROUPS + tl.arange(0, GROUPS), found.to(maxima.dtype.element_ty))
    tl.store(scores + place, top)
    if (draw.top_p < 1) & (draw.top_k >= vocab):
        tl.store(masses + place, tl.sum(_weights(x, top, draw.scale, False), 0))


@triton.jit
def _first_best(scores, tokens, row, num_tiles, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the token of the row's best tile, the lowest of several; -1 if all scores are -infinity."""
    tile = tl.arange(0, TILES)
    score = tl.load(scores + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    token = tl.load(tokens + row * num_tiles + tile, mask=tile < num_tiles, other=2147483647)
    best = tl.max(score, 0)
    return tl.where(best == float("-inf"), -1, tl.min(tl.where(score == best, token, 2147483647), 0))


@triton.jit
def first_best_kernel(scores, tokens, out, num_tiles, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the token of the best tile, the lowest of several. Grid: (num_rows,). -1 if all scores are -infinity."""
    row = tl.program_id(0)
    tl.store(out + row, _first_best(scores, tokens, row, num_tiles, TILES).to(tl.int64))


# --- filters ----------------------------------------------------------------------------------------------------------


@triton.jit
def _load_draw(scales, seeds, positions, top_ks, top_ps, margins, row):  # type: ignore[no-untyped-def]
    return Draw(
        tl.load(scales + row), tl.load(seeds + row), tl.load(positions + row), tl.load(top_ks + row),
        tl.load(top_ps + row), tl.load(margins + row),
    )  # fmt: skip


@triton.jit
def _is_filtered(draw, vocab):  # type: ignore[no-untyped-def]
    return (draw.scale > 0) & ((draw.top_k < vocab) | (draw.top_p < 1) | (draw.margin < float("inf")))


@triton.jit
def _weights(x, top, scale, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 1 for each logit (COUNT), or its probability divided by that of the largest logit, `top`."""
    return tl.full(x.shape, 1.0, tl.float32) if COUNT else tl.exp(tl.where(x == top, 0.0, (x - top) * scale))


@triton.jit
def _key(x, ZERO_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return int32 that sort like the float32 x, whose last ZERO_BITS bits are zero. Those of 0 and -0 are equal."""
    bits = x.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF) >> ZERO_BITS
    return tl.where(bits < 0, -size, size)


@triton.jit
def _value(key, ZERO_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the float32 of a key."""
    size = (tl.abs(key).to(tl.int32) << ZERO_BITS).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -size, size)


@triton.jit
def _read(part, place):  # type: ignore[no-untyped-def]
    """Return the logits at some places in float32, -infinity past the end."""
    return tl.load(part.logits + place, mask=place < part.count, other=float("-inf")).to(tl.float32)


@triton.jit
def _sum_from(part, least, top, scale, COUNT: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum the weights of the logits from `least` on, in an order that depends on the number of logits alone."""
    total = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, part.count, TILE, num_stages=STAGES):
        x = _read(part, start + tl.arange(0, TILE))
        total += tl.where(x >= least, _weights(x, top, scale, COUNT), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    part, top, scale, low, high, wanted, enough,
    COUNT: tl.constexpr, ZERO_BITS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Find the largest key between `low` and `high` from which on the weights add up to `wanted`; `low` if none.

    The search ends at any key from which on they add up to at least `wanted` and at most `enough`. Each pass finds two
    bits. A sum in the same order over fewer terms is never larger, so the result is well defined in floating point too.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)  # 64 bits, as their difference may exceed 32
    while high - low > 1:
        step = high - low
        key1, key2, key3 = low + tl.maximum(step // 4, 1), low + step // 2, low + tl.maximum(3 * step // 4, 1)
        above1 = tl.zeros([TILE], tl.float32)
        above2 = tl.zeros([TILE], tl.float32)
        above3 = tl.zeros([TILE], tl.float32)
        for start in tl.range(0, part.count, TILE, num_stages=STAGES):
            x = _read(part, start + tl.arange(0, TILE))
            key, weight = _key(x, ZERO_BITS), _weights(x, top, scale, COUNT)
            above1 += tl.where(key >= key1.to(tl.int32), weight, 0.0)
            above2 += tl.where(key >= key2.to(tl.int32), weight, 0.0)
            above3 += tl.where(key >= key3.to(tl.int32), weight, 0.0)
        sum1, sum2, sum3 = tl.sum(above1, 0), tl.sum(above2, 0), tl.sum(above3, 0)
        holds1, holds2, holds3 = sum1 >= wanted, sum2 >= wanted, sum3 >= wanted
        low = tl.where(holds3, key3, tl.where(holds2, key2, tl.where(holds1, key1, low)))
        high = tl.where(holds1, tl.where(holds2, tl.where(holds3, high, key3), key2), key1)
        found = tl.where(holds3, sum3, tl.where(holds2, sum2, sum1))
        high = tl.where(holds1 & (found <= enough), low + 1, high)
    return low.to(tl.int32)


@triton.jit
def _bound(  # type: ignore[no-untyped-def]
    maxima, draw, vocab, top, total, MAX_GROUPS: tl.constexpr, ZERO_BITS: tl.constexpr, TILE: tl.constexpr
):
    """Return the key from which on logits become candidates, and the smallest one that needs to be considered.

    min_p decides the latter, unless top_p refers to the mass of what top_k keeps.
    """
    uses_both = (draw.top_k < vocab) & (draw.top_p < 1)
    floor = _key(tl.maximum(-LARGEST, tl.where(uses_both, -LARGEST, top - draw.margin)), ZERO_BITS)
    bound = floor
    if (draw.top_k < vocab) | (draw.top_p < 1):
        least = tl.full([TILE], float("inf"), tl.float32)
        for start in range(0, maxima.count, TILE):
            group = start + tl.arange(0, TILE)
            least = tl.minimum(least, tl.where(group < maxima.count, _read(maxima, group), float("inf")))
        bound = tl.maximum(floor, _key(tl.min(least, 0), ZERO_BITS))
        after_top = _key(top, ZERO_BITS) + 1
        if draw.top_k < vocab:
            top_k = draw.top_k.to(tl.float32)
            bound = _search(maxima, top, draw.scale, bound, after_top, top_k, 2 * top_k, True, ZERO_BITS, TILE, 1)
        else:
            wanted = draw.top_p * total
            enough = wanted + (total - wanted) / 8
            bound = _search(maxima, top, draw.scale, bound, after_top, wanted, enough, False, ZERO_BITS, TILE, 1)
            if _sum_from(maxima, _value(bound, ZERO_BITS), top, draw.scale, True, TILE, 1) > MAX_GROUPS:
                bound = _search(
                    maxima, top, draw.scale, bound, after_top, MAX_GROUPS, 1.1 * MAX_GROUPS,
                    True, ZERO_BITS, TILE, 1,
                )  # fmt: skip
    return bound, floor


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    row, groups, candidates, maxima, bound, top, scale,
    GROUP: tl.constexpr, STEP: tl.constexpr, MAX_CANDIDATES: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Copy the row's logits from `bound` on to `candidates`, as far as there is room. Return their number and weight.

    groups: memory for the groups whose maximum reaches the bound.
    """
    num_groups = 0
    for start in range(0, maxima.count, TILE):
        group = start + tl.arange(0, TILE)
        reaches = _read(maxima, group) >= bound
        tl.store(groups + num_groups + tl.cumsum(reaches.to(tl.int32), 0) - 1, group, mask=reaches)
        num_groups += tl.sum(reaches.to(tl.int32), 0)
    tl.debug_barrier()  # all threads have stored
    count = 0
    weight = tl.zeros([STEP, GROUP], tl.float32)
    for start in tl.range(0, num_groups, STEP, num_stages=STAGES):
        index = start + tl.arange(0, STEP)
        group = tl.load(groups + index, mask=index < num_groups, other=maxima.count)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(row.logits + token, mask=token < row.count, other=float("-inf"))
        wide = x.to(tl.float32)
        reaches = wide >= bound
        order = tl.cumsum(tl.reshape(reaches.to(tl.int32), [STEP * GROUP]), 0)
        place = count + tl.reshape(order, [STEP, GROUP]) - 1
        fits = reaches & (place < MAX_CANDIDATES)
        tl.store(candidates.logits + place, x, mask=fits)
        tl.store(candidates.tokens + place, token, mask=fits)
        count += tl.max(order, 0)
        weight += tl.where(reaches, _weights(wide, top, scale, False), 0.0)
    tl.debug_barrier()
    return count, tl.sum(tl.sum(weight, 1), 0)


@triton.jit
def _best_token(part, least, draw, TILE: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the token with the best score of the logits from `least` on, the lowest of several."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    first = tl.full([TILE], 2147483647, tl.int32)
    for start in tl.range(0, part.count, TILE, num_stages=STAGES):
        place = start + tl.arange(0, TILE)
        x = _read(part, place)
        token = place
        if part.tokens is not None:
            token = tl.load(part.tokens + place, mask=place < part.count, other=0)
        score = x * draw.scale + _noise(_noise_bits(draw.seed, draw.position, token))
        score = tl.where(x >= least, score, float("-inf"))
        first = tl.where(score > best, token, first)
        best = tl.maximum(best, score)
    return tl.min(tl.where(best == tl.max(best, 0), first, 2147483647), 0)


@triton.jit
def _filtered_token(  # type: ignore[no-untyped-def]
    part, draw, vocab, top, total, low, high, ZERO_BITS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr
):
    """Return the row's token. `part` has every logit that the filters keep.

    low, high: keys between which the threshold of the first filter is. total: sum of the weights of all logits.
    """
    key, after_top = low, _key(top, ZERO_BITS) + 1
    if draw.top_k < vocab:
        top_k = draw.top_k.to(tl.float32)
        key = _search(part, top, draw.scale, key, high, top_k, top_k, True, ZERO_BITS, TILE, STAGES)
        high = after_top
        if draw.top_p < 1:
            total = _sum_from(part, _value(key, ZERO_BITS), top, draw.scale, False, TILE, STAGES)
    if draw.top_p < 1:
        key = _search(part, top, draw.scale, key, high, draw.top_p * total, 0.0, False, ZERO_BITS, TILE, STAGES)
    return _best_token(part, tl.maximum(_value(key, ZERO_BITS), top - draw.margin), draw, TILE, STAGES)


@triton.jit
def filter_kernel(  # type: ignore[no-untyped-def]
    logits, scales, seeds, positions, top_ks, top_ps, margins, scores, tokens, maxima, masses,
    groups, candidates, candidate_tokens, out, vocab, stride_row,
    ZERO_BITS: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, MAX_GROUPS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr, FIRST_TILE: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Find the token of a row from the results of `best_kernel`. Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    num_tiles = tl.cdiv(vocab, FIRST_TILE)
    draw = _load_draw(scales, seeds, positions, top_ks, top_ps, margins, row)
    token = tl.full((), -1, tl.int32)
    if _is_filtered(draw, vocab):
        tile = tl.arange(0, TILES)
        tops = tl.load(scores + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
        top = tl.max(tops, 0)
        if tl.abs(top) < float("inf"):
            total = tl.full((), 0.0, tl.float32)
            if (draw.top_p < 1) & (draw.top_k >= vocab):
                mass = tl.load(masses + row * num_tiles + tile, mask=tile < num_tiles, other=0.0)
                total = tl.sum(mass * _weights(tops, top, draw.scale, False), 0)
            stride = num_tiles * (FIRST_TILE // GROUP)
            of_groups = Part(maxima + row * stride, None, tl.cdiv(vocab, GROUP))
            bound, floor = _bound(of_groups, draw, vocab, top, total, MAX_GROUPS, ZERO_BITS, TILE)
            whole = Part(logits + row * stride_row, None, vocab)
            place = row * MAX_CANDIDATES
            count, weight = _gather(
                whole, groups + row * stride, Part(candidates + place, candidate_tokens + place, 0), of_groups,
                _value(bound, ZERO_BITS), top, draw.scale, GROUP, STEP, MAX_CANDIDATES, TILE, STAGES,
            )  # fmt: skip
            is_low = bound == floor  # whether the bound is at or below the threshold
            if draw.top_k < vocab:
                is_low |= count >= draw.top_k
            elif draw.top_p < 1:
                is_low |= weight >= draw.top_p * total
                # top_p drops all logits below this one: even a whole vocabulary of them has less mass than it drops.
                dropped = 0.5 * (1.0 - draw.top_p) * total / vocab
                floor = tl.maximum(floor, _key(top + tl.log(dropped) / draw.scale, ZERO_BITS))
            after_top = _key(top, ZERO_BITS) + 1
            if is_low & (count <= MAX_CANDIDATES):
                found = Part(candidates + place, candidate_tokens + place, count)
                token = _filtered_token(found, draw, vocab, top, total, bound, after_top, ZERO_BITS, TILE, 1)
            else:
                low, high = tl.where(is_low, bound, floor), tl.where(is_low, after_top, bound)
                token = _filtered_token(whole, draw, vocab, top, total, low, high, ZERO_BITS, TILE, STAGES)
    else:
        token = _first_best(scores, tokens, row, num_tiles, TILES)
    tl.store(out + row, token.to(tl.int64))


# --- launches ---------------------------------------------------------------------------------------------------------


def plan_launch(logits: Tensor, metadata: SamplingMetadata | None, out: Tensor, *, device: Device) -> list[Launch]:
    """Return the two launches of one call: over the tiles of all rows, and over the rows."""
    num_rows, vocab = logits.shape
    filters = metadata.filters if metadata else None
    tile = FILTER_TILE if filters else row_tile(device.chip, "sampling", width=vocab, rows=num_rows)
    num_tiles = triton.cdiv(vocab, tile.elements)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    scores, tokens = empty(num_tiles, dtype=torch.float32), empty(num_tiles, dtype=torch.int32)
    num_groups = num_tiles * tile.elements // GROUP
    common = dict(
        logits=logits, scales=metadata and metadata.scales, seeds=metadata and metadata.seeds,
        positions=metadata and metadata.positions, top_ks=filters and filters.top_k, top_ps=filters and filters.top_p,
        margins=filters and filters.margin, scores=scores, tokens=tokens,
        maxima=filters and empty(num_groups, dtype=logits.dtype),
        masses=filters and empty(num_tiles, dtype=torch.float32),
        vocab=vocab, stride_row=logits.stride(0), GROUP=GROUP,
    )  # fmt: skip
    constants = dict(RANDOM=metadata is not None, FILTERS=filters is not None, TILE=tile.elements)
    best = Launch(best_kernel, (num_rows, num_tiles), {**common, **constants, "num_warps": tile.num_warps})
    last: dict[str, Any]
    if filters is None:
        last = dict(
            scores=scores, tokens=tokens, out=out, num_tiles=num_tiles, TILES=power_of_two(num_tiles), num_warps=1
        )
        return [best, Launch(first_best_kernel, (num_rows,), last)]
    last = dict(
        **common, groups=empty(num_groups, dtype=torch.int32), candidates=empty(MAX_CANDIDATES, dtype=logits.dtype),
        candidate_tokens=empty(MAX_CANDIDATES, dtype=torch.int32), out=out, ZERO_BITS=ZERO_BITS.get(logits.dtype, 0),
        STEP=STEP, MAX_GROUPS=MAX_GROUPS, MAX_CANDIDATES=MAX_CANDIDATES, FIRST_TILE=tile.elements,
        TILES=power_of_two(num_tiles), TILE=SEARCH_TILE.elements, STAGES=STAGES, num_warps=SEARCH_TILE.num_warps,
    )  # fmt: skip
    return [best, Launch(filter_kernel, (num_rows,), last)]


def sample(
    logits: Tensor,  # [num_rows, vocab] of any float type; rows may be strided
    metadata: SamplingMetadata | None,  # None: greedy for every row
    *,
    out: Tensor | None = None,  # [num_rows] int64; None: a new tensor
) -> Tensor:  # [num_rows] int64
    """Sample one token per row without synchronizing with the device, in two launches.

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
