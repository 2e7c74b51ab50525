"""Reading requests: prompts, parameters, sessions, control requests."""

import json

import numpy as np
import pytest

from paged_backend.api.errors import RequestError
from paged_backend.server.wire.call import (
    CONTROL_REQUESTS,
    boolean,
    parse_json,
    read_call,
    read_control_request,
    scalar,
    string,
)
from paged_backend.server.wire.tensors import LIST_PARAMETERS
from tests.support.wire_requests import flag, read, rejection, strings, text

PROMPTS = {
    "text_input": text("x"),
    "messages": text(json.dumps([{"role": "user", "content": "x"}])),
    "input_ids": np.array([5], np.int32),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompts_input_is_named_and_a_prompt_continues_the_session(name):
    call = read({"sequence_id": 7, "sequence_end": True}, **{name: PROMPTS[name]})
    assert (call.prompt_field, call.only_ends_session) == (name, False)


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("embedding_request", {"input": "x"}, "embedding_request.input"),
        ("embedding_request", {"input": [5]}, "embedding_request.input"),
        ("classification_request", {"messages": [{"role": "user", "content": "x"}]}, "classification_request.messages"),
    ],
)
def test_the_prompts_field_of_a_pooling_request_is_named(name, content, field):
    assert read(**{name: text(json.dumps(content))}).prompt_field == field


def test_a_call_without_a_prompt_only_ends_its_session():
    assert read({"sequence_id": 7, "sequence_end": True}).only_ends_session


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_of_one_element_may_have_any_shape(shape):
    assert scalar({"top_k": np.full(shape, 5, np.int32)}, "top_k") == 5


def test_a_missing_tensor_is_none_or_the_default():
    assert scalar({}, "top_k") is None and string({}, "text_input") is None
    assert [boolean({}, "stream"), boolean({}, "stream", True)] == [False, True]
    assert boolean({"stream": np.array([False])}, "stream", True) is False


@pytest.mark.parametrize("value", ["é", "é".encode()])
def test_texts_are_strings_or_utf8_bytes(value):
    assert string({"text_input": np.array([value], np.object_)}, "text_input") == "é"


@pytest.mark.parametrize("json", ["[1", "[" * 100_000])
def test_invalid_json_is_rejected(json):
    assert parse_json("tools", "[1]") == [1]
    with pytest.raises(RequestError, match="tools: not valid JSON"):
        parse_json("tools", json)


def test_a_key_that_is_there_twice_is_rejected():
    assert parse_json("tools", '[{"a": {"b": 1}}, {"a": 1}]') == [{"a": {"b": 1}}, {"a": 1}]
    with pytest.raises(RequestError, match='tools: not valid JSON: the key "b" is there twice'):
        parse_json("tools", '[{"a": {"b": 1, "b": 1}}]')


def test_a_duplicate_behind_many_keys_is_found():
    """In linear time: a quadratic search takes more than an hour here, on the thread that admits requests."""
    keys = ", ".join(f'"{number}": 0' for number in range(500_000))
    with pytest.raises(RequestError, match='the key "x" is there twice'):
        parse_json("tools", f'{{{keys}, "x": 1, "x": 2}}')


def test_a_plain_prompt():
    call = read(text_input=text("Grüße"))
    assert (call.prompt, call.messages, call.stream, call.echo) == ("Grüße", None, False, True)
    assert not call.returns


def test_list_parameters_as_tensors():
    call = read(
        {"n": 2},
        text_input=text("x"),
        sampling_parameters=text('{"max_tokens": 3}'),
        stop=strings("Ä", "b"),
        bad_words=strings("c"),
        choice=strings("yes", "no"),
        stop_token_ids=np.array([5, 6], dtype=np.int32),
        allowed_token_ids=np.array([[7]], dtype=np.int32),
    )
    assert call.sampling == {
        "n": 2, "max_tokens": 3, "stop": ["Ä", "b"], "bad_words": ["c"], "choice": ["yes", "no"],
        "stop_token_ids": [5, 6], "allowed_token_ids": [7],
    }  # fmt: skip


@pytest.mark.parametrize("name", LIST_PARAMETERS)
def test_a_list_as_tensor_and_sampling_parameter_is_rejected(name):
    value = strings("5") if LIST_PARAMETERS[name].data_type == "TYPE_STRING" else np.array([5], dtype=np.int32)
    expected = f"{name}: is both a tensor and a sampling parameter"
    assert rejection(
        text_input=text("x"), sampling_parameters=text(json.dumps({name: [5]})), **{name: value}
    ).startswith(expected)


def test_a_list_as_tensor_and_request_parameter_is_rejected():
    assert rejection({"stop": "b"}, text_input=text("x"), stop=strings("a")).startswith("stop: is both a tensor")


def test_a_token_id_prompt_is_not_echoed_by_default():
    ids = np.array([5, 6], dtype=np.int32)
    call = read(input_ids=ids)
    assert (call.prompt, call.messages, call.input_ids.tolist(), call.echo) == (None, None, [5, 6], False)
    assert read(input_ids=ids, exclude_input_in_output=flag(False)).echo


def test_a_conversation():
    turns = [{"role": "user", "content": "hi"}]
    call = read(messages=text(json.dumps(turns)), stream=flag(True))
    assert (call.prompt, call.messages, call.echo) == (None, turns, False)


def test_a_sampling_parameter_overrides_a_request_parameter():
    call = read(
        {"max_tokens": 3, "temperature": 0}, text_input=text("x"), sampling_parameters=text('{"max_tokens": 5}')
    )
    assert call.sampling == {"max_tokens": 5, "temperature": 0}


def test_a_lone_surrogate_in_messages_is_rejected():
    turns = text('[{"role": "user", "content": "x", "name": "\\ud800"}]')
    assert "messages[0]: contains a lone surrogate" in rejection({}, messages=turns)


def test_only_a_sequence_end_may_omit_the_prompt():
    assert read({"sequence_id": 7, "sequence_end": True}, text_input=text("")).only_ends_session
    assert read({"sequence_id": 7, "sequence_end": True}).only_ends_session
    assert "none is given" in rejection({"sequence_id": 7})


def test_embeddings_have_no_session():
    reason = "sequence_id=7: not supported with embedding_request; leave it out"
    assert rejection({"sequence_id": 7}, embedding_request=text('{"input": "x"}')) == reason


@pytest.mark.parametrize(
    ("echo", "stream", "expected"),
    [(None, False, True), (True, False, False), (False, False, True), (True, True, False)],
)
def test_the_prompt_is_echoed_unless_excluded_or_streaming(echo, stream, expected):
    tensors = {} if echo is None else {"exclude_input_in_output": flag(echo)}
    assert read(text_input=text("x"), stream=flag(stream), **tensors).echo is expected


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"text_input": text("")}, "text_input: the prompt is empty"),
        ({}, "text_input, messages, input_ids: none is given; give exactly one"),
        (
            {"text_input": text("x"), "messages": text("[]")},
            "text_input, messages, input_ids: text_input and messages are given; give exactly one",
        ),
        ({"input_ids": np.array([1]), "text_input": text("")}, "text_input, messages, input_ids: text_input and inp"),
        ({"input_ids": np.array([], dtype=np.int32)}, "input_ids: the prompt is empty; give at least one token"),
        ({"text_input": text(b"\xff")}, "text_input: byte 0 is not valid UTF-8"),
        ({"text_input": np.array([b"a", b"b"], dtype=object)}, "text_input: has 2 elements; must have 1"),
        ({"text_input": np.array([], dtype=object)}, "text_input: has 0 elements; must have 1"),
        ({"messages": text("{")}, "messages: not valid JSON"),
        ({"messages": text("[" * 100_000)}, "messages: not valid JSON"),
        ({"messages": text("{}")}, "messages: must be a JSON list"),
        ({"messages": text("[]")}, "messages: must be a JSON list"),
        ({"messages": text('[{"role": "user"}]')}, "messages[0]: must have a `role` and a `content`"),
        (
            {"messages": text('[{"role": "user", "content": "\\ud800"}]')},
            "messages[0]: must have a `role` and a `content`",
        ),
        ({"messages": text('[{"role": "user", "content": 3}]')}, "messages[0]: must have a `role` and a `content`"),
        ({"messages": text('[{"role": "user", "content": "x"}]'), "exclude_input_in_output": flag(False)}, "exclude_"),
        ({"text_input": text("x"), "sampling_parameters": text("{")}, "sampling_parameters: not valid JSON"),
        ({"text_input": text("x"), "sampling_parameters": text("[1]")}, "sampling_parameters: must be a JSON object"),
        ({"text_input": text("x"), "stop": np.array([b"a", b"\xff"], dtype=object)}, "stop: byte 0 is not valid UTF-8"),
        ({"text_input": text("x"), "image": text("AA==")}, "image: images are not supported; leave it out"),
        ({"text_input": text("x"), "embedding_request": text("{}")}, "text_input: has no effect with"),
        ({"embedding_request": text("{")}, "embedding_request: not valid JSON"),
        ({"embedding_request": text("[]")}, "embedding_request=[]: must be a JSON object"),
        ({"embedding_request": text('{"input": "x"}'), "stream": flag(True)}, "stream=true: must be false with"),
    ],
)
def test_bad_tensors(tensors, reason):
    assert rejection(**tensors).startswith(reason)


def test_a_control_request_stands_alone():
    assert read_control_request({"pool_map": flag(True)}, {"x-tenant": "a", "sequence_id": 0}) == "pool_map"
    assert read_control_request({"stop_request": flag(True)}, {}) == "stop_request"
    assert read_control_request({"pool_map": flag(False), "text_input": text("x")}, {}) is None
    assert read_control_request({"text_input": text("x")}, {"max_tokens": 3}) is None


@pytest.mark.parametrize("asked", CONTROL_REQUESTS)
@pytest.mark.parametrize(
    ("tensors", "parameters", "others", "named"),
    [
        ({"text_input": text("x")}, {}, (), "text_input"),
        ({"messages": text("[]")}, {}, (), "messages"),
        ({"stream": flag(True)}, {}, (), "stream"),
        ({"image": text("")}, {}, (), "image"),
        ({}, {"max_tokens": 3}, (), "max_tokens"),
        ({}, {"timeout": 3}, (), "timeout"),
        ({}, {}, (3,), "timeout"),
        ({}, {}, (0, 7), "sequence_id"),
    ],
)
def test_inputs_beside_a_control_request_are_rejected_by_name(asked, tensors, parameters, others, named):
    with pytest.raises(RequestError, match=f"{named}: has no effect with {asked}; leave it out"):
        read_control_request({asked: flag(True)} | tensors, parameters, *others)
    with pytest.raises(RequestError, match="sequence_end=true: needs a sequence_id"):
        read_control_request({asked: flag(True)}, {"sequence_end": True})


@pytest.mark.parametrize("name", ["max-tokens", "top-p", "temprature", "Stop-Token-Ids"])
def test_a_misspelled_parameter_is_not_taken_for_a_header(name):
    assert rejection({name: 1}, text_input=text("x")).startswith(f"{name}=1: unknown parameter; did you mean ")


@pytest.mark.parametrize(
    ("name", "instead"), [("guided_json", "json_schema"), ("num_beams", "beam_width"), ("max_new_tokens", "max_tokens")]
)
def test_name_of_another_engine_has_a_replacement(name, instead):
    reason = rejection({name: "x"}, text_input=text("x"))
    assert reason == f'{name}="x": unknown parameter; use {instead} instead'


@pytest.mark.parametrize(
    ("parameters", "own", "control"),
    [
        ({}, (7, 0), (7, False, False)),
        ({}, ("talk", 1), ("talk", True, False)),
        ({}, (7, 3), (7, True, True)),
        ({"sequence_id": 7, "sequence_start": True}, (0, 0), (7, True, False)),
        ({"sequence_id": "talk", "sequence_end": True, "sequence_start": False}, (0, 0), ("talk", False, True)),
        ({"sequence_id": 0}, (0, 0), None),
        ({}, ("", 0), None),
    ],
)
def test_a_sequence_id_from_the_request_or_its_parameters(parameters, own, control):
    assert read_call({"text_input": text("x")}, parameters, 0, *own).sequence == control


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"sequence_id": -1}, "sequence_id=-1: must be a whole number above 0 or a string"),
        ({"sequence_id": 1.5}, "sequence_id=1.5: must be"),
        ({"sequence_id": True}, "sequence_id=true: must be"),
        ({"sequence_id": ""}, 'sequence_id="": must not be empty, or begin with a NUL'),
        ({"sequence_id": False}, "sequence_id=false: must be"),
        ({"sequence_id": "x" * 129}, "must be at most 128 bytes"),
        ({"sequence_id": 1, "sequence_start": 1}, "sequence_start=1: must be true or false"),
        ({"sequence_start": True}, "sequence_start=true: needs a sequence_id"),
        ({"sequence_end": True}, "sequence_end=true: needs a sequence_id"),
        ({"sequence-id": 1}, "sequence-id=1: unknown parameter; did you mean sequence_id?"),
    ],
)
def test_an_invalid_sequence_is_rejected(parameters, reason):
    assert reason in rejection(parameters, text_input=text("x"))


@pytest.mark.parametrize(
    ("salt_from", "sampling", "parameters", "reason"),
    [
        ("sampling_parameters", {}, {"cache_salt": "a"}, 'cache_salt="a": must be in sampling_parameters, unless'),
        ("sampling_parameters", {"cache_salt": "b"}, {"cache_salt": "a"}, 'cache_salt="a": must be in sampling_'),
        (
            "parameter",
            {"cache_salt": "b"},
            {},
            'cache_salt="b": must be a request parameter, not in sampling_parameters',
        ),
        ("parameter", {"cache_salt": "b"}, {"cache_salt": "a"}, 'cache_salt="b": must be a request parameter'),
        (None, {"cache_salt": "b"}, {}, 'cache_salt="b": needs the option cache_salt_from=parameter'),
    ],
)
def test_a_salt_is_taken_from_one_place_only(salt_from, sampling, parameters, reason):
    tensors = {"text_input": text("x"), "sampling_parameters": text(json.dumps(sampling))}
    with pytest.raises(RequestError, match=reason):
        read_call(tensors, parameters, salt_from=salt_from)


@pytest.mark.parametrize("salt_from", ["sampling_parameters", "parameter"])
def test_a_salt_in_its_place_is_taken_whole(salt_from):
    salt = {"cache_salt": "a\0b"}
    sampling, parameters = (salt, {}) if salt_from == "sampling_parameters" else ({}, salt)
    tensors = {"text_input": text("x"), "sampling_parameters": text(json.dumps(sampling))}
    assert read_call(tensors, parameters, salt_from=salt_from).sampling == salt


@pytest.mark.parametrize(
    ("parameters", "own", "found"), [({}, "", ""), ({}, "a", "a"), ({"id": "b"}, "", "b"), ({"id": ""}, "a", "a")]
)
def test_a_request_id_from_the_request_or_its_parameters(parameters, own, found):
    assert read_call({"text_input": text("x")}, parameters, request_id=own).request_id == found


@pytest.mark.parametrize("name", [5, True, None, "é" * 129])
def test_an_invalid_request_id_is_rejected(name):
    assert "must be a" in rejection({"id": name}, text_input=text("x"))


def test_forwarded_headers_are_ignored():
    parameters = {
        "x-tenant": "a",
        "traceparent": "00-1",
        "Authorization": "b",
        "triton_enable_empty_final_response": True,
    }
    assert read(parameters, text_input=text("x")).sampling == {}


@pytest.mark.parametrize("parameters", [{"timeout": 500}, {}])
def test_a_timeout_from_a_parameter_or_the_server(parameters):
    assert read(parameters, timeout_us=500, text_input=text("x")).timeout_us == 500


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"temprature": 1}, "temprature=1: unknown parameter"),
        ({"timeout": -1}, "timeout=-1: must be"),
        ({"timeout": "soon"}, 'timeout="soon": must be'),
    ],
)
def test_bad_parameters(parameters, reason):
    assert rejection(parameters, text_input=text("x")).startswith(reason)
