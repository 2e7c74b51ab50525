"""The thinking budget holds in every output, and any kind of step gives the same tokens."""

import random
from collections import Counter
from contextlib import closing

import pytest

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import RequestError
from paged_backend.api.limits import EngineLimits
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.thinking import ThinkingBudget
from tests.support.in_process import running, tiny_assembly
from tests.support.remote_engines import SampleHarness

sync_and_async = pytest.mark.usefixtures("async_scheduling")
LENGTH = 40
# Few tokens, so that marks, and beginnings of marks, are frequent, and prompt lookup finds drafts.
ALLOWED = [40, 41, 42, 43, 44]
ONE_TOKEN = ((40,), (41,))
SEVERAL_TOKENS = ((40, 42), (41, 41, 43))
MARKS = (ONE_TOKEN, SEVERAL_TOKENS, ((41, 40), (41, 42, 41, 43)))  # the last two begin with the same token


def text(tokens):
    return "".join(map(chr, tokens))


def forced(prompt, output, limit, marks):
    """Return the token that must follow, by searching the marks in the text; None if any may follow."""
    begin, end = map(text, marks)
    before = text(prompt)
    start, used = before.rfind(begin), 0
    closed = before.find(end, start + len(begin)) if start >= 0 else -1
    rest = before[closed + len(end) if closed >= 0 else max(0, start) :] + text(output)
    while (start := rest.find(begin)) >= 0:
        rest = rest[start + len(begin) :]
        if (stop := rest.find(end)) < 0:
            done = next(size for size in range(len(end) - 1, -1, -1) if rest.endswith(end[:size]))
            return ord(end[done]) if used + len(rest) >= limit else None
        used += stop
        rest = rest[stop + len(end) :]
    return None


def forced_in(prompt, output, limit, marks):
    """Return the positions of forced tokens. Each of them must have the token that is forced."""
    expected = [forced(prompt, output[:position], limit, marks) for position in range(len(output))]
    positions = [position for position, token in enumerate(expected) if token is not None]
    assert [output[position] for position in positions] == [expected[position] for position in positions]
    return positions


def random_requests():
    """Yield the marks, prompts and parameters of requests."""
    rng = random.Random(3)
    for seed, marks in enumerate(MARKS * 5):
        prompt = [rng.choice(ALLOWED) for _ in range(rng.randint(1, 20))]
        if rng.random() < 0.4:
            prompt += [*marks[0], *[44] * rng.randint(0, 2)]
        penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.5}
        sampling = rng.choice([{}, penalties, {"top_k": 2}, {"min_tokens": 9}])
        sampling |= {"thinking_token_budget": rng.choice([0, 1, 2, 5, 9]), "n": rng.choice([1, 1, 3])}
        sampling |= {"temperature": 2.0, "seed": seed, "max_tokens": LENGTH, "allowed_token_ids": ALLOWED}
        yield marks, prompt, sampling


REQUESTS = list(random_requests())


def generate(assembly, requests):
    """Return the tokens of each sample of requests that run together. Marks of None: without a budget."""
    with closing(assembly), running(assembly) as engine:
        harness = SampleHarness(assembly, engine.engine, engine.steps)
        keys = [harness.submit(prompt, marks=marks, **sampling) for marks, prompt, sampling in requests]
        return [
            [sample.tokens for sample in harness.collect(key, sampling.get("n", 1))]
            for key, (_, _, sampling) in zip(keys, requests, strict=True)
        ]


@pytest.fixture(scope="module")
def expected(tiny):
    return generate(tiny_assembly(tiny[0]), REQUESTS)


def test_the_end_mark_is_forced_where_the_budget_is_used_up(tiny, expected):
    unlimited = [(None, prompt, sampling | {"thinking_token_budget": None}) for _, prompt, sampling in REQUESTS]
    free, num_changed = generate(tiny_assembly(tiny[0]), unlimited), Counter()
    for (marks, prompt, sampling), samples, others in zip(REQUESTS, expected, free, strict=True):
        for output, other in zip(samples, others, strict=True):
            positions = forced_in(prompt, output, sampling["thinking_token_budget"], marks)
            first = positions[0] if positions else LENGTH
            assert len(output) == LENGTH and output[:first] == other[:first]
            num_changed[marks] += sum(output[at] != other[at] for at in positions[:1])
    assert min(num_changed[marks] for marks in MARKS) > 1, num_changed


OPTIONS = {
    "a step in flight": {"async_scheduling": True},
    "draft tokens from the text": {"num_speculative_tokens": 3},
    "recomputation": {"num_gpu_blocks_override": 60, "async_scheduling": True},
    "swap and draft tokens": {
        "num_gpu_blocks_override": 60, "num_speculative_tokens": 2, "swap_space": 0.01, "preemption_mode": "swap",
    },
    "stages": {"pipeline_parallel_size": 2, "num_speculative_tokens": 2},
    "batch invariance": {"batch_invariant": True, "async_scheduling": True},
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind == "stages")) for kind in OPTIONS]
)
def test_any_kind_of_step_gives_the_same_tokens(tiny, expected, kind):
    assembly = tiny_assembly(tiny[0], **OPTIONS[kind])
    assert generate(assembly, REQUESTS) == expected
    stats = assembly.scheduler.stats
    assert stats.preemptions > 0 or "num_gpu_blocks_override" not in OPTIONS[kind]
    assert stats.accepted_tokens > 0 or "num_speculative_tokens" not in OPTIONS[kind]


def test_a_draft_model_gives_the_same_tokens(tiny, expected):
    """The model itself proposes its tokens, so that all are accepted."""
    assembly = tiny_assembly(tiny[0], speculative_model=str(tiny[0]), num_speculative_tokens=3)
    assert generate(assembly, REQUESTS) == expected
    assert assembly.scheduler.stats.accepted_tokens > 0


@sync_and_async
def test_reasoning_that_the_prompt_begins_counts(tiny):
    marks, sampling = SEVERAL_TOKENS, {"max_tokens": 12, "thinking_token_budget": 2, "logit_bias": {"50": 100}}
    earlier, lengths = [*marks[0], 44, 44, *marks[1]], (0, 1, 3)
    opened = [(marks, [*earlier, *marks[0], *[44] * length], sampling) for length in lengths]
    closed = [(marks, [*earlier, *[44] * length], sampling) for length in lengths]
    found = [output for (output,) in generate(tiny_assembly(tiny[0]), opened + closed)]
    assert found[:3] == [[50] * left + list(marks[1]) + [50] * (9 - left) for left in (2, 1, 0)]
    assert found[3:] == [[50] * 12] * 3


@sync_and_async
def test_the_budget_is_for_all_reasoning_of_an_output(tiny):
    """The model begins to reason again: at once, and after the budget is used up."""
    (begin,), (end,) = marks = ONE_TOKEN
    request = {"max_tokens": 16, "thinking_token_budget": 3, "logit_bias": {str(begin): 100}}
    ((output,),) = generate(tiny_assembly(tiny[0]), [(marks, [5, 6, 7], request)])
    assert output == [begin] * 4 + [end, begin] * 6


def test_forcing_outweighs_other_parameters(tiny):
    (begin,), (end,) = marks = ONE_TOKEN
    request = {"max_tokens": 8, "thinking_token_budget": 2, "logit_bias": {"50": 100, str(end): -100}}
    others = [
        {"temperature": 100.0, "seed": 1},
        {"temperature": 1e-6, "seed": 1},
        {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 1e-6, "temperature": 1.0, "min_p": 0.5, "top_k": 3, "top_p": 0.1, "seed": 1},
    ]
    for (output,) in generate(tiny_assembly(tiny[0]), [(marks, [end, begin], request | other) for other in others]):
        assert output[2] == end and end not in output[:2]


def test_a_stop_token_may_be_the_end_mark(tiny):
    (begin,), (end,) = marks = ONE_TOKEN
    request = {"max_tokens": 8, "thinking_token_budget": 2, "logit_bias": {"50": 100}, "stop_token_ids": [end]}
    assert generate(tiny_assembly(tiny[0]), [(marks, [begin], request)]) == [[[50, 50, end]]]


def test_requests_without_a_budget_have_no_constraints():
    limits = EngineLimits(8192, 320, 64, BlockLayout(4), 8)
    plain = GenerateRequest.from_prompt(0, [1], SamplingParams(), 0, frozenset(), limits)
    assert not plain.constrains_logits


@pytest.mark.parametrize(
    "excluding",
    [
        {"allowed_token_ids": [40, 41, 42]},
        {"bad_words": ((41,),)},
        {"bad_words": ((7, 43),)},
        {"min_tokens": 1, "stop_token_ids": [43]},
    ],
)
def test_an_end_mark_that_other_parameters_may_exclude_is_rejected(excluding):
    limits, budget = EngineLimits(8192, 320, 64, BlockLayout(4), 8), ThinkingBudget(4, *SEVERAL_TOKENS)
    bad_words = excluding.pop("bad_words", ())
    sampling = SamplingParams.parse({"thinking_token_budget": 4, **excluding}, limits)
    with pytest.raises(RequestError, match=r"thinking_token_budget=4: must be null: .* may exclude token 4[13], which"):
        GenerateRequest.from_prompt(0, [1], sampling, 0, frozenset(), limits, bad_words, budget)
