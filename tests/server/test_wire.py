"""Tensors and parameters: the same schema in three places, and the handling of every input."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from client import wire as client_wire
from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import TokenLogprob
from paged_backend.server.tensors import INPUTS, LIST_PARAMETERS, NUMPY_TYPES, OUTPUTS
from paged_backend.server.wire.control import CONTROL_REQUESTS, read_control_request
from paged_backend.server.wire.read import read_call
from paged_backend.server.wire.write import SampleOutput, error_text, write_response
from tests.support.wire_requests import flag, read, rejection, strings, text

CONFIG = Path(__file__).parents[2] / "model_repository/paged_llm/config.pbtxt"


def tensors_of(section):
    """Return {name: (data type, dims)} from config.pbtxt."""
    body = re.search(rf"^{section} \[(.*?)^\]", CONFIG.read_text(), re.M | re.S).group(1)
    rows = re.findall(r'name: "(\w+)"\s+data_type: (\w+)\s+dims: \[ (-?\d+) \]', body)
    assert len(rows) == body.count("name:")
    return {name: (kind, (int(dims),)) for name, kind, dims in rows}


@pytest.mark.parametrize("section", ["input", "output"])
def test_config_backend_and_client_declare_the_same_tensors(section):
    specs = {"input": INPUTS, "output": OUTPUTS}[section]
    assert tensors_of(section) == {name: (spec.data_type, spec.dims) for name, spec in specs.items()}
    assert tensors_of(section) == {"input": client_wire.INPUTS, "output": client_wire.OUTPUTS}[section]


def test_tensors_match_the_vllm_backend():
    """The tensors that its documentation lists."""
    theirs = {
        "text_input": ("TYPE_STRING", (1,)),
        "image": ("TYPE_STRING", (-1,)),
        "stream": ("TYPE_BOOL", (1,)),
        "sampling_parameters": ("TYPE_STRING", (1,)),
        "exclude_input_in_output": ("TYPE_BOOL", (1,)),
        "return_finish_reason": ("TYPE_BOOL", (1,)),
        "return_cumulative_logprob": ("TYPE_BOOL", (1,)),
        "return_logprobs": ("TYPE_BOOL", (1,)),
        "return_num_input_tokens": ("TYPE_BOOL", (1,)),
        "return_num_output_tokens": ("TYPE_BOOL", (1,)),
        "embedding_request": ("TYPE_STRING", (1,)),
    }
    assert theirs.items() <= tensors_of("input").items()
    assert tensors_of("output").keys() >= {
        "text_output", "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens",
    }  # fmt: skip


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


@pytest.mark.parametrize("name", ["max-tokens", "top-p", "temprature", "Stop-Token-Ids"])
def test_a_misspelled_parameter_is_not_taken_for_a_header(name):
    assert rejection({name: 1}, text_input=text("x")).startswith(f"{name}=1: unknown parameter; did you mean ")


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
    ("parameters", "own", "found"), [({}, "", ""), ({}, "a", "a"), ({"id": "b"}, "", "b"), ({"id": ""}, "a", "a")]
)
def test_a_request_id_from_the_request_or_its_parameters(parameters, own, found):
    assert read_call({"text_input": text("x")}, parameters, request_id=own).request_id == found


@pytest.mark.parametrize("name", [5, True, None, "é" * 129])
def test_an_invalid_request_id_is_rejected(name):
    assert "must be a" in rejection({"id": name}, text_input=text("x"))


def test_a_lone_surrogate_in_messages_is_rejected():
    turns = text('[{"role": "user", "content": "x", "name": "\\ud800"}]')
    assert "messages: contain a lone surrogate" in rejection({}, messages=turns)


def test_only_a_sequence_end_may_omit_the_prompt():
    assert read({"sequence_id": 7, "sequence_end": True}, text_input=text("")).only_ends_session
    assert read({"sequence_id": 7, "sequence_end": True}).only_ends_session
    assert "none is given" in rejection({"sequence_id": 7})


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
    ("echo", "stream", "expected"),
    [(None, False, True), (True, False, False), (False, False, True), (True, True, False)],
)
def test_the_prompt_is_echoed_unless_excluded_or_streaming(echo, stream, expected):
    tensors = {} if echo is None else {"exclude_input_in_output": flag(echo)}
    assert read(text_input=text("x"), stream=flag(stream), **tensors).echo is expected


def test_error_text_sent_to_clients():
    """Texts that clients compare are exactly those of the vLLM backend."""
    with pytest.raises(RequestError) as caught:
        read(text_input=text("x"), stream=flag(True), exclude_input_in_output=flag(False))
    letter = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    assert (caught.value.code, error_text(caught.value)) == (ErrorCode.INVALID_ARGUMENT, letter)
    values = {code: error_text(RequestError(code, "no")) for code in ErrorCode}
    assert values.pop(ErrorCode.CANCELLED) == "CANCELLED: no"
    assert values == {code: f"Error generating stream: {code.value}: no" for code in values}


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
        ({"text_input": text("x"), "image": text("AA==")}, "image: not supported yet"),
        ({"text_input": text("x"), "embedding_request": text("{}")}, "text_input: has no effect with"),
        ({"embedding_request": text("{")}, "embedding_request: not valid JSON"),
        ({"embedding_request": text("[]")}, "embedding_request=[]: must be a JSON object"),
        ({"embedding_request": text('{"input": "x"}'), "stream": flag(True)}, "stream=true: must be false with"),
    ],
)
def test_bad_tensors(tensors, reason):
    assert rejection(**tensors).startswith(reason)


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


@pytest.mark.parametrize("finish", [None, "stop"])
def test_a_response_has_the_requested_outputs_in_declared_types(finish):
    counts = {"return_finish_reason": flag(True), "return_num_input_tokens": flag(True)}
    call = read(text_input=text("x"), return_num_output_tokens=flag(True), **counts)
    part = SampleOutput("é", finish, [4, 5])
    outputs = write_response(call, [part], prompt_token_ids=[1, 2, 3])
    assert {name: value.tolist() for name, value in outputs.items()} == {
        "text_output": ["é".encode()],
        "finish_reason": [str(finish).encode()],
        "num_input_tokens": [3],
        "num_output_tokens": [2],
    }
    assert all(outputs[name].dtype == NUMPY_TYPES[OUTPUTS[name].data_type] for name in outputs)
    assert list(write_response(read(text_input=text("x")), [part], prompt_token_ids=[1, 2, 3])) == ["text_output"]


def test_token_ids_and_offsets_of_all_samples_are_concatenated():
    call = read(text_input=text("x"), return_token_ids=flag(True), return_text_offsets=flag(True))
    parts = [SampleOutput("ab", None, [4, 5], [0, 1]), SampleOutput("", None, [], [])]
    found = [write_response(call, parts, prompt_token_ids=[1, 2], first=first) for first in (True, False)]
    values = {name: value.tolist() for name, value in found[0].items() if name != "text_output"}
    assert values == {"token_ids": [4, 5], "prompt_token_ids": [1, 2], "text_offsets": [0, 1]}
    assert {value.dtype for name, value in found[0].items() if name != "text_output"} == {np.dtype(np.int32)}
    assert "prompt_token_ids" not in found[1]


ASKED = {"text_input": text("x"), "return_logprobs": flag(True), "return_cumulative_logprob": flag(True)}


def logprobs_of(call, values, sums, **options):
    parts = [
        SampleOutput("", None, [], logprobs=one, cumulative_logprob=total)
        for one, total in zip(values, sums, strict=True)
    ]
    outputs = write_response(call, parts, prompt_token_ids=[1], **options)
    assert all(outputs[name].dtype == NUMPY_TYPES[OUTPUTS[name].data_type] for name in outputs)
    return [json.loads(one) for one in outputs["logprobs"]], outputs["cumulative_logprob"].tolist()


def test_logprobs_are_formatted_like_the_vllm_backend():
    tokens = [(TokenLogprob(7, -2.5, 3), TokenLogprob(300, -0.5, 1)), (TokenLogprob(8, -0.25, 1),)]
    spelled, sums = logprobs_of(read(**ASKED), [tokens, []], [-2.75, 0.0], token_text=lambda token: f"é{token}")
    assert spelled == [
        [
            {
                "7": {"logprob": -2.5, "rank": 3, "decoded_token": "é7"},
                "300": {"logprob": -0.5, "rank": 1, "decoded_token": "é300"},
            },
            {"8": {"logprob": -0.25, "rank": 1, "decoded_token": "é8"}},
        ],
        [],
    ]
    assert list(spelled[0][0]) == ["7", "300"]
    assert sums == [-2.75, 0.0]


def test_logprobs_are_null_without_the_sampling_parameter():
    assert logprobs_of(read(**ASKED), [None, None], [-1.5, -2.5]) == ([None, None], [-1.5, -2.5])


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
