"""Sampling parameters: accepted values, and the errors for rejected ones."""

import json
from dataclasses import fields

import pytest

from paged_backend.api.sampling_params import SamplingParams
from tests.support.sampling_params import LIMITS, rejection


def test_defaults_match_vllm():
    params = SamplingParams.parse({}, LIMITS)
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)


def test_unsupported_parameters_accept_values_without_effect():
    """Null selects the default, except for max_tokens. Some clients send every field of vLLM."""
    defaults = SamplingParams.parse({}, LIMITS)
    names = {spec.name for spec in fields(SamplingParams)} - {"max_tokens"}
    assert SamplingParams.parse(dict.fromkeys(names), LIMITS) == defaults
    rest = {"use_beam_search": False, "detokenize": True, "spaces_between_special_tokens": True, "extra_args": {}}
    rest |= {
        "flat_logprobs": False,
        "skip_reading_prefix_cache": False,
        "logits_processors": [],
    }
    assert SamplingParams.parse(rest, LIMITS) == defaults
    assert SamplingParams.parse(dict.fromkeys(rest), LIMITS) == defaults


def test_best_of_must_be_at_least_n():
    assert "best_of=2: must be n=3..64" in rejection(n=3, best_of=2)
    assert "best_of=4: must be n=2 with beam_width=4" in rejection(n=2, best_of=4, beam_width=4)
    params = SamplingParams.parse({"n": 2, "best_of": 2, "beam_width": 4}, LIMITS)
    assert (params.num_seqs, params.selects_best_of) == (4, False)


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_one_sample_may_be_requested_explicitly(name):
    SamplingParams.parse({name: 1, "logprobs": None, "logit_bias": None}, LIMITS)


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"n": 3}, "n=3: must be 1..beam_width=2"),
        ({"temperature": 0.7}, "temperature=0.7: has no effect with beam_width=2"),
        ({"seed": 0}, "seed=0: has no effect with beam_width=2"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1: has no effect"),
        ({"early_stopping": "sometimes"}, 'early_stopping="sometimes": must be true, false or "never"'),
        ({"length_penalty": 11}, "length_penalty=11: must be at least -10"),
        ({"beam_width": 1, "length_penalty": 0.5}, "length_penalty=0.5: needs a beam_width above 1"),
        ({"beam_width": 1, "early_stopping": "never"}, 'early_stopping="never": needs a beam_width above 1'),
    ],
)
def test_parameters_without_effect_on_beams_are_rejected(sampling, text):
    assert text in rejection(**{"beam_width": 2} | sampling)


def test_beams_accept_the_default_and_the_greedy_temperature():
    for sampling in ({}, {"temperature": 0}, {"temperature": 1.0}):
        assert SamplingParams.parse({"beam_width": 2, "n": 2} | sampling, LIMITS).num_seqs == 2


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"beam_width": 2}, "thinking_token_budget=0: must be null with beam_width=2"),
        ({"structured_outputs": {"regex": "a"}}, "thinking_token_budget=0: must be null with structured_outputs.regex"),
        ({"json_object": True}, "thinking_token_budget=0: must be null with json_object"),
    ],
)
def test_a_thinking_budget_excludes_beams_and_structures(other, text):
    assert text in rejection(thinking_token_budget=0, **other)


def test_min_tokens_above_max_tokens_is_rejected():
    assert "min_tokens=5: must be 0..max_tokens=4" in rejection(min_tokens=5, max_tokens=4)


def test_a_long_value_is_cut_in_the_message():
    assert len(rejection(stop=[json.dumps("x" * 10_000)])) < 200


def test_an_error_is_valid_utf8():
    """Names from JSON may hold lone surrogates."""
    assert rejection(**{"\ud800": 1}).encode().startswith(b"INVALID_ARGUMENT: \\ud800=1: unknown sampling parameter")
