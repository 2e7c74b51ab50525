"""Everything that a client may send has a limit, which is an option with a default, and which an error names."""

import json
from dataclasses import fields, replace

import pytest

from paged_backend import errors
from paged_backend.errors import SHOWN_CHARS, RequestError, invalid
from paged_backend.frontend import wire
from paged_backend.limits import Caps, Limits
from paged_backend.sampling_params import SamplingParams
from tests.callers import Caller, serving
from tests.test_wire import text

LIMITS = Limits(64, 320, 256, 4, 8)
# What is one too much of each: sampling parameters that exceed a limit of 3.
SAMPLING = {
    "max_logprobs": {"logprobs": 4},
    "max_stop_strings": {"stop": ["a"] * 4},
    "max_stop_bytes": {"stop": "éé"},
    "max_stop_token_ids": {"stop_token_ids": [0, 1, 2, 3]},
    "max_bad_words": {"bad_words": ["a"] * 4},
    "max_biased_words": {"word_bias": dict.fromkeys("abcd", 1)},
    "max_word_bytes": {"bad_words": "abcd"},
    "max_token_words": {"bad_words_token_ids": [[1]] * 4},
    "max_token_word_ids": {"stop_words_token_ids": [[1, 2, 3, 4]]},
    "max_allowed_token_ids": {"allowed_token_ids": [0, 1, 2, 3]},
    "max_logit_biases": {"logit_bias": dict.fromkeys("0123", 1)},
    "max_structure_bytes": {"regex": "abcd"},
    "max_choices": {"choice": ["a"] * 4},
    "max_salt_bytes": {"cache_salt": "abcd"},
    "max_adapter_name_bytes": {"lora_name": "abcd"},
}
FUNCTION = {"function": {"name": "f"}}
TURN = {"role": "user", "content": "a"}
# Likewise of the rest, which is read before: (tensors, parameters).
CALLS = {
    "max_request_id_bytes": ({"text_input": "a"}, {"id": "abcd"}),
    "max_sequence_id_bytes": ({"text_input": "a"}, {"sequence_id": "abcd"}),
    "max_json_chars": ({"text_input": "a", "sampling_parameters": "    {}"}, {}),
    "max_messages": ({"messages": json.dumps([TURN] * 4)}, {}),
    "max_tools": ({"messages": json.dumps([TURN]), "tools": json.dumps([FUNCTION] * 4)}, {}),
    "max_tools_chars": ({"messages": json.dumps([TURN]), "tools": json.dumps([FUNCTION])}, {}),
    "max_tool_calls": ({"messages": json.dumps([TURN | {"tool_calls": [FUNCTION] * 4}])}, {}),
}


def test_each_limit_is_tried_here():
    assert set(SAMPLING) | set(CALLS) == {spec.name for spec in fields(Caps)}


@pytest.mark.parametrize("name", SAMPLING)
def test_one_too_much_is_refused_with_the_name_of_the_limit(name):
    def parse(most):
        return SamplingParams.parse(SAMPLING[name], replace(LIMITS, caps=Caps(**{name: most})))

    parse(4)
    with pytest.raises(RequestError) as caught:
        parse(3)
    (field,) = SAMPLING[name]
    assert str(caught.value).startswith(f"INVALID_ARGUMENT: {field}=")
    assert name in str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_one_too_much_of_a_call_is_refused_with_the_name_of_the_limit(name):
    tensors, parameters = CALLS[name]
    tensors = {key: text(value) for key, value in tensors.items()}
    with pytest.raises(RequestError, match=rf"must be at most 3 \w+ \({name}\)"):
        wire.read(tensors, parameters, caps=Caps(**{name: 3}))
    wire.read(tensors, parameters)


def test_the_limits_are_options(tiny):
    options = {"max_stop_strings": 1, "max_request_id_bytes": 4, "max_prompt_chars": 8, "max_logit_biases": 2}
    with serving(tiny[0], **options) as server:
        for inputs, sampling, limit in (
            ({"text_input": "abcd"}, {"stop": ["a", "b"]}, "(max_stop_strings)"),
            ({"text_input": "abcdefghi"}, {}, "must be at most 8 (max_prompt_chars"),
            ({"text_input": "abcd"}, {"word_bias": {"abc": 1}}, "(max_logit_biases)"),
        ):
            refusal = server.call(**inputs, sampling_parameters=json.dumps(sampling)).refusal()
            assert limit in refusal
        assert server.ask(text_input="abcd", sampling_parameters='{"max_tokens": 1, "stop": "a"}')


def test_what_an_error_shows_of_a_long_name_or_value_is_its_beginning():
    """However long, and whatever it holds."""
    nested = []
    for _ in range(100_000):
        nested = [nested]
    for name, value in (("a" * 10**6, 1), ("a", "b" * 10**6), ("a", nested), ("a", 10**5000)):
        assert len(str(invalid(name, value, "no"))) < 2 * SHOWN_CHARS + 40


@pytest.mark.parametrize("name", ["z" * 10**6, "max_token" * 10**5])
def test_a_name_of_megabytes_is_not_compared_whole(name, monkeypatch):
    """With all the names there are, character by character."""
    compared, compare = [], errors.difflib.get_close_matches
    monkeypatch.setattr(
        errors.difflib, "get_close_matches", lambda word, *others: compared.append(word) or compare(word, *others)
    )
    with pytest.raises(RequestError, match="unknown"):
        wire.read({"text_input": text("a")}, {name: 1})
    with pytest.raises(RequestError, match="unknown"):
        SamplingParams.parse({name: 1}, LIMITS)
    assert [len(word) for word in compared] == [SHOWN_CHARS] * 2


def test_parameters_that_are_no_text_are_the_client_s_fault(tiny):
    """As the server hands them on from HTTP: it looks at no byte of a name."""

    def parameters():
        return b'{"\xff": 1}'.decode()

    with serving(tiny[0]) as server:
        caller = Caller(text_input="abcd")
        caller.parameters = parameters
        server.service.submit(caller)
        assert "INVALID_ARGUMENT: the request's parameters or id: byte 2 is not valid UTF-8" in caller.refusal()
