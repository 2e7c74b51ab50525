"""Beam search gives the outputs of transformers, token for token, whatever happens to its blocks."""

import itertools
import random

import pytest
import torch
from transformers import GenerationConfig

from paged_backend.api.sampling_params import SamplingParams
from paged_backend.scheduling.beam_search import BeamSearch, Candidate
from tests.support.beams import MAX_TOKENS, beams
from tests.support.in_process import running, tiny_assembly
from tests.support.pairwise import mostly_nightly


@pytest.fixture(scope="module")
def prompts():
    rnd = random.Random(4)
    return [[rnd.randrange(3, 256) for _ in range(length)] for length in (1, 4, 15, 16, 33)]


def generate(model, prompt, stops, **options):
    """Return every output of transformers, without padding."""
    model.generation_config.eos_token_id = None  # otherwise used where `stops` is None
    config = GenerationConfig(max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=stops, **options)
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return [cut(one[len(prompt) :].tolist(), stops) for one in found]


def cut(tokens, stops):
    end = next((index for index, token in enumerate(tokens) if token in (stops or ())), len(tokens) - 1)
    return tokens[: end + 1]


OPTIONS = [
    {},
    {"length_penalty": 0.0},
    {"length_penalty": 2.0, "early_stopping": "never"},
    {"length_penalty": -1.0},
    {"early_stopping": True},
    {"early_stopping": "never"},
]


@pytest.mark.parametrize(
    ("width", "options"),
    mostly_nightly(itertools.product([2, 3, 5], OPTIONS), default=zip([2, 3, 5] * 2, OPTIONS, strict=True)),
    ids=str,
)
def test_beam_outputs_match_transformers(tiny, prompts, width, options):
    """There are frequent stop tokens, so that hypotheses end early, or none."""
    directory, model = tiny
    with running(tiny_assembly(directory)) as engine:
        for prompt in prompts[::2]:
            for stops in (None, list(range(0, 60)), [7]):
                expected = generate(model, prompt, stops, num_beams=width, num_return_sequences=width, **options)
                found, _ = beams(engine, prompt, stops, beam_width=width, n=width, **options)
                assert found == expected, (prompt, stops)


@pytest.mark.usefixtures("async_scheduling")
def test_beam_outputs_survive_preemption(tiny, prompts):
    """The pool has room for one search: the others are preempted and recomputed, with beams of different lengths."""
    directory, model = tiny
    expected = [generate(model, prompt, None, num_beams=4)[0] for prompt in prompts]
    with running(
        tiny_assembly(directory, num_gpu_blocks_override=22, max_num_seqs=20, max_num_batched_tokens=32)
    ) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS, beam_width=4) == expected
        assert engine.history[-1].stats.preemptions > 0
        assert engine.history[-1].stats.copies > 0


@pytest.mark.usefixtures("async_scheduling")
def test_beams_and_samples_share_a_step(tiny, prompts):
    directory, model = tiny
    expected = generate(model, prompts[2], None, num_beams=3)[0]
    with running(tiny_assembly(directory)) as engine:
        greedy = engine.generate(prompts[:1], max_tokens=MAX_TOKENS)
    with running(tiny_assembly(directory)) as engine:
        search = engine.submit(prompts[2], max_tokens=MAX_TOKENS, beam_width=3)
        other = engine.submit(prompts[0], max_tokens=MAX_TOKENS)
        assert [one.tokens for one in engine.wait(search, other)] == [expected, greedy[0]]


def test_tokens_common_to_all_beams_stream_early(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        early = [beams(engine, prompt, None, beam_width=2, n=2)[1] for prompt in prompts]
    assert any(early)
    assert all(one.get(0) == one.get(1) for one in early)


def test_min_tokens_delays_stop_tokens(tiny, prompts):
    stops = list(range(0, 60))
    with running(tiny_assembly(tiny[0])) as engine:
        outputs, _ = beams(engine, prompts[2], stops, beam_width=3, n=3, min_tokens=6)
    assert all(not set(one[:6]) & set(stops) for one in outputs)


def search(**sampling):
    return BeamSearch(SamplingParams(beam_width=2, **{"max_tokens": 8, "n": 1} | sampling), frozenset({0}))


def row(*log_probs):
    return sorted((Candidate(token, value) for token, value in enumerate(log_probs)), key=lambda one: -one.log_prob)


def test_agreement_includes_returnable_hypotheses():
    """Both live beams begin with 1, but a finished output, which ends with 0, is still the best."""
    one = search()
    assert one.advance([[]], [row(-0.1, -2.0, -3.0)]) == [(0, 1), (0, 2)]
    assert one.agree([[1], [2]]) == ()
    assert one.advance([[1], [2]], [row(-9, -1.0, -1.5), row(-9, -9, -9)])[0] == (0, 1)
    assert one.agree([[1, 1], [1, 2]]) == ()


def test_agreed_tokens_are_returned_once():
    one = search()
    assert one.agree([[5, 6, 7], [5, 6, 8]]) == (5, 6)
    assert one.agree([[5, 6, 7, 1], [5, 6, 7, 2]]) == (7,)
    assert one.agree([[5, 6, 7, 1], [5, 6, 7, 2]]) == ()
