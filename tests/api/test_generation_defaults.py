"""Defaults of sampling parameters that a model or the operator sets."""

from dataclasses import replace

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.request import fit_max_tokens
from paged_backend.api.sampling_params import DEFAULT_KEYS, SamplingParams, to_defaults
from paged_backend.server.wire.pooling import parse_pooling_sampling
from tests.support.sampling_params import LIMITS

VALUES = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 40
}  # fmt: skip
MODEL = replace(LIMITS, sampling_defaults=to_defaults(VALUES))


def parse(**given):
    return SamplingParams.parse(given, MODEL)


def fitted(prompt, **given):
    return fit_max_tokens(prompt, parse(**given), MODEL).max_tokens


def test_parameters_not_given_have_the_models_defaults():
    own = {name: value for name, value in VALUES.items() if name != "max_new_tokens"}
    for params in (parse(), parse(**dict.fromkeys(own), max_tokens=None)):
        assert {name: getattr(params, name) for name in own} == own
    assert parse(presence_penalty=1).presence_penalty == 1


def test_given_parameters_win():
    given = {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 90}
    assert parse(**given) == SamplingParams.parse(given, LIMITS)


def test_max_new_tokens_is_cut_to_what_fits():
    assert (fitted(10), fitted(10, max_tokens=None), fitted(10, max_tokens=90)) == (40, 40, 90)
    assert fitted(4089) == 8, "the KV cache has room for 4096 tokens and one that is not stored"
    small = replace(MODEL, max_model_len=64)
    assert fit_max_tokens(50, SamplingParams.parse({}, small), small).max_tokens == 14


def test_a_beam_search_has_only_defaults_with_an_effect():
    params = parse(beam_width=4)
    assert params == SamplingParams.parse({"beam_width": 4, "max_tokens": None}, LIMITS)
    assert fitted(10, beam_width=4) == 40


def test_embeddings_have_no_defaults():
    name = "embedding_request"
    assert parse_pooling_sampling(name, {"priority": 1}, MODEL) == parse_pooling_sampling(name, {"priority": 1}, LIMITS)


def test_values_without_effect_are_left_out():
    neutral = {"temperature": 1.0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1.0}
    assert to_defaults(neutral | {"max_new_tokens": None}) == to_defaults({})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("x", 'must be an object like {"temperature": 0.5}'),
        ({"temprature": 1}, "temprature: unknown; did you mean temperature?"),
        ({"eos_token_id": 1}, f"eos_token_id: unknown; known are {', '.join(DEFAULT_KEYS)}"),
        ({"top_p": 2}, "top_p=2: must be above 0 and at most 1"),
        ({"top_k": "many"}, 'top_k="many": must be a whole number -1..2147483647'),
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be 1..2147483647"),
        ({"temperature": []}, "temperature=[]: must be a number"),
    ],
)
def test_invalid_overrides_are_rejected(value, reason):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options({"model": "m", "override_generation_config": value})
    assert str(caught.value).startswith("override_generation_config=") and str(caught.value).endswith(reason)


@pytest.mark.parametrize("value", [{}, {"temperature": None}, {"temperature": 0.5, "max_new_tokens": 9}, None])
def test_valid_overrides_are_accepted(value):
    config = EngineConfig.from_options({"model": "m", "override_generation_config": value})
    assert config.override_generation_config == value
