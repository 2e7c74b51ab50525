"""Tools and structured outputs: schemas, tool formats, and what is passed to the engine."""

import json

import jsonschema
import pytest

from paged_client.openai.chat_schema import ChatRequest
from paged_client.openai.tool_calls import ANY, FORMATS
from paged_client.openai.tools import detect_format, tool_use
from tests.support.gateway import BODIES, CHAT, PROMPT, error_of, gateway
from tests.support.openai_tools import ARGUMENTS, CALLS, CITY, PATH, TOOLS
from tests.support.tokenizers import TEMPLATE, write_tokenizer


class TestRequests:
    def test_tools_calls_and_results_are_passed_to_the_template(self, client, fake, says):
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        turns = [
            {"role": "user", "content": "How is it?", "name": "Ada"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Fine."}]},
        ]
        more = {"chat_template_kwargs": {"enable_thinking": False}}
        client.chat.completions.create(model="paged_llm", messages=turns, tools=TOOLS, extra_body=more)
        assert json.loads(fake.requests[-1]["messages"]) == [
            turns[0],
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call | {"function": {"name": "weather", "arguments": {"city": "Paris"}}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "Fine."},
        ]
        assert json.loads(fake.requests[-1]["tools"]) == TOOLS
        assert json.loads(fake.requests[-1]["chat_template_kwargs"]) == more["chat_template_kwargs"]
        assert "chat_template_kwargs" not in fake.sampling[-1]

    def test_schema_errors_name_the_tools(self, front, says):
        with says(say=[], fail="INVALID_ARGUMENT: json_schema={}: is none"):
            _, body = front.ask(PATH, CHAT | {"tools": TOOLS, "tool_choice": "required"})
        assert body["error"]["param"] == "tools"


SCHEMA = {"name": "city", "schema": CITY, "strict": True}


class TestForms:
    @pytest.mark.parametrize("path", BODIES)
    @pytest.mark.parametrize(
        ("asked", "sent"),
        [
            ({"response_format": {"type": "json_object"}}, {"json_object": True}),
            ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, {"json_schema": CITY}),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
                {"json_schema": {"type": "object"}},
            ),
            ({"guided_json": CITY}, {"json_schema": CITY}),
            ({"guided_json": "{}"}, {"json_schema": "{}"}),
            ({"guided_regex": "a+"}, {"regex": "a+"}),
            ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
            ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
            ({"structured_outputs": {"regex": "a"}}, {"structured_outputs": {"regex": "a"}}),
            ({"json_schema": CITY, "regex": "a"}, {"json_schema": CITY, "regex": "a"}),  # the engine's to judge
        ],
    )
    def test_output_constraints_are_passed_to_the_engine(self, front, fake, path, asked, sent):
        assert front.ask(path, BODIES[path] | asked)[0] == 200
        assert fake.sampling[-1].items() >= sent.items()
        assert fake.sampling[-1].keys() - {"max_tokens"} == sent.keys()

    @pytest.mark.parametrize(
        ("asked", "named"),
        [
            ({"response_format": {"type": "xml"}}, "response_format.type"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            ({"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format.json_schema"),
            ({"response_format": {"type": "json_object"}, "json_object": True}, "response_format"),
            ({"guided_regex": "a", "regex": "a"}, "guided_regex"),
        ],
    )
    def test_conflicting_fields_are_rejected(self, front, asked, named):
        status, body = front.ask("/v1/completions", PROMPT | asked)
        assert (status, error_of(status, body)["param"]) == (400, named)


def test_required_call_schema():
    nested = {"$defs": {"place": CITY}, "type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}}
    visit = {"type": "function", "function": {"name": "visit", "parameters": nested}}
    request = ChatRequest(**CHAT, tools=[*TOOLS, visit], tool_choice="required", parallel_tool_calls=False)
    schema = tool_use(request, ANY).schema
    for good in (
        {"name": "visit", "arguments": {"at": {"city": "x"}}},
        {"name": "now", "arguments": {}},
        {"name": "weather", "arguments": {"city": "x"}},
    ):
        jsonschema.validate([good], schema)
    for bad in (
        [],
        [{"name": "now", "arguments": {}}] * 2,
        [{"name": "visit", "arguments": {"at": {}}}],
        [{"name": "now", "arguments": {"a": 1}}],
        [{"name": "other", "arguments": {}}],
        [{"name": "weather", "arguments": {}}],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


@pytest.mark.parametrize(
    ("template", "name"),
    [("…<tool_call>…", "hermes"), ("…[TOOL_CALLS]…", "mistral"), ("…<|python_tag|>…", "llama3_json")],
)
def test_format_is_detected_from_the_template(template, name):
    assert detect_format(template) is FORMATS[name]


def test_a_gateway_detects_the_format_from_its_tokenizers_template(fake, says, tmp_path):
    """A call in another format is text."""
    directory = write_tokenizer(tmp_path, TEMPLATE + "{# [TOOL_CALLS] #}")
    with gateway(fake.url, "--tokenizer", str(directory)) as front, says(say=CALLS):
        message = front.ask(PATH, CHAT | {"tools": TOOLS})[1]["choices"][0]["message"]
    assert message["content"] == "".join(CALLS)
    assert not message.get("tool_calls")


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_unknown_template_accepts_any_format(template):
    assert detect_format(template) is ANY


def test_tool_parser_option(fake, says):
    with gateway(fake.url, "--tool-parser", "mistral") as front, says(say=["".join(CALLS)]):
        _, body = front.ask(PATH, CHAT | {"tools": TOOLS})
    assert body["choices"][0]["message"]["content"] == "".join(CALLS)
    assert fake.sampling[-1]["skip_special_tokens"] is False
