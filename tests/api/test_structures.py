"""The parameters of structured outputs: which values are accepted, and what errors say."""

import pytest

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.limits import EngineLimits, InputLimits
from paged_backend.api.sampling_params import SamplingParams

LIMITS = EngineLimits(max_model_len=64, vocab_size=320, num_pages=8, layout=BlockLayout(16), max_num_seqs=4)


def parse(**values):
    return SamplingParams.parse(values, LIMITS).structure


def test_null_and_false_mean_no_structure():
    nothing = {"json": None, "regex": None, "json_object": False, "disable_any_whitespace": False, "_backend": None}
    for name in ("json_schema", "json_object", "regex", "choice", "grammar", "structured_outputs"):
        assert parse(**{name: None}) is None
    assert parse(structured_outputs=nothing) is None
    assert parse(guided_decoding=nothing | {"backend": None, "backend_was_auto": False}) is None
    assert parse(json_object=False) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"json_schema": 5}, "json_schema=5: must be a JSON schema: an object, or a string that holds one"),
        ({"json_schema": "{"}, 'json_schema="{": is not valid JSON'),
        ({"json_schema": "[1]"}, "must be a JSON schema"),
        ({"json_schema": '{"a": ' * 5000}, "is not valid JSON"),
        ({"json_schema": {"maximum": float("inf")}}, "cannot be written as JSON"),
        ({"json_object": 1}, "json_object=1: must be true or false"),
        ({"regex": ""}, 'regex="": must be a string that is not empty'),
        ({"regex": ["a"]}, "must be a string"),
        ({"regex": "\ud800"}, "contains an unpaired surrogate"),
        ({"grammar": " "}, "must be a string that is not blank"),
        ({"choice": "a"}, "must be a list of strings, none of them empty"),
        ({"choice": []}, "must be 1..1024 strings"),
        ({"choice": ["a"] * 1025}, "must be 1..1024 strings"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"regex": "a" * (InputLimits.max_structure_bytes + 1)}, "has 65537 bytes; must be at most 65536"),
        ({"choice": ["é" * 40000]}, "must be at most 65536"),
        ({"structured_outputs": 1}, "must be an object"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "has json and regex; give one of them"),
        ({"structured_outputs": {"disable_fallback": True}}, "disable_fallback is not supported; leave it out"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "whitespace_pattern: has no effect without json or json"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "disable_any_whitespace: give one of them, together with json or json_object",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}},
            "disable_any_whitespace and whitespace_pattern: give one of them, together with json",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": 1}},
            "whitespace_pattern=1: must be a string",
        ),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": "1"}}, "must be true or false"),
        ({"structured_outputs": {"json": {"x-guidance": 5}, "whitespace_pattern": " "}}, "x-guidance: must be an obj"),
        ({"structured_outputs": {"json": 5}}, "json: must be a JSON schema"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice: each sets the form of the output; give one"),
        ({"regex": "a", "beam_width": 2}, "beam_width=2: must be 1 with regex"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "must be false with structured_outputs.regex"),
    ],
)
def test_invalid_structures_are_named(values, message):
    with pytest.raises(RequestError) as raised:
        parse(**values)
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT
    assert message in str(raised.value)
