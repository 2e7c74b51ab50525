"""Speculative decoding: accepted draft tokens save steps, and no token changes."""

import random

import pytest
from transformers import LlamaConfig

from paged_backend.api.errors import ConfigError
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.kv.sequence import Sequence
from paged_backend.scheduling.speculation import PromptLookup, propose_placeholders
from tests.support.in_process import running, save_tiny, tiny_assembly

REPEATING = [11, 12, 13, 14, 15, 16, 17] * 4


@pytest.fixture(scope="module")
def prompts():
    rnd = random.Random(3)
    return [[rnd.randrange(3, 320) for _ in range(length)] for length in (1, 5, 17, 40)] + [REPEATING, REPEATING[:9]]


SAMPLINGS = [
    {},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.0, "top_p": 0.8, "seed": 9},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "temperature": 0.5, "seed": 2},
]


@pytest.fixture(scope="module")
def plain(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        return [engine.generate(prompts, max_tokens=16, **sampling) for sampling in SAMPLINGS]


@pytest.mark.parametrize(
    ("guesser", "count", "blocks"),
    [  # the pool of 27 blocks is exhausted at times
        *((guesser, 4, 27) for guesser in ("lookup", "itself", "draft")),
        ("lookup", 1, 64),
        *(pytest.param(guesser, 1, 64, marks=pytest.mark.nightly) for guesser in ("itself", "draft")),
    ],
)
def test_speculation_does_not_change_tokens(tiny, draft, prompts, plain, guesser, count, blocks):
    model = {"lookup": None, "itself": str(tiny[0]), "draft": str(draft)}[guesser]
    options = {"num_speculative_tokens": count, "speculative_model": model, "prompt_lookup_min": 1}
    with running(tiny_assembly(tiny[0], num_gpu_blocks_override=blocks, **options)) as engine:
        assert [engine.generate(prompts, max_tokens=16, **sampling) for sampling in SAMPLINGS] == plain
        stats = engine.history[-1].stats
        assert 0 <= stats.accepted_tokens <= stats.draft_tokens
        assert stats.draft_tokens > 0
        if guesser == "itself":  # the model accepts its own draft tokens
            assert stats.accepted_tokens == stats.draft_tokens
        if guesser == "draft":
            assert stats.accepted_tokens < 0.5 * stats.draft_tokens


def test_accepted_draft_tokens_save_steps(tiny):
    steps = {}
    for count in (0, 4):
        model = str(tiny[0]) if count else None
        with running(tiny_assembly(tiny[0], num_speculative_tokens=count, speculative_model=model)) as engine:
            engine.generate([[5, 6, 7]], max_tokens=21)
            steps[count] = len([one for one in engine.history if one.deltas])
    assert steps == {0: 21, 4: 5}


@pytest.mark.parametrize("count", [0, 4])
def test_stop_token_among_draft_tokens_ends_output(tiny, count):
    model = str(tiny[0]) if count else None
    with running(tiny_assembly(tiny[0], num_speculative_tokens=count, speculative_model=model)) as engine:
        (tokens,) = engine.generate([[5, 6, 7]], max_tokens=21)
        end = next(token for token in tokens[2:] if token not in tokens[:2])
        (output,) = engine.wait(engine.submit([5, 6, 7], max_tokens=21, stop_token_ids=[end]))
        assert output.tokens == tokens[: tokens.index(end) + 1]


def test_samples_of_one_prompt_draft_independently(tiny):
    found = []
    for count in (0, 3):
        model = str(tiny[0]) if count else None
        with running(tiny_assembly(tiny[0], num_speculative_tokens=count, speculative_model=model)) as engine:
            engine.submit(REPEATING, max_tokens=9, n=3, temperature=0.9, seed=5)
            outputs, left = {0: [], 1: [], 2: []}, 3
            while left:
                for delta in engine.steps.get(timeout=60).deltas:
                    outputs[delta.sample] += delta.token_ids
                    left -= delta.last
            found.append(outputs)
    assert found[0] == found[1]


def sequence(tokens, **sampling):
    return Sequence(GenerateRequest(0, tuple(tokens), SamplingParams(**sampling), 0, frozenset()), list(tokens), [])


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 4, 8, 2, 3, 5, 2, 3], 3, [5, 2, 3]),  # the latest of several occurrences
        ([1, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3], 2, [7, 5]),  # the longest run comes before the latest one
        ([7, 8, 7, 8, 7, 8], 5, [7, 8, 7, 8, 7]),  # a repetition goes on
        ([1, 2, 3, 4], 3, []),
        ([4], 3, []),
        ([256, 1, 1, 256], 2, []),  # the bytes match across token boundaries
    ],
)
def test_prompt_lookup_proposes_continuation(tokens, most, expected):
    assert PromptLookup(shortest=2, longest=3)(sequence(tokens), most) == expected


def test_prompt_lookup_indexes_incrementally():
    one, lookup = sequence([5, 6, 7, 8]), PromptLookup(shortest=1, longest=2)
    assert lookup(one, 2) == []
    one.tokens += [5, 6]
    assert lookup(one, 2) == [7, 8]


def test_no_device_drafts_with_penalties():
    assert propose_placeholders(sequence([1], repetition_penalty=1.1), 3) == []
    assert len(propose_placeholders(sequence([1]), 3)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_model": "x"}, 'speculative_model="x": has no effect without num_speculative_tokens'),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min=5: must be at most prompt_lookup_max=4"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens=33: must be a whole number 0..32"),
    ],
)
def test_invalid_speculation_options_are_rejected(tiny, options, message):
    with pytest.raises(ConfigError, match=message):
        tiny_assembly(tiny[0], **options)


def test_draft_model_with_other_vocabulary_is_rejected(tiny, tmp_path):
    config = LlamaConfig(vocab_size=321, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                         num_attention_heads=2, max_position_embeddings=256)  # fmt: skip
    save_tiny(config, tmp_path)
    with pytest.raises(ConfigError, match=r"speculative_model=.*: has 321 tokens; must have the model's 320"):
        tiny_assembly(tiny[0], num_speculative_tokens=2, speculative_model=str(tmp_path))
