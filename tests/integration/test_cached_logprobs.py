"""With `batch_invariant`, prompt log probabilities are taken from the prefix cache, and equal computed ones exactly."""

import json
import random

import pytest

from tests.support.callers import serving
from tests.support.in_process import running, tiny_assembly

PROMPT = random.Random(4).choices(range(3, 320), k=50)
OPTIONS = {"batch_invariant": True, "num_gpu_blocks_override": 128}
sync_and_async = pytest.mark.usefixtures("async_scheduling")


def score(engine, prompt, **sampling):
    """Return the output of a request that scores its prompt, and how many prompt tokens were in the cache."""
    sampling = {"max_tokens": 2, "prompt_logprobs": 2, "logits_digest": True} | sampling
    (output,) = engine.wait(engine.submit(prompt, returns_usage=True, **sampling))
    return output, output.usage.cached_tokens


@pytest.fixture(scope="module")
def uncached(tiny):
    return tiny_assembly(tiny[0], **OPTIONS, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def alone(uncached):
    """Return what a request gets that computes all of its prompt."""

    def get(prompt, **sampling):
        with running(uncached) as engine:
            output, cached = score(engine, prompt, **sampling)
        assert cached == 0
        return output

    return get


@sync_and_async
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_cached_log_probabilities_equal_computed_ones(tiny, alone, max_tokens):
    """For the same prompt, other continuations of it, fewer top tokens, and a beginning of it."""
    cases = [
        (PROMPT, {}, 47),
        (PROMPT[:48], {"prompt_logprobs": 1}, 47),
        ([*PROMPT[:48], 5, 6, 7, 8, 9], {"prompt_logprobs": 0}, 47),
        (PROMPT[:30] + PROMPT, {}, 27),
        (PROMPT[:30] + PROMPT[:20], {}, 47),
    ]
    with running(tiny_assembly(tiny[0], **OPTIONS)) as engine:
        first, _ = score(engine, PROMPT, max_tokens=max_tokens)
        assert first.prompt_logprobs == alone(PROMPT, max_tokens=max_tokens).prompt_logprobs
        for prompt, sampling, expected in cases:
            found, cached = score(engine, prompt, max_tokens=max_tokens, **sampling)
            computed = alone(prompt, max_tokens=max_tokens, **sampling)
            assert found.prompt_logprobs == computed.prompt_logprobs
            assert found.fingerprints == computed.fingerprints
            assert cached == expected


def test_requests_of_a_batch_take_what_earlier_ones_have_computed(tiny, alone):
    """Twelve continuations at once, in chunks of 16 tokens, with preemption."""
    prompts = [[*PROMPT[:40], index + 3, *PROMPT[index:]] for index in range(12)]
    small = OPTIONS | {"num_gpu_blocks_override": 40, "preemption_mode": "recompute"}
    with running(tiny_assembly(tiny[0], **small)) as engine:
        score(engine, PROMPT[:40])
        sampling = {"max_tokens": 2, "prompt_logprobs": 2, "logits_digest": True}
        outputs = engine.wait(*[engine.submit(prompt, **sampling) for prompt in prompts])
        for prompt, found in zip(prompts, outputs, strict=True):
            computed = alone(prompt)
            assert found.prompt_logprobs == computed.prompt_logprobs
            assert found.fingerprints == computed.fingerprints
        assert engine.history[-1].stats.cached_tokens >= 12 * 39


def test_without_the_option_the_prompt_is_computed(tiny):
    with running(tiny_assembly(tiny[0], **OPTIONS | {"batch_invariant": False})) as engine:
        assert [score(engine, PROMPT)[1] for _ in range(2)] == [0, 0]


def test_digest_and_echo_of_a_cached_prompt_are_the_same(tiny):
    """As the OpenAI gateway sends completions with `echo` and `logprobs`."""
    sampling = {"prompt_logprobs": 1, "logprobs": 1, "echo": True, "max_tokens": 3, "temperature": 0}
    inputs = {
        "text_input": "the sea is blue, and so is the sky",
        "sampling_parameters": json.dumps(sampling | {"logits_digest": True}),
        "return_receipt": True,
        "return_logprobs": True,
    }
    with serving(tiny[0], **OPTIONS) as service:
        first, second = (service.ask(**inputs) for _ in range(2))
    receipts = [json.loads(outputs.pop("receipt")[0]) for outputs in (first, second)]
    assert first == second
    assert [receipt["cached_tokens"] for receipt in receipts] == [0, 31]
    assert receipts[0]["logits_digests"] == receipts[1]["logits_digests"]
