"""Sampling parameters: accepted values, and the errors for rejected ones."""

import json
from dataclasses import fields

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.limits import EngineLimits
from paged_backend.api.sampling_params import SamplingParams

LIMITS = EngineLimits(max_model_len=8192, vocab_size=1000, num_blocks=256, block_size=16, max_num_seqs=64)


def rejection(**values):
    with pytest.raises(RequestError) as caught:
        SamplingParams.parse(values, LIMITS)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    return str(caught.value)


def test_defaults_match_vllm():
    params = SamplingParams.parse({}, LIMITS)
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("max_tokens", "12", 12),
        ("max_tokens", 12.0, 12),
        ("temperature", "0", 0.0),
        ("temperature", 1, 1.0),
        ("top_k", -1, 0),
        ("ignore_eos", "true", True),
        ("ignore_eos", "False", False),
        ("ignore_eos", 1, True),
        ("ignore_eos", "0", False),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("stop_token_ids", [1, 2, 2], frozenset({1, 2})),
        ("bad_words", "END", ("END",)),
        ("bad_words", None, ()),
        ("allowed_token_ids", None, None),
        ("allowed_token_ids", [7, "5"], frozenset({5, 7})),
        ("logit_bias", None, ()),
        ("word_bias", None, ()),
        ("word_bias", {"sea": "2.5", " ": -100}, (("sea", 2.5), (" ", -100.0))),
        ("logit_bias", {"7": "-100", 5: 2}, ((5, 2.0), (7, -100.0))),
        ("seed", None, None),
        ("logprobs", None, None),
        ("logprobs", "20", 20),
        ("seed", 2**64 - 1, 2**64 - 1),
    ],
)
def test_values_are_converted_to_their_type(name, value, read):
    assert getattr(SamplingParams.parse({name: value}, LIMITS), name) == read


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("max_tokens", 0, "1..8192"),
        ("max_tokens", 99999999999, "1..8192"),
        ("max_tokens", 1.5, "1..8192"),
        ("max_tokens", True, "1..8192"),
        ("max_tokens", "many", "1..8192"),
        ("max_tokens", "1_0", "1..8192"),
        ("max_tokens", "\uff15", "1..8192"),
        ("temperature", "0_1", "number"),
        ("max_tokens", [], "1..8192"),
        ("min_tokens", -1, "0..8192"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", float("nan"), "finite"),
        ("temperature", float("inf"), "finite"),
        ("temperature", "NaN", "finite"),
        ("temperature", 10**400, "finite"),
        ("temperature", True, "number"),
        ("temperature", {}, "number"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.1, "at most 1"),
        ("top_k", -2, "-1.."),
        ("min_p", 2, "at most 1"),
        ("seed", 2**64, "18446744073709551615"),
        ("stop", [""], "non-empty"),
        ("stop", [1], "non-empty"),
        ("stop", ["a\ud800"], "whole characters"),
        ("stop", 1, "non-empty"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop", ["x" * 257], "at most 256 bytes"),
        ("stop_token_ids", [1000], "0..999"),
        ("stop_token_ids", [-1], "0..999"),
        ("stop_token_ids", 5, "list"),
        ("stop_token_ids", [0] * 257, "at most 256"),
        ("ignore_eos", "maybe", "true or false"),
        ("ignore_eos", 2, "true or false"),
        ("ignore_eos", 1.0, "true or false"),
        ("detokenize", False, "not supported"),
        ("use_beam_search", True, "not supported"),
        ("logits_processors", ["x"], "not supported"),
        ("repetition_penalty", 0, "above 0"),
        ("presence_penalty", -2.5, "at least -2"),
        ("frequency_penalty", 2.5, "at most 2"),
        ("n", 65, "must be 1..64"),
        ("priority", 0.5, "must be -2147483648..2147483647"),
        ("priority", 2**31, "must be -2147483648..2147483647"),
        ("n", 0, "must be 1..64"),
        ("n", True, "must be 1..64"),
        ("best_of", 65, "must be 1..64"),
        ("bad_words", ["x"] * 129, "at most 128 strings"),
        ("bad_words", ["x" * 257], "at most 256 bytes"),
        ("bad_words", [""], "non-empty"),
        ("allowed_token_ids", [], "at least one"),
        ("allowed_token_ids", [1000], "0..999"),
        ("allowed_token_ids", 5, "list"),
        ("allowed_token_ids", [0] * 16385, "at most 16384"),
        ("logit_bias", [1], "must be an object"),
        ("word_bias", ["sea"], "must be an object"),
        ("word_bias", {"": 1}, "non-empty"),
        ("word_bias", {str(word): 1 for word in range(129)}, "at most 128 strings"),
        ("logit_bias", {"1000": 1}, "0..999"),
        ("logit_bias", {"x": 1}, "0..999"),
        ("logit_bias", {"5": 1, "05": 2}, "token 5 is there twice"),
        ("logit_bias", {str(token): 1 for token in range(1025)}, "at most 1024"),
        ("cache_salt", "a\ud800", "of whole characters"),
        ("cache_salt", 1, "must be a string"),
        ("cache_salt", "x" * 257, "at most 256 bytes"),
        ("logprobs", 21, "must be 0..20"),
        ("logprobs", -1, "must be 0..20"),
        ("logprobs", True, "must be 0..20"),
        ("temprature", 0.5, "did you mean temperature?"),
        ("frobnicate", 1, "known are"),
    ],
)
def test_an_invalid_value_is_rejected_with_name_value_and_limit(name, value, limit):
    text = rejection(**{name: value})
    assert text.startswith(f"INVALID_ARGUMENT: {name}=")
    assert limit in text
    assert len(text) < 700


@pytest.mark.parametrize("bias", [100.5, "much", None, True])
def test_an_invalid_bias_is_rejected_with_its_token(bias):
    assert rejection(logit_bias={"5": bias}).startswith(f"INVALID_ARGUMENT: logit_bias[5]={json.dumps(bias)}: must be")
    assert rejection(word_bias={"a": bias}).startswith(f'INVALID_ARGUMENT: word_bias["a"]={json.dumps(bias)}: must be')


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


def test_min_tokens_above_max_tokens_is_rejected():
    assert "min_tokens=5: must be 0..max_tokens=4" in rejection(min_tokens=5, max_tokens=4)


def test_a_long_value_is_cut_in_the_message():
    assert len(rejection(stop=[json.dumps("x" * 10_000)])) < 200


def test_an_error_is_valid_utf8():
    """Names from JSON may hold lone surrogates."""
    assert rejection(**{"\ud800": 1}).encode().startswith(b"INVALID_ARGUMENT: \\ud800=1: unknown sampling parameter")
