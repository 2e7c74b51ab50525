"""Non-finite logits and hidden states fail their own request and nothing else."""

import itertools

import pytest
import torch

from paged_backend.api.errors import ErrorCode
from paged_backend.api.request import FinishReason
from tests.support.in_process import running, tiny_assembly
from tests.support.pairwise import mostly_nightly

POISON = 311  # a token whose embedding becomes non-finite after the verification at load
PROMPTS = [list(range(20, 37)), [5, 6, 7], list(range(40, 63))]


def poisoned(directory, value=torch.nan, **options):
    assembly = tiny_assembly(directory, **options)
    assembly.loaded.model.get_input_embeddings().weight.data[POISON] = value
    return assembly


@pytest.fixture(scope="module")
def expected(tiny):
    with running(tiny_assembly(tiny[0])) as engine:
        return engine.generate(PROMPTS, max_tokens=20)


def check_broken(output):
    assert output.finish is None
    assert output.error.code is ErrorCode.INTERNAL
    assert "outputs for this request are not finite" in str(output.error)


SAMPLINGS = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"n": 3, "temperature": 0.8, "seed": 1},
    {"beam_width": 3, "n": 2, "ignore_eos": False},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"prompt_logprobs": 1, "max_tokens": 0},
    {"bad_words": ((5,),), "repetition_penalty": 1.2},
]
INFINITE = [({}, torch.inf), ({"logprobs": 2}, torch.inf)]


@pytest.mark.parametrize(
    ("sampling", "value"),
    mostly_nightly(
        itertools.product(SAMPLINGS, (torch.nan, torch.inf)),
        default=[*((sampling, torch.nan) for sampling in SAMPLINGS), *INFINITE],
    ),
    ids=str,
)
def test_non_finite_logits_fail_only_their_request(tiny, async_scheduling, expected, sampling, value):
    with running(poisoned(tiny[0], value)) as engine:
        good = [engine.submit(prompt, max_tokens=20) for prompt in PROMPTS[:2]]
        broken = engine.submit([*range(20, 37), POISON, 9, 10], **({"max_tokens": 20} | sampling))
        good.append(engine.submit(PROMPTS[2], max_tokens=20))
        *outputs, output = engine.wait(*good, broken)
        check_broken(output)
        assert [output.tokens for output in outputs] == expected


def test_failure_during_decode_keeps_earlier_tokens(tiny, async_scheduling):
    """The prompt is finite, but a generated token is POISON."""
    with running(poisoned(tiny[0])) as engine:
        key = engine.submit(PROMPTS[1], max_tokens=20, logit_bias={str(POISON): 100}, min_tokens=20)
        (output,) = engine.wait(key)
        check_broken(output)
        assert output.tokens == [POISON]


def test_non_finite_embedding_is_an_error(tiny):
    with running(poisoned(tiny[0])) as engine:
        broken, good = engine.embed([5, POISON, 7]), engine.embed(PROMPTS[1])
        first, second = engine.wait(broken, good)
        check_broken(first)
        assert second.finish is FinishReason.STOP


@pytest.mark.parametrize("drafter", ["lookup", "itself"])
def test_rejected_non_finite_draft_is_harmless(tiny, drafter):
    """POISON comes up among the draft tokens of a repetitive prompt, and is rejected."""
    prompt = [11, 12, 13, 14, 15, 16] * 3
    with running(tiny_assembly(tiny[0])) as engine:
        (expected,) = engine.generate([prompt], max_tokens=20)
    model = str(tiny[0]) if drafter == "itself" else None
    with running(poisoned(tiny[0], num_speculative_tokens=3, speculative_model=model, prompt_lookup_min=1)) as engine:
        assert engine.generate([prompt], max_tokens=20) == [expected]
        check_broken(*engine.wait(engine.submit([POISON, *prompt], max_tokens=20)))


@pytest.mark.parametrize("host", [{}, {"swap_space": 0.001}], ids=str)
def test_non_finite_blocks_are_not_cached(tiny, host):
    """After a transient failure, the same prompt is computed again."""
    prompt = [*range(20, 37), POISON, *range(60, 80)]
    with running(tiny_assembly(tiny[0])) as engine:
        (expected,) = engine.generate([prompt], max_tokens=8)
    assembly = tiny_assembly(tiny[0], **host)
    weight = assembly.loaded.model.get_input_embeddings().weight.data
    original = weight[POISON].clone()
    with running(assembly) as engine:
        weight[POISON] = torch.nan
        check_broken(*engine.wait(engine.submit(prompt, max_tokens=8)))
        weight[POISON] = original
        assert engine.generate([prompt], max_tokens=8) == [expected]
        assert engine.history[-1].stats.cached_tokens == 0
