"""Input tensors: prompts, conversations, parameters that are tensors, and what is rejected."""

import json

import numpy as np
import pytest

from paged_backend.server.tensors import LIST_PARAMETERS
from tests.support.wire_requests import flag, read, rejection, strings, text


def test_a_plain_prompt():
    call = read(text_input=text("Grüße"))
    assert (call.prompt, call.messages, call.stream, call.echo) == ("Grüße", None, False, True)
    assert not (call.return_finish_reason or call.return_num_input_tokens or call.return_num_output_tokens)


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
