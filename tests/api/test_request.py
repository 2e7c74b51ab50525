"""Sampling parameters and admission: what is taken, and how a refusal reads."""

import json
from dataclasses import fields

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.limits import EngineLimits
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams

LIMITS = EngineLimits(max_model_len=8192, vocab_size=1000, num_blocks=256, block_size=16, max_num_seqs=64)


def refusal(**values):
    with pytest.raises(RequestError) as caught:
        SamplingParams.parse(values, LIMITS)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    return str(caught.value)


def test_defaults_are_those_of_vllm():
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
def test_values_are_read_as_their_type(name, value, read):
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
        ("detokenize", False, "not supported yet"),
        ("use_beam_search", True, "not supported yet"),
        ("logits_processors", ["x"], "not supported yet"),
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
def test_a_bad_value_is_refused_by_name_value_and_limit(name, value, limit):
    text = refusal(**{name: value})
    assert text.startswith(f"INVALID_ARGUMENT: {name}=")
    assert limit in text
    assert len(text) < 700


@pytest.mark.parametrize("bias", [100.5, "much", None, True])
def test_a_bad_bias_is_refused_with_its_token(bias):
    assert refusal(logit_bias={"5": bias}).startswith(f"INVALID_ARGUMENT: logit_bias[5]={json.dumps(bias)}: must be")
    assert refusal(word_bias={"a": bias}).startswith(f'INVALID_ARGUMENT: word_bias["a"]={json.dumps(bias)}: must be')


def admitted(bad_words=(), eos=(), **sampling):
    params = SamplingParams.parse(sampling, LIMITS)
    return GenerateRequest.from_prompt(0, [1], params, 0, frozenset(eos), LIMITS, bad_words)


def test_allowed_tokens_are_a_mask_of_whole_32_bits():
    allowed = admitted(allowed_token_ids=[0, 33, 999]).allowed
    assert len(allowed) == 128
    assert [token for token in range(1024) if allowed[token // 8] >> token % 8 & 1] == [0, 33, 999]
    assert admitted().allowed is None


@pytest.mark.parametrize(
    "more",
    [{"bad_words": ((3,), (7, 4))}, {"stop_token_ids": [3, 4], "min_tokens": 1}, {"eos": [3, 4], "min_tokens": 2}],
)
def test_allowed_tokens_of_which_none_may_be_left_are_refused(more):
    with pytest.raises(RequestError, match=r"allowed_token_ids=\[3, 4\]: bad_words and min_tokens may forbid all"):
        admitted(allowed_token_ids=[3, 4], **more)
    admitted(allowed_token_ids=[3, 4, 5], **more)


def test_a_value_that_asks_for_nothing_is_taken_under_any_name_of_vllms():
    """Null is the default, but of max_tokens; clients that fill in every field send the rest."""
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


def test_the_best_are_of_no_fewer():
    assert "best_of=2: must be n=3..64" in refusal(n=3, best_of=2)
    assert "best_of=4: must be n=2 with beam_width=4" in refusal(n=2, best_of=4, beam_width=4)
    params = SamplingParams.parse({"n": 2, "best_of": 2, "beam_width": 4}, LIMITS)
    assert (params.num_seqs, params.selects_best_of) == (4, False)


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_one_sample_may_be_asked_for_by_name(name):
    SamplingParams.parse({name: 1, "logprobs": None, "logit_bias": None}, LIMITS)


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"n": 3}, "n=3: must be 1..beam_width=2"),
        ({"temperature": 0.7}, "temperature=0.7: has no meaning with beam_width=2"),
        ({"seed": 0}, "seed=0: has no meaning with beam_width=2"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1: has no meaning"),
        ({"early_stopping": "sometimes"}, 'early_stopping="sometimes": must be true, false or "never"'),
        ({"length_penalty": 11}, "length_penalty=11: must be at least -10"),
        ({"beam_width": 1, "length_penalty": 0.5}, "length_penalty=0.5: has a meaning with beam_width above 1 only"),
        ({"beam_width": 1, "early_stopping": "never"}, 'early_stopping="never": has a meaning with beam_width above 1'),
    ],
)
def test_what_means_nothing_to_a_beam_search_is_refused(sampling, text):
    assert text in refusal(**{"beam_width": 2} | sampling)


def test_beams_take_the_default_temperature_and_a_greedy_one():
    for sampling in ({}, {"temperature": 0}, {"temperature": 1.0}):
        assert SamplingParams.parse({"beam_width": 2, "n": 2} | sampling, LIMITS).num_seqs == 2


def test_min_tokens_above_max_tokens():
    assert "min_tokens=5: must be 0..max_tokens=4" in refusal(min_tokens=5, max_tokens=4)


def from_prompt(prompt, max_tokens):
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest.from_prompt(0, [1] * prompt, sampling, 0, frozenset({2}), LIMITS)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [
        (0, 1, "text_input: the prompt is empty"),
        (8192, 1, "prompt_tokens=8192: must be 1..8191"),
        (8000, 193, "max_tokens=193: must be 1..192 after a prompt of 8000 tokens"),
        (4000, 98, "max_tokens=98: prompt and output need 257 blocks of the key/value pool, which has 256"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_at_once(prompt, max_tokens, text):
    with pytest.raises(RequestError) as caught:
        from_prompt(prompt, max_tokens)
    assert str(caught.value).startswith(f"INVALID_ARGUMENT: {text}")


def test_a_token_that_the_model_does_not_know_is_refused():
    with pytest.raises(RequestError, match=rf"holds token {LIMITS.vocab_size}, but the model's vocabulary ends at"):
        GenerateRequest.from_prompt(0, [1, LIMITS.vocab_size], SamplingParams(), 0, frozenset(), LIMITS)


def test_the_largest_request_that_fits_is_admitted():
    assert len(from_prompt(4000, 97).prompt_token_ids) == 4000


@pytest.mark.parametrize(("ignore_eos", "stop_ids"), [(False, {2, 5}), (True, {5})])
def test_what_ends_the_output(ignore_eos, stop_ids):
    sampling = SamplingParams.parse({"ignore_eos": ignore_eos, "stop_token_ids": [5]}, LIMITS)
    request = GenerateRequest.from_prompt(0, [1], sampling, 0, frozenset({2}), LIMITS)
    assert request.stop_ids == stop_ids


def test_a_long_value_is_shortened_in_the_message():
    assert len(refusal(stop=[json.dumps("x" * 10_000)])) < 200


def test_an_error_is_text_that_can_be_sent():
    """JSON may hold halves of characters in names, too."""
    assert refusal(**{"\ud800": 1}).encode().startswith(b"INVALID_ARGUMENT: \\ud800=1: unknown sampling parameter")


@pytest.mark.parametrize("sampling", [{}, {"n": 3}, {"beam_width": 4, "n": 2}], ids=str)
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 1000, 4000])
def test_as_many_tokens_as_there_is_room_for(prompt, sampling):
    params = SamplingParams.parse({"max_tokens": None} | sampling, LIMITS)
    room = GenerateRequest.from_prompt(0, [1] * prompt, params, 0, frozenset(), LIMITS).sampling.max_tokens
    given = [SamplingParams.parse({"max_tokens": count} | sampling, LIMITS) for count in (room, room + 1)]
    GenerateRequest.from_prompt(0, [1] * prompt, given[0], 0, frozenset(), LIMITS)
    with pytest.raises(RequestError, match=f"max_tokens={room + 1}: "):
        GenerateRequest.from_prompt(0, [1] * prompt, given[1], 0, frozenset(), LIMITS)


def test_min_tokens_may_be_more_than_there_is_room_for():
    params = SamplingParams.parse({"max_tokens": None, "min_tokens": 200}, LIMITS)
    with pytest.raises(RequestError, match=r"min_tokens=200: must be 0\.\.max_tokens=97"):
        GenerateRequest.from_prompt(0, [1] * 4000, params, 0, frozenset(), LIMITS)
