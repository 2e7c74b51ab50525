"""Request parameters: sampling parameters, headers, timeouts, sequences and request ids."""

import json

import pytest

from paged_backend.api.errors import RequestError
from paged_backend.server.wire.read import read_call
from tests.support.wire_requests import read, rejection, text


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
