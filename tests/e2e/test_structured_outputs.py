"""Structured outputs of a real model: JSON fields, parameters, and the client library."""

import json
import re

import numpy as np
import pytest

from paged_client import Client, PagedError
from tests.support.grammars import SLOW
from tests.support.triton import idle, post, raw_stream

PROMPT = "Alice is 30 years old and lives in Paris. As JSON: "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["London", "Paris", "Rome"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
GREEDY = {"temperature": 0, "max_tokens": 96, "exclude_input_in_output": True}


def generated(demo_server, **inputs):
    status, body = post(demo_server, {"text_input": PROMPT, **GREEDY, **inputs})
    assert status == 200, body
    return json.loads(body)["text_output"]


def check(text):
    """Check an answer against the schema. Which age it has may depend on the rounding of a processor."""
    value = json.loads(text)
    assert list(value) == ["name", "age", "city"]
    assert 0 <= value["age"] <= 150
    assert value["city"] in SCHEMA["properties"]["city"]["enum"]
    return value


def test_structured_output_tensors_over_http(demo_server):
    check(generated(demo_server, json_schema=json.dumps(SCHEMA)))
    assert isinstance(json.loads(generated(demo_server, json_object=True, max_tokens=400)), dict)
    assert re.fullmatch(DATE, generated(demo_server, regex=DATE))
    assert generated(demo_server, choice=["red apples", "Rome"]) in ("red apples", "Rome")
    assert re.fullmatch(r"\d+(\+\d+)?", generated(demo_server, grammar='root ::= num ("+" num)?\nnum ::= [0-9]{1,3}'))
    asked = json.dumps({"structured_outputs": {"json": SCHEMA, "regex": None}})
    check(generated(demo_server, sampling_parameters=asked))
    check(generated(demo_server, sampling_parameters=json.dumps({"structured_outputs": json.dumps({"json": SCHEMA})})))
    idle(demo_server)


def test_special_tokens_in_a_grammar_are_generated(demo_server):
    said = generated(demo_server, grammar='start: "yes" <|im_start|> /[a-z]{3}/ <[4]>', skip_special_tokens=False)
    assert re.fullmatch(r"yes<\|im_start\|>[a-z]{3}<reponame>", said)
    status, body = post(demo_server, {"text_input": PROMPT, "grammar": "start: <|nope|>"})
    assert (status, 'unknown special token: \\"<|nope|>\\"' in body) == (400, True), body


def test_disable_any_whitespace(demo_server):
    asked = {"json": SCHEMA, "disable_any_whitespace": True}
    said = generated(demo_server, sampling_parameters=json.dumps({"structured_outputs": asked}))
    assert said == json.dumps(check(said), separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"regex": "(a"}, "INVALID_ARGUMENT: regex: "),
        ({"json_schema": "{"}, 'json_schema="{": is not valid JSON'),
        ({"json_schema": '{"uniqueItems": true}'}, "json_schema: Unimplemented keys"),
        ({"regex": "a", "json_object": True}, "json_object and regex: each sets the form of the output; give one"),
        ({"regex": "a", "sampling_parameters": '{"regex": "b"}'}, "regex: is both a tensor and a sampling parameter"),
        ({"regex": "a", "beam_width": 2}, "beam_width=2: must be 1 with regex"),
    ],
)
def test_invalid_structures_are_rejected(demo_server, inputs, reason):
    status, body = post(demo_server, {"text_input": PROMPT, **inputs})
    assert status == 400
    assert reason in json.loads(body)["error"]


def test_streamed_guided_samples_with_logprobs_over_grpc(demo_server):
    with raw_stream(demo_server) as stream:
        stream.send(
            text_input=PROMPT, stream=True, return_finish_reason=True, return_logprobs=True, json_schema=SCHEMA,
            sampling_parameters={"max_tokens": 120, "n": 3, "temperature": 1.2, "seed": 4, "logprobs": 1},
        )  # fmt: skip
        responses = stream.all()
    texts = [b"".join(one.outputs["text_output"][sample] for one in responses if one.outputs) for sample in range(3)]
    assert len(responses) > 3
    assert responses[-1].outputs["finish_reason"] == [b"stop"] * 3
    for text in texts:
        check(text)


def test_grammar_compilation_does_not_block_others_and_can_be_cancelled(demo_server):
    with raw_stream(demo_server) as slow, raw_stream(demo_server) as stream:
        slow.send(text_input=PROMPT, json_schema=SLOW)
        stream.send(
            text_input=PROMPT, choice=np.array([b"one", b"two"], dtype=np.object_), exclude_input_in_output=True
        )
        (answer,) = stream.all()
        assert answer.text in ("one", "two")
        assert slow.responses.empty()
        slow.cancel()
    idle(demo_server)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_structured_outputs_in_the_client_library(demo_server, protocol):
    url = {"grpc": demo_server.grpc_url, "http": demo_server.http_url}[protocol]
    with Client(url, protocol=protocol) as client:
        answer = client.generate(PROMPT, json_schema=SCHEMA, temperature=0, max_tokens=96)
        assert answer.finish_reason == "stop"
        check(answer.text)
        with client.stream(PROMPT, choice=["Paris", "Rome"], temperature=0) as stream:
            assert "".join(delta.text for delta in stream) in ("Paris", "Rome")
        with pytest.raises(PagedError, match="regex: ") as raised:
            client.generate(PROMPT, regex="(")
    assert raised.value.code == "INVALID_ARGUMENT"
