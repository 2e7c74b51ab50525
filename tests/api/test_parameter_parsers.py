"""Values of sampling parameters: conversion, and what is rejected."""

import json

import pytest

from paged_backend.api.sampling_params import SamplingParams
from tests.support.sampling_params import LIMITS, rejection


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("max_tokens", "12", 12),
        ("max_tokens", 12.0, 12),
        ("temperature", "0", 0.0),
        ("temperature", 1, 1.0),
        ("top_k", -1, 0),
        ("truncate_prompt_tokens", -1, 8192),
        ("truncate_prompt_tokens", "-1", 8192),
        ("thinking_token_budget", "0", 0),
        ("thinking_token_budget", 10**6, 10**6),
        ("thinking_token_budget", -1, None),
        ("thinking_token_budget", None, None),
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
        ("thinking_token_budget", -2, "0..2147483647, or -1 for no limit"),
        ("thinking_token_budget", 2**31, "0..2147483647"),
        ("thinking_token_budget", 1.5, "0..2147483647"),
        ("thinking_token_budget", True, "0..2147483647"),
        ("max_thinking_tokens", 5, "use thinking_token_budget instead"),
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
        ("truncate_prompt_tokens", -2, "1..8192, or -1"),
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
        ("priority", 0.5, "must be a whole number -2147483648..2147483647"),
        ("priority", 2**31, "must be -2147483648..2147483647"),
        ("n", 0, "must be 1..64"),
        ("n", True, "must be a whole number 1..64"),
        ("n", 1.5, "must be a whole number 1..64"),
        ("n", "two", "must be a whole number 1..64"),
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
        ("logprobs", True, "must be a whole number 0..20"),
        ("temprature", 0.5, "did you mean temperature?"),
        ("frobnicate", 1, "known are"),
        ("guided_json", "{}", "unknown sampling parameter; use json_schema instead"),
        ("guided_regex", "a", "use regex instead"),
        ("guided_choice", ["a"], "use choice instead"),
        ("guided_grammar", "", "use grammar instead"),
        ("max_new_tokens", 1, "use max_tokens instead"),
        ("response_format", {}, "use json_schema or json_object instead"),
        ("use_beam_search", True, "not supported; use beam_width instead"),
        ("detokenize", False, "not supported; leave it out"),
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
