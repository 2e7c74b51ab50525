"""Tests of the route /v1/embeddings with a fake server."""

import base64
import json
import struct

import pytest

from tests.support.gateway import gateway, recording_server

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def fake():
    """Return embeddings with the length of the input and its position among all requests."""
    with recording_server() as seen:

        def script(inputs):
            asked = json.loads(inputs["embedding_request"])
            if asked["input"] == "bad":
                return {"say": [], "fail": "INVALID_ARGUMENT: prompt_tokens=9: must be 1..8"}
            if asked["input"] == []:
                return {"say": [], "fail": "INVALID_ARGUMENT: embedding_request.input=[]: must be text"}
            if asked["input"] == [7]:
                return {"say": [], "fail": "INVALID_ARGUMENT: embedding_request.input[0]=7: must be a token id"}
            if asked["pooling_params"]:
                where = "embedding_request.pooling_params.dimensions=[2]"
                return {"say": [], "fail": f"INVALID_ARGUMENT: {where}: leave it out"}
            return {"say": [json.dumps([float(len(asked["input"])), 0.25])]}

        seen.scripted_response = script
        yield seen


@pytest.fixture(scope="module")
def front(fake):
    with gateway(fake.url) as made:
        yield made


def ask(front, **fields):
    return front.ask(PATH, {"model": "paged_llm", **fields})


def test_single_input(front, fake):
    fields = {"priority": 2, "cache_salt": "s", "timeout_ms": 9000, "truncate_prompt_tokens": 4,
              "add_special_tokens": False}  # fmt: skip
    status, body = ask(front, input="four", user="me", **fields)
    assert (status, body) == (200, {
        "object": "list",
        "model": "paged_llm",
        "data": [{"object": "embedding", "index": 0, "embedding": [4.0, 0.25]}],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    })  # fmt: skip
    assert json.loads(fake.requests[-1]["sampling_parameters"]) == fields


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        (["a", "bbb", "cc"], [1, 3, 2]),
        ([5, 6], [2]),
        ([[5, 6], [5], [8, 8, 8]], [2, 1, 3]),
        (["x" * (count % 90 + 1) for count in range(200)], [count % 90 + 1 for count in range(200)]),
    ],
    ids=["texts", "ids", "lists of ids", "more than are asked for at once"],
)
def test_inputs_keep_their_order(front, given, lengths):
    status, body = ask(front, input=given)
    assert status == 200
    assert [(one["index"], one["embedding"][0]) for one in body["data"]] == list(enumerate(map(float, lengths)))
    assert body["usage"]["prompt_tokens"] == 7 * len(lengths)


def test_the_model_is_optional(front):
    status, body = front.ask(PATH, {"input": "four"})
    assert (status, body["model"]) == (200, "paged_llm")


def test_base64_encoding(front):
    body = ask(front, input="four", encoding_format="base64")[1]
    assert struct.unpack("<2f", base64.b64decode(body["data"][0]["embedding"])) == (4.0, 0.25)
    assert ask(front, input="four", encoding_format="float")[1]["data"][0]["embedding"] == [4.0, 0.25]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "input", "input: is missing"),
        ({"input": 5}, "input", "input=5: "),
        ({"input": ["a", 5]}, "input", "input="),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format="),
        ({"input": "a", "dimensions": "2"}, "dimensions", "dimensions="),
        ({"input": ["a"] * 2049}, "input", "input: has 2049 inputs; must be at most 2048 (--max-inputs)"),
        ({"input": "bad"}, "input", "input: prompt_tokens=9: must be 1..8"),
        ({"input": []}, "input", "input=[]: must be text"),
        ({"input": ["bad"]}, "input[0]", "input[0]: prompt_tokens=9: must be 1..8"),
        ({"input": ["a", "bad", "c"]}, "input[1]", "input[1]: prompt_tokens=9: must be 1..8"),
        ({"input": [[5], [7]]}, "input[1]", "input[1][0]=7: must be a token id"),
        ({"input": "a", "dimensions": 2}, "dimensions", "dimensions=[2]: leave it out"),
    ],
)
def test_invalid_requests_are_rejected(front, fields, param, message):
    status, body = ask(front, **fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert body["error"]["message"].startswith(message)


def test_model_name_selects_an_adapter(front, fake):
    status, body = front.ask(PATH, {"model": "fr", "input": "a"})
    assert (status, body["model"]) == (200, "fr")
    assert json.loads(fake.requests[-1]["sampling_parameters"]) == {"lora_name": "fr"}


def test_an_unsafe_request_id_is_rejected_before_anything_is_computed(front, fake):
    asked = len(fake.requests)
    status, body = front.ask(PATH, {"model": "paged_llm", "input": "four"}, {"X-Request-Id": "a b"})
    assert (status, body["error"]["message"].split(":")[0]) == (400, "X-Request-Id")
    assert len(fake.requests) == asked
