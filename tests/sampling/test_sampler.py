"""Sampling: filters, penalties and seeds, compared with transformers' processors and with expected frequencies."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.kv.sequence import Sequence
from paged_backend.sampling.sampler import prepare, process_logits, sample

VOCAB = 50


def sequence(prompt=(1, 2, 3), generated=(), seed=0, stop_ids=frozenset(), **sampling):
    request = GenerateRequest(0, tuple(prompt), SamplingParams(**sampling), seed, frozenset(stop_ids))
    return Sequence(request, [*prompt, *generated], [])


def draw(logits, sequences):
    """Sample one token per sequence, of which row i of the logits belongs to sequence i."""
    return sample(logits, prepare([(seq, len(seq.tokens)) for seq in sequences])).tolist()


def support(logits, tries=400, **sampling):
    """Return the set of tokens that `tries` different seeds sample from one row."""
    sequences = [sequence(seed=seed, **sampling) for seed in range(tries)]
    return set(draw(logits.expand(tries, -1), sequences))


@pytest.fixture
def logits():
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def kept(warped):
    return set(torch.isfinite(warped[0]).nonzero().flatten().tolist())


def test_temperature_0_is_greedy(logits):
    assert draw(logits, [sequence(temperature=0)]) == [int(logits.argmax())]


def test_tiny_parameters_stay_finite(logits):
    """1e-45 is the smallest positive float32 number; 1e-300 is not representable."""
    for tiny in (1e-45, 1e-300):
        assert support(logits, temperature=tiny) == {logits.argmax().item()}
        assert support(logits, repetition_penalty=tiny) <= {1, 2, 3}
        assert support(logits, top_p=tiny) == {logits.argmax().item()}
        assert support(logits, min_p=tiny) == support(logits)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_top_k_matches_transformers(logits, top_k):
    flat = logits / 20  # so flat that 400 samples include every remaining token
    assert support(flat, top_k=top_k) == kept(TopKLogitsWarper(top_k)(None, flat.clone()))


@pytest.mark.parametrize("top_p", [0.1, 0.3])
def test_top_p_matches_transformers(logits, top_p):
    flat = logits / 4
    assert support(flat, 2000, top_p=top_p) == kept(TopPLogitsWarper(top_p)(None, flat.clone()))


@pytest.mark.parametrize("min_p", [0.5, 0.2])
def test_min_p_matches_transformers(logits, min_p):
    assert support(logits / 4, 2000, min_p=min_p) == kept(MinPLogitsWarper(min_p)(None, (logits / 4).clone()))


def test_top_k_then_top_p_matches_transformers(logits):
    flat = logits / 4
    warped = TopPLogitsWarper(0.6)(None, TopKLogitsWarper(8)(None, flat.clone()))
    assert support(flat, 2000, top_k=8, top_p=0.6) == kept(warped)


def test_frequencies_follow_the_distribution(logits):
    tries = 20_000
    sequences = [sequence(seed=seed, temperature=2.0) for seed in range(tries)]
    counts = torch.tensor(draw(logits.expand(tries, -1), sequences)).bincount(minlength=VOCAB)
    expected = torch.softmax(TemperatureLogitsWarper(2.0)(None, logits), -1)[0] * tries
    chi_squared = float(((counts - expected) ** 2 / expected.clamp(min=1)).sum())
    assert chi_squared < 2 * VOCAB


def test_rows_are_independent_of_the_batch(logits):
    """A row samples the same token alone and beside rows with other parameters."""
    rows = [
        sequence(temperature=0),
        sequence(seed=1, top_k=3),
        sequence(seed=2, top_p=0.5),
        sequence(seed=3, min_p=0.1),
        sequence(seed=4, generated=(5, 5, 6), repetition_penalty=1.3),
        sequence(seed=5, generated=(7,), presence_penalty=1.0, frequency_penalty=0.5),
        sequence(seed=6, stop_ids={int(logits.argmax())}, min_tokens=2, temperature=0),
        sequence(seed=7),
    ]
    together = draw(logits.expand(len(rows), -1), rows)
    assert together == [draw(logits, [row])[0] for row in rows]


def test_samples_depend_on_seed_and_position_only(logits):
    def numbers(tokens):
        return [sequence(seed=5, generated=range(count)) for count in range(tokens)]

    flat = torch.zeros(1, 50_000)
    sampled = draw(flat.expand(200, -1), numbers(200))
    assert sampled == draw(flat.expand(200, -1), numbers(200))
    others = draw(flat.expand(200, -1), [sequence(seed=seed) for seed in range(200)])
    assert len({*sampled, *others}) > 390
    assert sampled[0] == others[5]
    for seed in (-1, -(2**63), 2**63, 2**64 - 1, 2**64 + 7):  # the last one is the seed of sample 8 of seed 2**64 - 1
        assert draw(flat, [sequence(seed=seed)]) == draw(flat, [sequence(seed=seed % 2**64)])
    assert draw(flat, [sequence(seed=2**32)]) != draw(flat, [sequence(seed=0)])


def test_prompt_length_does_not_change_samples(logits):
    """Positions count from the first output token."""
    short, long = (sequence(prompt=range(size), generated=(1, 2), seed=3) for size in (4, 40))
    assert draw(logits.expand(2, -1), [short, long]) == draw(logits, [short]) * 2


def test_repetition_penalty_matches_transformers(logits):
    seen = [1, 2, 3, 9, 9]
    expected = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([seen]), logits.clone())
    for token in seen:
        for other in range(VOCAB):
            pair = [float("-inf")] * VOCAB
            pair[token], pair[other] = float(logits[0, token]), float(logits[0, other])
            row = sequence(prompt=seen[:3], generated=seen[3:], repetition_penalty=1.5, temperature=0)
            chosen = draw(torch.tensor([pair]), [row])[0]
            assert expected[0, chosen] == max(expected[0, token], expected[0, other])


def test_presence_and_frequency_penalties_count_output_only():
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 5], logits[0, 6] = 2.0, 1.6, 1.0
    assert draw(logits, [sequence(prompt=(4, 4), presence_penalty=2.0, temperature=0)]) == [4]
    assert draw(logits, [sequence(generated=(4,), presence_penalty=0.5, temperature=0)]) == [5]
    assert draw(logits, [sequence(generated=(4,), frequency_penalty=0.3, temperature=0)]) == [4]
    assert draw(logits, [sequence(generated=(4, 4), frequency_penalty=0.3, temperature=0)]) == [5]


def test_no_stop_token_before_min_tokens(logits):
    best = int(logits.argmax())
    row = {"stop_ids": {best}, "min_tokens": 2, "temperature": 0}
    assert draw(logits, [sequence(generated=(8,), **row)]) != [best]
    assert draw(logits, [sequence(generated=(8, 8), **row)]) == [best]


def test_empty_batch_samples_nothing():
    assert draw(torch.zeros(0, VOCAB), []) == []


def test_process_logits_applies_constraints_and_penalties():
    logits = torch.zeros(2, VOCAB)
    rows = [(sequence(generated=(4,), presence_penalty=1.0), 4), (sequence(stop_ids={7}, min_tokens=1), 3)]
    expected = torch.zeros(2, VOCAB)
    expected[0, 4], expected[1, 7] = -1, float("-inf")
    assert torch.equal(process_logits(logits, prepare(rows)), expected)
    assert not logits.any()
    assert process_logits(logits, prepare([(sequence(), 3)] * 2)) is logits
