"""Chunking, batching, aborting and preemption do not change a request's tokens: they are those it gets alone."""

import random
from dataclasses import replace

import pytest

from paged_backend.api.request import FinishReason
from tests.support.in_process import generate_with_transformers, running, tiny_assembly

MAX_TOKENS = 16

pytestmark = pytest.mark.usefixtures("async_scheduling")


@pytest.fixture(scope="module")
def prompts():
    rnd = random.Random(1)
    return [[rnd.randrange(3, 320) for _ in range(length)] for length in (1, 7, 16, 17, 31, 64, 90)]


@pytest.fixture(scope="module")
def alone(tiny, prompts):
    return [generate_with_transformers(tiny[1], prompt, MAX_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def default_assembly(tiny):
    return tiny_assembly(tiny[0])


@pytest.fixture
def default(default_assembly, async_scheduling):
    """The assembly of the default options, which the tests of this module share."""
    return replace(default_assembly, overlap=async_scheduling)


# A load takes longer than a test on a GPU, so each is used with and without async scheduling. There is no prefix cache:
# the second use would find the blocks of the first.
NO_CACHE = {"enable_prefix_caching": False}


@pytest.fixture(scope="module", params=[1, 2, 8, 16, 64, 256])
def with_block_size(request, tiny):
    size = request.param
    return tiny_assembly(tiny[0], block_size=size, num_gpu_blocks_override=16 + 1024 // size, **NO_CACHE)


def test_block_sizes(with_block_size, prompts, alone, async_scheduling):
    with running(replace(with_block_size, overlap=async_scheduling)) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == alone


@pytest.fixture(scope="module", params=[(1, 1), (1, 64), (3, 3), (8, 9), (8, 512)], ids=str)
def with_limits(request, tiny):
    seqs, tokens = request.param
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "num_gpu_blocks_override": 128}
    return tiny_assembly(tiny[0], **limits, **NO_CACHE)


def test_batch_and_chunk_sizes(with_limits, prompts, alone, async_scheduling):
    with running(replace(with_limits, overlap=async_scheduling)) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == alone
        assert max(step.stats.running for step in engine.history) <= with_limits.limits.max_num_seqs


def test_preemption(tiny, prompts, alone):
    """A pool just large enough for the longest request: the others are preempted and recomputed."""
    with running(tiny_assembly(tiny[0], num_gpu_blocks_override=27, max_num_batched_tokens=64)) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == alone
        assert engine.history[-1].stats.preemptions > 0


SMALL = {"num_gpu_blocks_override": 27, "max_num_batched_tokens": 64}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("mode", "kind"), [("swap", "swapped"), ("recompute", "recomputed"), ("auto", "preemptions")])
def test_preemption_by_swap_and_by_recompute(tiny, prompts, alone, caching, mode, kind):
    options = {"swap_space": 0.01, "preemption_mode": mode, "enable_prefix_caching": caching}
    with running(tiny_assembly(tiny[0], **SMALL, **options)) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == alone
        stats = engine.history[-1].stats
        assert getattr(stats, kind) == stats.preemptions > 0


@pytest.mark.parametrize("swap_space", [0, 0.001, 0.01])
def test_repeated_prompts_hit_the_prefix_cache(tiny, prompts, alone, swap_space):
    """In the device pool, in the host pool, and in a host pool that is too small for all of them."""
    options = SMALL | {"swap_space": swap_space} if swap_space else {"num_gpu_blocks_override": 128}
    with running(tiny_assembly(tiny[0], **options)) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == alone
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == alone
        stats = engine.history[-1].stats
        assert stats.cached_tokens > 0
        assert (stats.host_tokens > 0) == (swap_space > 0)


def test_disabled_prefix_caching_finds_no_hits(tiny, prompts, alone):
    with running(tiny_assembly(tiny[0], **SMALL, enable_prefix_caching=False)) as engine:
        for _ in range(2):
            assert engine.generate(prompts, max_tokens=MAX_TOKENS) == alone
        assert engine.history[-1].stats.cached_tokens == 0


def test_seeded_samples_survive_batching_and_preemption(tiny, default, prompts):
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "top_p": 0.9, "seed": 11}
    with running(default) as engine:
        alone = [engine.generate([prompt], **sampling)[0] for prompt in prompts]
    with running(tiny_assembly(tiny[0], num_gpu_blocks_override=27, max_num_batched_tokens=64)) as engine:
        assert engine.generate(prompts, **sampling) == alone
        assert engine.history[-1].stats.preemptions > 0
        assert engine.generate(prompts[:1], **sampling | {"seed": 12}) != alone[:1]


def test_abort_does_not_change_other_requests(default, prompts, alone):
    with running(default) as engine:
        keys = [engine.submit(prompt, max_tokens=MAX_TOKENS) for prompt in prompts]
        engine.step()
        for key in keys[::2]:
            engine.engine.abort(key)
        outputs = engine.wait(*keys[1::2])
        assert [output.tokens for output in outputs] == alone[1::2]


def test_penalties_include_the_token_still_on_the_device(default, prompts):
    sampling = {"max_tokens": MAX_TOKENS, "repetition_penalty": 1.5, "frequency_penalty": 1.0}
    with running(replace(default, overlap=False)) as engine:
        expected = engine.generate(prompts, **sampling)
    with running(default) as engine:
        assert engine.generate(prompts, **sampling) == expected


def test_eos_and_stop_tokens_end_the_output(default, prompts, alone):
    end = alone[3][4]
    with running(default) as engine:
        (output,) = engine.wait(engine.submit(prompts[3], max_tokens=MAX_TOKENS, stop_token_ids=[end]))
        first = alone[3].index(end)
        assert output.tokens == alone[3][: first + 1]
        assert output.finish is FinishReason.STOP


def test_min_tokens_suppresses_stop_tokens(default, prompts, alone):
    end = alone[3][0]
    with running(default) as engine:
        (output,) = engine.wait(engine.submit(prompts[3], max_tokens=MAX_TOKENS, min_tokens=6, stop_token_ids=[end]))
        assert len(output.tokens) >= 6
        assert end not in output.tokens[:6]


def test_prompt_of_maximum_length(tiny, default):
    prompt = [random.Random(2).randrange(3, 320) for _ in range(255)]
    with running(default) as engine:
        assert engine.generate([prompt], max_tokens=1) == [generate_with_transformers(tiny[1], prompt, 1)]
