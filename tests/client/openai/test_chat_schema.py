"""Messages and tools of chat requests, and what is rejected."""

import json
from typing import ClassVar

import jsonschema
import pytest

from tests.support.gateway import CHAT, error_of, gateway
from tests.support.openai_tools import ARGUMENTS, CITY, NOW, PATH, TOOLS


@pytest.fixture(scope="module")
def front(fake):
    with gateway(fake.url) as made:
        yield made


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def asks_for(arguments):
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, 'images are not supported (type "image_url"); send text'),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio is not supported"),
        ({"type": "file", "file": {"file_id": "x"}}, "files are not supported"),
        ({"type": "image" * 1000}, "images are not supported"),
    ],
)
def test_media_are_rejected_by_name(front, part, reason):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
    status, body = front.ask(PATH, CHAT | {"messages": messages})
    error = error_of(status, body)
    assert (status, error["param"]) == (400, "messages.1.content.1")
    assert error["message"].startswith(f"messages.1.content.1: {reason}") and len(error["message"]) < 200


def test_output_is_text(front):
    assert front.ask(PATH, CHAT | {"modalities": ["text"], "audio": None})[0] == 200
    status, body = front.ask(PATH, CHAT | {"modalities": ["text", "audio"], "audio": {"voice": "x", "format": "wav"}})
    assert (status, error_of(status, body)["param"]) == (400, "modalities")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [NOW, NOW]}, "tools.1.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": allowed("auto", "f"), "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": allowed("none", "now"), "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_json": {}}, "tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [asks_for("{}") | {"role": "user", "content": "x"}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages.0.tool_calls"),
    ],
)
def test_conflicting_fields_are_rejected(front, fields, named):
    status, body = front.ask(PATH, CHAT | fields)
    assert (status, error_of(status, body)["param"]) == (400, named)


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('{"a": 1, "city": "Par', {"a": 1, "city": "Par"}),  # cut by max_tokens
        ('{"city":', {}),
        ("", {}),
        *((text, {"arguments": text}) for text in ("[1]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": ' * 900 + "1}")),
    ],
)
def test_arguments_in_the_history_may_be_malformed(front, fake, written, sent):
    assert front.ask(PATH, CHAT | {"messages": [*CHAT["messages"], asks_for(written), *CHAT["messages"]]})[0] == 200
    _, asked, _ = json.loads(fake.requests[-1]["messages"])
    assert asked["tool_calls"][0]["function"]["arguments"] == sent


def test_messages_of_other_servers(front, fake):
    cached = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "critic", "content": [cached, {"type": "input_text", "text": "y"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "annotations": [], "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": "no", "audio": None},
    ]
    assert front.ask(PATH, CHAT | {"messages": messages})[0] == 200
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert json.loads(fake.requests[-1]["messages"]) == [
        {"role": "critic", "content": "xy"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "auto"},
        {"parallel_tool_calls": True},
        {"tools": [], "tool_choice": "none"},
        {"logprobs": "true", "top_logprobs": 1},
        {"logprobs": False, "top_logprobs": 0},
    ],
)
def test_fields_without_effect_or_as_strings(front, fields):
    assert front.ask(PATH, CHAT | fields)[0] == 200


def test_variables_of_the_chat_template(front, fake):
    fields = {"reasoning_effort": "low", "add_generation_prompt": False, "continue_final_message": True}
    assert front.ask(PATH, CHAT | fields)[0] == 200
    assert json.loads(fake.requests[-1]["chat_template_kwargs"]) == fields
    assert front.ask(PATH, CHAT | fields | {"chat_template_kwargs": {"reasoning_effort": "high"}})[0] == 200
    assert json.loads(fake.requests[-1]["chat_template_kwargs"]) == fields | {"reasoning_effort": "high"}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_message_that_is_continued(front, says, stream):
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Once"}]
    for sent, text in ((messages, "Once upon"), (CHAT["messages"], " upon")):
        body = CHAT | {"messages": sent, "echo": True, "stream": stream}
        with says(say=[" up", "on"]):
            answer = front.events(PATH, body) if stream else [front.ask(PATH, body)[1]]
        parts = [one["choices"][0]["delta" if stream else "message"] for one in answer]
        assert "".join(part.get("content") or "" for part in parts) == text


class TestToolsWithAFormat:
    """The output is an answer in the response_format, or calls."""

    ASKED: ClassVar = CHAT | {
        "tools": TOOLS,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"$defs": {"c": CITY}, "$ref": "#/$defs/c"}},
        },
    }

    def test_schema(self, front, fake):
        assert front.ask(PATH, self.ASKED)[0] == 200
        schema = fake.sampling[-1]["json_schema"]
        for good in ({"city": "x"}, [{"name": "weather", "arguments": {"city": "x"}}]):
            jsonschema.validate(good, schema)
        for bad in ({}, [], [{"name": "weather", "arguments": {}}], "x"):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(bad, schema)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("text", "content", "calls", "reason"),
        [
            ('{"city": "Rome"}', '{"city": "Rome"}', [], "stop"),
            (f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]', "", ["weather"], "tool_calls"),
        ],
    )
    def test_output(self, front, says, text, content, calls, reason, stream):
        with says(say=[text[:9], text[9:]]):
            body = self.ASKED | {"stream": stream}
            answer = front.events(PATH, body) if stream else [front.ask(PATH, body)[1]]
        choices = [one["choices"][0] for one in answer]
        parts = [one["delta" if stream else "message"] for one in choices]
        assert "".join(part.get("content") or "" for part in parts) == content
        called = [call for part in parts for call in part.get("tool_calls", ())]
        assert [call["function"]["name"] for call in called if "name" in call["function"]] == calls
        assert choices[-1]["finish_reason"] == reason


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(front, fake, mode):
    assert front.ask(PATH, CHAT | {"tools": TOOLS, "tool_choice": allowed(mode, "now")})[0] == 200
    assert json.loads(fake.requests[-1]["tools"]) == [NOW]
    assert ("json_schema" in fake.sampling[-1]) == (mode == "required")
