"""Tests of tools and structured outputs through the gateway, with a fake server."""

import json
from functools import partial

import jsonschema
import openai
import pytest

from client.openai.chat_schema import ChatRequest
from client.openai.tool_calls import ANY, FORMATS
from client.openai.tools import detect_format, tool_use
from tests.support.gateway import BODIES, CHAT, PROMPT, WAIT, error_of, gateway, recording_server, respond_with

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
TOOLS = [WEATHER, NOW]
STRICT = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = [
    "Let me ",
    "look.\n<tool",
    '_call>\n{"name": "weather", "argum',
    'ents": {"city": ',
    '"Paris"}}\n</tool_call>\n<tool_call>',
    '{"name": "now", "arguments": {}}</tool_call>',
]
ARGUMENTS = '{"city": "Paris"}'
CALLED = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def fake():
    with recording_server() as seen:
        yield seen


@pytest.fixture(scope="module")
def front(fake):
    with gateway(fake.url) as made:
        yield made


@pytest.fixture
def says(fake):
    return partial(respond_with, fake)


@pytest.fixture
def client(front):
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=WAIT) as made:
        yield made


class TestAnswers:
    def test_tool_calls_and_content(self, client, says):
        with says(say=["".join(CALLS)]):
            (choice,) = client.chat.completions.create(**CHAT, tools=TOOLS).choices
        assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
        calls = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("weather", ARGUMENTS),
            ("now", "{}"),
        ]
        assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
        assert len({call.id for call in calls}) == 2

    def test_streamed_tool_calls_work_with_openais_helper(self, client, says):
        with says(say=CALLS), client.chat.completions.stream(**CHAT, tools=[STRICT, NOW]) as stream:
            events = list(stream)
        (choice,) = stream.get_final_completion().choices
        assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
        (call,) = [call for call in choice.message.tool_calls if call.function.name == "weather"]
        assert (call.function.arguments, call.function.parsed_arguments) == (ARGUMENTS, {"city": "Paris"})
        pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
        assert len([piece for piece in pieces if piece]) > 1, "arguments come as they are written"

    def test_tool_call_delta_order(self, client, says):
        with says(say=CALLS):
            chunks = list(client.chat.completions.create(**CHAT, tools=TOOLS, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert [(call.index, call.function.name) for call in calls if call.id] == [(0, "weather"), (1, "now")]
        assert all(call.type == "function" for call in calls if call.id)
        assert "".join(call.function.arguments for call in calls if call.index == 0) == ARGUMENTS
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"

    def test_output_without_call_is_content(self, client, says):
        with says(say=["1 <", " 2 ", "<tool"]):
            (choice,) = client.chat.completions.create(**CHAT, tools=TOOLS).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
            "1 < 2 <tool",
            None,
            "stop",
        )

    @pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
    def test_tool_choice_none_does_not_parse_calls(self, client, says, fake, more):
        with says(say=["".join(CALLS)]):
            (choice,) = client.chat.completions.create(**CHAT, **more).choices
        assert (choice.message.content, choice.message.tool_calls) == ("".join(CALLS), None)
        assert "tools" not in fake.requests[-1]

    def test_parallel_tool_calls_false_returns_one_call(self, client, says):
        with says(say=CALLS):
            (choice,) = client.chat.completions.create(**CHAT, tools=TOOLS, parallel_tool_calls=False).choices
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_required_tool_choice_is_enforced_by_a_schema(self, client, says, fake, stream):
        said = json.dumps([{"name": "weather", "arguments": {"city": "Paris"}}])
        with says(say=[said[:20], said[20:40], said[40:]]):
            answer = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice="required", stream=stream)
            choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        messages = [choice.delta if stream else choice.message for choice in choices]
        calls = [call.function for message in messages for call in message.tool_calls or []]
        assert (calls[0].name, "".join(call.arguments for call in calls)) == ("weather", ARGUMENTS)
        assert not any(message.content for message in messages)
        assert choices[-1].finish_reason == "tool_calls"
        assert json.loads(fake.requests[-1]["tools"]) == TOOLS
        jsonschema.validate(json.loads(said), fake.sampling[-1]["json_schema"])

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("reason", ["length", "stop"])
    @pytest.mark.parametrize(
        ("choice", "said", "called"),
        [
            ("required", '[{"name": "weather", "arguments": {"ci', [("weather", '{"ci')]),
            ("required", '[{"name": "weather", "argu', [("weather", "")]),
            ("required", '[{"name": "weath', []),
            ("required", "[", []),
            ("required", '[{"name": "weather", "arguments": {\n\n"', [("weather", '{\n\n"')]),
            ("required", '[{"name": "now", "arguments": {}}, {"na', [("now", "{}")]),
            ("required", '[{"name": "now", "arguments": {}}, {"name": "now", "arg', [("now", "{}"), ("now", "")]),
            (NAMED, '{"city": "Pa', [("weather", '{"city": "Pa')]),
            (NAMED, "", [("weather", "")]),
        ],
    )
    def test_truncated_forced_call_is_not_content(self, front, says, choice, said, called, stream, reason):
        """It is truncated by max_tokens, or by a stop string."""
        body = CHAT | {"tools": TOOLS, "tool_choice": choice, "stream": stream}
        with says(say=[said[:9], said[9:]], reason=reason):
            answers = front.events(PATH, body) if stream else [front.ask(PATH, body)[1]]
        choices = [answer["choices"][0] for answer in answers]
        messages = [choice["delta" if stream else "message"] for choice in choices]
        assert [message["content"] for message in messages if "content" in message] == [None]
        streamed = {}
        for index, call in (one for message in messages for one in enumerate(message.get("tool_calls", []))):
            found = streamed.setdefault(call.get("index", index), ["", ""])
            found[0] += call["function"].get("name", "")
            found[1] += call["function"]["arguments"]
        assert [tuple(call) for call in streamed.values()] == called
        assert choices[-1]["finish_reason"] == reason

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("more", "said", "reason"),
        [
            ({}, '<tool_call>{"name": "weather", "arguments": {"ci', "stop"),
            ({}, '<tool_call>{"name": "weather", "arguments": {}', "tool_calls"),
            ({}, '[TOOL_CALLS]weather{"ci', "stop"),
            ({}, "<tool_call>{}</tool_call>", "stop"),
            ({"tool_choice": "required"}, '[{"name": "weather", "arguments": {}', "tool_calls"),
            ({"tool_choice": "required"}, '[{"name": "weather", "arguments": {}}, ', "tool_calls"),
            ({"parallel_tool_calls": False}, f'[{CALLED}, {{"name": "now", "arguments": {{"a', "tool_calls"),
        ],
    )
    def test_finish_reason_of_complete_and_truncated_calls(self, front, says, more, said, reason, stream):
        body = CHAT | {"tools": TOOLS, "stream": stream} | more
        with says(say=[said[:9], said[9:]]):
            answer = front.events(PATH, body)[-1] if stream else front.ask(PATH, body)[1]
        assert answer["choices"][0]["finish_reason"] == reason

    @pytest.mark.parametrize("stream", [False, True])
    def test_named_tool_choice(self, client, says, fake, stream):
        with says(say=['{"city": ', '"Paris"}']):
            answer = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=NAMED, stream=stream)
            choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        calls = [call.function for one in choices for call in (one.delta if stream else one.message).tool_calls or []]
        assert (calls[0].name, "".join(call.arguments for call in calls)) == ("weather", ARGUMENTS)
        assert fake.sampling[-1]["json_schema"] == CITY


def asks_for(arguments):
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}


class TestRequests:
    def test_tools_calls_and_results_are_passed_to_the_template(self, client, fake, says):
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        turns = [
            {"role": "user", "content": "How is it?", "name": "Ada"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Fine."}]},
        ]
        client.chat.completions.create(model="paged_llm", messages=turns, tools=TOOLS)
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

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"tools": [{"type": "function"}]}, "tools.0.function"),
            ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools.0.type"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
            ({"tools": [NOW, NOW]}, "tools.1.function.name"),
            ({"tool_choice": "auto"}, "tool_choice"),
            ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
            ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS}, "tool_choice"),
            ({"parallel_tool_calls": True}, "parallel_tool_calls"),
            ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
            ({"tools": TOOLS, "tool_choice": "required", "guided_json": {}}, "tools"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
            ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages.0.tool_call_id"),
            ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
            ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages.0.tool_calls"),
            *(
                ({"messages": [asks_for(arguments)]}, "messages.0.tool_calls.0.function.arguments")
                for arguments in ("[1]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": ' * 900 + "1" + "}" * 900)
            ),
        ],
    )
    def test_conflicting_fields_are_rejected(self, front, fields, named):
        status, body = front.ask(PATH, CHAT | fields)
        assert (status, error_of(status, body)["param"]) == (400, named)

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


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_unknown_template_accepts_any_format(template):
    assert detect_format(template) is ANY


def test_tool_parser_option(fake, says):
    with gateway(fake.url, "--tool-parser", "mistral") as front, says(say=["".join(CALLS)]):
        _, body = front.ask(PATH, CHAT | {"tools": TOOLS})
    assert body["choices"][0]["message"]["content"] == "".join(CALLS)
    assert fake.sampling[-1]["skip_special_tokens"] is False
