"""sample against the reference, in the interpreter or on a GPU and on a CPU; the distribution of its noise."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from paged_kernels import sampling
from paged_kernels.cpu import native
from paged_kernels.cpu.sampling import best_tokens
from paged_kernels.cpu.sampling import noise_bits as bits_cpu
from paged_kernels.cpu.sampling import sample as sample_cpu
from paged_kernels.launch import device_of
from paged_kernels.sampling import noise_bits_reference, sample, sample_reference, sampling_noise
from paged_kernels.sampling_metadata import SamplingFilters, SamplingMetadata

OFF = {"top_k": 2**31 - 1, "top_p": 1.0, "margin": torch.inf}
FILTERS = [  # every filter alone and combined, at its extremes, and off
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"margin": 0.0},
    {"margin": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 5, "margin": 2.0},
    {"top_k": 40, "top_p": 0.9, "margin": 4.0},
]
SEEDS = [0, 1, 2, -1, 2**32, 2**63 - 1, -(2**63)]
POSITIONS = [0, 1, 2, 40_000, 2**32, 2**40 + 1, 7]


def make_metadata(scales: list[float], filters: list[dict] | None = None, seed: int = 0) -> SamplingMetadata:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([(OFF | one)[name] for one in filters], dtype=dtype)

    return SamplingMetadata(
        scales=torch.tensor(scales),
        seeds=torch.arange(seed, seed + len(scales)),
        positions=torch.arange(len(scales)) % 5,
        filters=filters
        and SamplingFilters(
            column("top_k", torch.int32), column("top_p", torch.float32), column("margin", torch.float32)
        ),
    )


def to_device(metadata: SamplingMetadata | None, device: str) -> SamplingMetadata | None:
    if metadata is None:
        return None
    filters = metadata.filters and SamplingFilters(*(one.to(device) for one in vars(metadata.filters).values()))
    return SamplingMetadata(
        metadata.scales.to(device), metadata.seeds.to(device), metadata.positions.to(device), filters
    )


def check(logits: Tensor, metadata: SamplingMetadata | None, device: str) -> Tensor:
    """Require the same tokens from all three implementations, and return them."""
    expected = sample_reference(logits, metadata)
    assert torch.equal(sample_cpu(logits, metadata), expected)
    assert torch.equal(sample(logits.to(device), to_device(metadata, device)).cpu(), expected)
    return expected


def random_logits(num_rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn((num_rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3


def test_random_bits_are_the_same_in_all_implementations(device):
    expected = [
        [noise_bits_reference(*row, token) for token in range(60)] for row in zip(SEEDS, POSITIONS, strict=True)
    ]
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    assert sampling_noise(seeds.to(device), positions.to(device), 60)[0].tolist() == expected
    assert bits_cpu(seeds.numpy(), positions.numpy(), np.arange(60)).tolist() == expected
    assert len({number for row in expected for number in row}) == 60 * len(SEEDS)


def test_large_noise_has_full_precision(device):
    bits, noise = (
        one.cpu() for one in sampling_noise(torch.arange(8).to(device), torch.zeros(8).long().to(device), 4096)
    )
    numbers = (bits.double() + 0.5) / 2**32
    assert numbers.min() < 2**-12, "no small number among these"
    expected, large = -torch.log(-torch.log1p(-numbers)), numbers < 0.5
    torch.testing.assert_close(noise[large].double(), expected[large], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(noise.double(), expected, rtol=1e-3, atol=1e-3)


def test_random_bits_do_not_change_between_releases():
    """A seed gives the same tokens in every release."""
    found = [noise_bits_reference(*one) for one in ((0, 0, 0), (7, 3, 49_151), (-1, 2**40, 128_255))]
    assert found == [4064810998, 3235688526, 2474729212]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 50, 4096, 4100])
def test_greedy_and_random_rows_without_filters(vocab, dtype, device):
    logits = random_logits(8, vocab).to(dtype)
    metadata = make_metadata([1.0, 0.0, 0.5, 2.0, 10.0, 0.0, 1e6, 0.01])
    assert torch.equal(check(logits, None, device), logits.float().argmax(-1))
    tokens = check(logits, metadata, device)
    assert torch.equal(tokens[[1, 5, 6]], logits.float()[[1, 5, 6]].argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_filters(dtype, device):
    """Half of the rows have few distinct logits: equal ones are kept or dropped together."""
    logits = random_logits(len(FILTERS), 300, seed=1).to(dtype)
    logits[1::2] = logits[1::2].round()
    check(logits, make_metadata([1.0, 0.5, 2.0, 0.7] * 3, FILTERS), device)


@pytest.mark.parametrize("ties", [False, True])
def test_filters_on_a_cpu(ties):
    """Sample several times, so that kept and dropped tokens both show."""
    for index, filters in enumerate(FILTERS):
        for vocab in (3, 120):
            logits = random_logits(1, vocab, seed=index).expand(20, -1)
            logits = logits.round() if ties else logits
            metadata = make_metadata([1.0, 0.3] * 10, [filters] * 20, seed=index)
            assert torch.equal(sample_cpu(logits, metadata), sample_reference(logits, metadata)), (filters, vocab)


def test_filters_over_several_tiles(device):
    logits = random_logits(3, 5000, seed=2)
    check(logits, make_metadata([1.0] * 3, [{"top_k": 50}, {"top_p": 0.9}, {}]), device)


def edge_row(kept: int, *, vocab: int, step: float, ties: int, seed: int, position: int) -> tuple[Tensor, int]:
    """Return logits of which a filter keeps the `kept` largest, and the token that is sampled then.

    The largest noise is that of a token that is just dropped, the second largest that of one that is just kept. The
    logits are multiples of `step`, each of `ties` tokens; scale 1.
    """
    noise = -np.log(-np.log1p(-(bits_cpu(np.array([seed]), np.array([position]), np.arange(vocab))[0] + 0.5) / 2**32))
    tokens = noise.argsort()
    last = kept - 1 - (kept - 1) % ties  # first rank of the smallest logit that is kept
    order = np.insert(tokens[:-2], [last, kept - 1], tokens[-2:])  # the token of each rank
    logits = -step * (np.arange(vocab) // ties)
    scores = logits + noise[order]
    assert scores[:kept].argmax() == last
    assert scores[: kept + ties].argmax() == kept
    return torch.empty(vocab).index_put((torch.tensor(order),), torch.tensor(logits).float()), int(order[last])


def check_edges(
    cases: Sequence[tuple[dict, int, float, int]], vocab: int, device: str, top: float = 0.0, dtype=torch.float32
) -> None:
    """Sample rows with the filters, kept tokens, step and ties of each case, whose largest logit is `top`.

    Logits and margins are those of a temperature of 1; the rows have several temperatures.
    """
    scales = [(1.0, 0.5, 2.0)[index % 3] for index in range(len(cases))]
    filters = [
        {name: value / scale if name == "margin" else value for name, value in one.items()}
        for (one, *_), scale in zip(cases, scales, strict=True)
    ]
    metadata = make_metadata(scales, filters, seed=5)
    rows, expected = [], []
    for (_, kept, step, ties), scale, seed, position in zip(
        cases, scales, metadata.seeds.tolist(), metadata.positions.tolist(), strict=True
    ):
        row, token = edge_row(kept, vocab=vocab, step=step, ties=ties, seed=seed, position=position)
        rows.append((row + top) / scale)
        expected.append(token)
    logits = torch.stack(rows).to(device, dtype)
    assert sample(logits, to_device(metadata, device)).tolist() == expected


def mass(kept: float, *, vocab: int, step: float, ties: int = 1) -> float:
    """Return the top_p for which the `kept` largest logits of a row of `edge_row` are kept, with a fraction as margin.

    The row has this part of the probability in its largest logits.
    """
    return float(np.expm1(-step * kept / ties) / np.expm1(-step * vocab / ties))


def edges(vocab: int) -> list[tuple[dict, int, float, int]]:
    flat, steep = 1e-3, 0.05
    part = partial(mass, vocab=vocab)
    return [
        *(({"top_k": kept}, kept, flat, 1) for kept in (1, 7, 40, 200, vocab - 1)),
        ({"top_k": 401}, 500, flat, 100),
        *(({"top_p": part(kept - 0.5, step=flat)}, kept, flat, 1) for kept in (1, 30, 300, vocab - 100)),
        *(({"top_p": part(kept - 0.5, step=steep)}, kept, steep, 1) for kept in (1, 20, 60)),
        *(({"top_p": part(kept - 0.5, step=0.1, ties=50)}, kept, 0.1, 50) for kept in (50, 100, 400)),
        *(({"margin": (kept - 0.5) * flat}, kept, flat, 1) for kept in (1, 60, vocab - 100)),
        ({"top_k": 300, "top_p": part(99.5, step=flat) / part(300, step=flat)}, 100, flat, 1),
        ({"top_k": 300, "margin": 99.5 * flat}, 100, flat, 1),
        ({"top_p": part(299.5, step=flat), "margin": 99.5 * flat}, 100, flat, 1),
        ({"top_k": 300, "top_p": part(99.5, step=flat) / part(300, step=flat), "margin": 49.5 * flat}, 50, flat, 1),
        ({"top_k": 300, "top_p": part(99.5, step=flat) / part(300, step=flat), "margin": 199.5 * flat}, 100, flat, 1),
    ]


@pytest.mark.parametrize(("groups", "candidates"), [(2048, 8192), (20, 8192), (2048, 100)])
def test_filters_keep_exactly_the_tokens_they_should(groups, candidates, device, monkeypatch):
    """With a bound below or above the threshold, with more groups than are read, and with more candidates than fit."""
    monkeypatch.setattr(sampling, "MAX_GROUPS", groups)
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", candidates)
    check_edges(edges(1500), 1500, device)


def test_filters_over_a_large_vocabulary(device):
    """A usual row, and flat ones, of which the filters keep more tokens than there are groups or candidates."""
    vocab, flat = 151_936, 1e-5
    part = partial(mass, vocab=vocab)
    cases = [
        ({"top_k": 50}, 50, 0.01, 1),
        ({"top_k": 6000}, 6000, flat, 1),
        ({"top_p": part(1999.5, step=flat)}, 2000, flat, 1),
        ({"top_p": part(25_000, step=flat, ties=50_000)}, 50_000, flat, 50_000),
    ]
    check_edges(cases, vocab, device)


@pytest.mark.parametrize(("dtype", "step"), [(torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)], ids=str)
def test_filters_tell_neighboring_numbers_of_a_type_apart(dtype, step, device):
    cases = [({"top_k": kept}, kept, step, 1) for kept in (1, 2, 3, 4)]
    check_edges(cases, 100, device, top=2 - step, dtype=dtype)


def test_filters_keep_all_of_equal_logits(device):
    filters = [{"top_k": 5}, {"top_p": 0.1}, {"margin": 0.0}, {"top_k": 5, "top_p": 0.1, "margin": 0.0}]
    logits = torch.full((4, 20_000), -2.5, dtype=torch.bfloat16, device=device)
    filtered, plain = (to_device(make_metadata([1.0] * 4, used, seed=3), device) for used in (filters, None))
    assert torch.equal(sample(logits, filtered), sample(logits, plain))


def test_filters_read_only_groups_that_may_hold_candidates(device):
    """Between the launches, the other groups are overwritten."""
    cases = [{"top_k": 20}, {"top_p": 0.7}, {"margin": 2.0}, {"top_k": 30, "top_p": 0.9, "margin": 5.0}]
    logits, metadata = 2 * random_logits(4, 20_000, seed=6), make_metadata([1.0] * 4, cases)
    expected = sample_cpu(logits, metadata)
    places = logits.topk(300).indices // sampling.GROUP * sampling.GROUP
    near = torch.zeros(logits.shape, dtype=torch.bool)
    for offset in range(sampling.GROUP):
        near.scatter_(1, (places + offset).clamp(max=19_999), True)
    logits, out = logits.to(device), torch.empty(4, dtype=torch.int64, device=device)
    for planned in sampling.plan_launch(logits, to_device(metadata, device), out, device=device_of(logits.device)):
        planned.run()
        logits[~near.to(device)] = 100.0
    assert torch.equal(out.cpu(), expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # from the interpreter: infinity - infinity
def test_nonfinite_row_gives_minus_one_and_does_not_affect_others(device):
    inf, nan = torch.inf, torch.nan
    logits = random_logits(8, 20, seed=3)
    clean = logits.clone()
    logits[1] = nan
    logits[2, 3:] = nan
    logits[3, 5] = logits[3, 9] = inf
    logits[4, 1:] = -inf
    logits[5] = -inf
    logits[6, 4], logits[6, 6] = nan, inf
    for filters in (None, [{"top_k": 4}, {"top_p": 0.9}] * 4):
        metadata = make_metadata([1.0] * 8, filters)
        tokens = check(logits, metadata, device)
        assert tokens[1:7].tolist() == [-1, -1, -1, 0, -1, -1]
        assert torch.equal(tokens[[0, 7]], sample_cpu(clean, metadata)[[0, 7]])
    greedy = check(logits, None, device)
    assert greedy[1:7].tolist() == [-1, -1, -1, 0, -1, -1]
    wide = random_logits(2, 9000, seed=4)
    wide[0, 8000] = nan
    assert check(wide, None, device)[0] == -1


@pytest.mark.parametrize("candidates", [1, 8192])
def test_lowest_token_of_equal_scores_wins(candidates, device, monkeypatch):
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", candidates)
    logits = torch.zeros(2, 9000)
    logits[:, [17, 400, 17 + 2 * sampling.SEARCH_TILE.elements]] = 5.0
    assert check(logits, None, device).tolist() == [17, 17]
    assert check(logits, make_metadata([0.0, 1e6]), device)[0] == 17
    filtered = make_metadata([1e9] * 2, [{"top_k": 2}, {"margin": 1.0}])  # noise is lost in rounding
    assert sample(logits.to(device), to_device(filtered, device)).tolist() == [17, 17]


def test_positive_and_negative_zero_are_equal_logits(device):
    logits = torch.tensor([[-3.0, 0.0, -0.0, -5.0]]).expand(6, -1)
    assert set(check(logits, make_metadata([1.0] * 6, [{"top_k": 1}] * 6, seed=2), device).tolist()) == {1, 2}


def test_sample_of_a_row_does_not_depend_on_the_batch(device):
    """The other rows and the strides of the logits do not matter."""
    logits = random_logits(6, 4500, seed=4)
    filters = [FILTERS[9], FILTERS[1], {}, FILTERS[8], {}, FILTERS[5]]
    metadata = make_metadata([1.0, 0.0, 0.6] * 2, filters)
    together = sample(logits.to(device), to_device(metadata, device)).cpu()
    strided = torch.zeros(6, 4600)[:, 3:4503].copy_(logits)
    assert torch.equal(sample(strided.to(device), to_device(metadata, device)).cpu(), together)
    assert torch.equal(sample_cpu(strided, metadata), together)
    for row in range(6):
        one = slice(row, row + 1)
        alone = SamplingMetadata(
            metadata.scales[one],
            metadata.seeds[one],
            metadata.positions[one],
            SamplingFilters(*(x[one] for x in vars(metadata.filters).values())),
        )
        assert sample(logits[one].to(device), to_device(alone, device)).item() == together[row]
        assert sample_cpu(logits[one], alone).item() == together[row]


def test_no_rows(device):
    for metadata in (None, make_metadata([])):
        assert sample(torch.zeros(0, 9, device=device), to_device(metadata, device)).shape == (0,)
        assert sample_cpu(torch.zeros(0, 9), metadata).shape == (0,)


def chi_squared(counts: Tensor, probs: Tensor) -> float:
    """Return the chi-squared statistic, less its mean, in standard deviations."""
    expected = probs.double() * counts.sum()
    assert expected.min() >= 5
    free = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / (2 * free) ** 0.5)


@pytest.mark.parametrize(("along", "filters"), [("seeds", {"top_k": 12, "top_p": 0.8}), ("positions", {})])
def test_frequencies_follow_the_distribution(along, filters):
    """Frequencies are counted over neighboring seeds, and over the positions of one seed."""
    tries, logits = 10_000, random_logits(1, 40, seed=5) / 2
    counter, fixed = torch.arange(tries), torch.full((tries,), 3)
    seeds, positions = (counter, fixed) if along == "seeds" else (fixed, counter)
    one = make_metadata([0.8], [filters])
    metadata = SamplingMetadata(
        torch.full((tries,), 0.8),
        seeds,
        positions,
        SamplingFilters(*(x.expand(tries) for x in vars(one.filters).values())),
    )
    counts = sample_cpu(logits.expand(tries, -1), metadata).bincount(minlength=40)
    probs = (logits[0] * 0.8).softmax(0)
    if filters:
        kept = probs >= probs.sort(descending=True).values[11]
        probs = probs * kept / (probs * kept).sum()
        ordered = probs.sort(descending=True).values
        probs = probs * (probs >= ordered[(ordered.cumsum(0) - ordered < 0.8).sum() - 1])
        assert not counts[probs == 0].any()
    assert abs(chi_squared(counts[probs > 0], probs[probs > 0] / probs.sum())) < 4


def test_uniform_distribution_over_a_large_vocabulary():
    """Only the largest noise of 49,152 tokens decides, where float32 noise would lack precision."""
    tries, vocab = 1500, 49_152
    metadata = SamplingMetadata(torch.ones(tries), torch.arange(tries), torch.zeros(tries, dtype=torch.int64), None)
    tokens = sample_cpu(torch.zeros(1, vocab).expand(tries, -1), metadata)
    assert abs(chi_squared((tokens * 64 // vocab).bincount(minlength=64), torch.full((64,), 1 / 64))) < 4
    assert len(set(tokens.tolist())) > 0.95 * tries


@pytest.mark.parametrize("step", [(1, 0), (0, 1)], ids=["seeds", "positions"])
def test_noise_of_neighboring_seeds_and_positions_is_independent(step):
    """Correlations between rows, between tokens, and of small numbers are within 5 standard deviations."""
    count, tokens = 20_000, np.arange(12)
    index = np.arange(count + 1)
    numbers = bits_cpu(index * step[0], index * step[1], tokens) / 2**32
    for values in (numbers - 0.5, (numbers < 1 / 16) - 1 / 16):
        here, there = (part / part.std() for part in (values[:-1], values[1:]))
        of_tokens = here.T @ here / count - np.diag((here**2).mean(0))
        assert np.abs(of_tokens).max() < 5 / count**0.5
        assert np.abs(here.T @ there / count).max() < 5 / count**0.5


@pytest.mark.parametrize("level", [None, *native.levels()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_best_tokens_at_every_level(level, dtype, monkeypatch):
    """Level None is numpy, without C++ kernels."""
    if level is None:
        monkeypatch.setattr(native, "levels", tuple)
    find = best_tokens if level is None else partial(native.best_tokens, level=level)
    for vocab in (1, 7, 15, 16, 17, 33, 1000):
        logits = random_logits(9, vocab, seed=vocab).to(dtype)
        logits[1:4, -1] = torch.tensor([torch.nan, torch.inf, 1000.0])
        logits[4] = -torch.inf
        logits[5] = 2.0
        out = torch.full((9,), 7)
        assert find(logits, out=out) is out
        assert torch.equal(out, sample_reference(logits, None))
        assert out[1:6].tolist() == [-1, -1, vocab - 1, -1, 0]
