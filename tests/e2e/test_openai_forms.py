"""Structured outputs and forced tool calls of a real model through the `openai` package."""

import json
import re
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.support.gateway import gateway
from tests.support.waiting import WAIT

MODEL = "paged_llm"
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "How is the weather in Paris?"}], "temperature": 0}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather in a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER = {"type": "function", "function": {"name": "weather"}}


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    big: bool


@pytest.fixture(scope="module")
def client(demo_server):
    with gateway(demo_server.grpc_url) as front, openai.OpenAI(base_url=f"{front.url}/v1", api_key="none") as made:
        yield made.with_options(max_retries=0, timeout=WAIT)


def calls_of(choices, stream):
    """Return [(name, arguments)] from a message or from deltas, and the finish reason."""
    calls = {}
    for choice in choices:
        for index, call in enumerate((choice.delta if stream else choice.message).tool_calls or []):
            found = calls.setdefault(call.index if stream else index, ["", ""])
            found[0] += call.function.name or ""
            found[1] += call.function.arguments or ""
    return [tuple(call) for call in calls.values()], choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_call_has_valid_arguments(client, stream):
    answer = client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=WEATHER, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    ((name, arguments),), reason = calls_of(choices, stream)
    assert (name, reason) == ("weather", "tool_calls")
    jsonschema.validate(json.loads(arguments), CITY)


@pytest.mark.parametrize("stream", [False, True])
def test_required_tool_calls_have_valid_arguments(client, stream):
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 2, "seed": 3}
    answer = client.chat.completions.create(**ASKED | {"temperature": 1}, **asked, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    for index in range(2):
        (call,), reason = calls_of([choice for choice in choices if choice.index == index], stream)
        assert reason == "tool_calls"
        assert call[0] in ("weather", "now")
        jsonschema.validate(json.loads(call[1]), CITY if call[0] == "weather" else {"const": {}})


def test_output_parses_as_the_requested_pydantic_model(client):
    answer = client.chat.completions.parse(**ASKED, response_format=City)
    assert answer.choices[0].message.parsed.name in ("Paris", "Rome")


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 200}, lambda text: json.loads(text) is not None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}},
            lambda text: jsonschema.validate(json.loads(text), CITY) is None,
        ),
        ({"extra_body": {"guided_regex": "[a-c]{3,5}"}}, re.compile("[a-c]{3,5}").fullmatch),
        ({"extra_body": {"guided_choice": ["yes", "no"]}}, ("yes", "no").__contains__),
        ({"extra_body": {"guided_json": CITY}}, lambda text: "city" in json.loads(text)),
        ({"extra_body": {"guided_grammar": 'root ::= "a" | "b"'}}, ("a", "b").__contains__),
        ({"extra_body": {"structured_outputs": {"choice": ["left", "right"]}}}, ("left", "right").__contains__),
    ],
)
def test_output_has_the_requested_format(client, asked, fits, stream):
    answer = client.chat.completions.create(**ASKED, **asked, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    assert choices[-1].finish_reason == "stop", text
    assert fits(text), text


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}},
            "response_format",
        ),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ({"extra_body": {"regex": "(", "json_object": True}}, None),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_an_invalid_format_is_rejected_by_its_openai_name(client, asked, param):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**ASKED, **asked, max_tokens=5)
    assert param is None or raised.value.param == param
