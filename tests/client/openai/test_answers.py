"""Tool calls and digests in responses."""

import json

import jsonschema
import pytest

from tests.support.gateway import CHAT, PROMPT
from tests.support.openai_tools import ARGUMENTS, CALLED, CALLS, CITY, NAMED, NOW, PATH, STRICT, TOOLS


def test_tool_calls_and_content(client, says):
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


def test_streamed_tool_calls_work_with_openais_helper(client, says):
    with says(say=CALLS), client.chat.completions.stream(**CHAT, tools=[STRICT, NOW]) as stream:
        events = list(stream)
    (choice,) = stream.get_final_completion().choices
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    (call,) = [call for call in choice.message.tool_calls if call.function.name == "weather"]
    assert (call.function.arguments, call.function.parsed_arguments) == (ARGUMENTS, {"city": "Paris"})
    pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len([piece for piece in pieces if piece]) > 1, "arguments come as they are written"


def test_tool_call_delta_order(client, says):
    with says(say=CALLS):
        chunks = list(client.chat.completions.create(**CHAT, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls if call.id] == [(0, "weather"), (1, "now")]
    assert all(call.type == "function" for call in calls if call.id)
    assert "".join(call.function.arguments for call in calls if call.index == 0) == ARGUMENTS
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


def test_output_without_call_is_content(client, says):
    with says(say=["1 <", " 2 ", "<tool"]):
        (choice,) = client.chat.completions.create(**CHAT, tools=TOOLS).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        "1 < 2 <tool",
        None,
        "stop",
    )


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_tool_choice_none_does_not_parse_calls(client, says, fake, more):
    with says(say=["".join(CALLS)]):
        (choice,) = client.chat.completions.create(**CHAT, **more).choices
    assert (choice.message.content, choice.message.tool_calls) == ("".join(CALLS), None)
    assert "tools" not in fake.requests[-1]


def test_parallel_tool_calls_false_returns_one_call(client, says):
    with says(say=CALLS):
        (choice,) = client.chat.completions.create(**CHAT, tools=TOOLS, parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]


@pytest.mark.parametrize("stream", [False, True])
def test_required_tool_choice_is_enforced_by_a_schema(client, says, fake, stream):
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
def test_truncated_forced_call_is_not_content(front, says, choice, said, called, stream, reason):
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
def test_finish_reason_of_complete_and_truncated_calls(front, says, more, said, reason, stream):
    body = CHAT | {"tools": TOOLS, "stream": stream} | more
    with says(say=[said[:9], said[9:]]):
        answer = front.events(PATH, body)[-1] if stream else front.ask(PATH, body)[1]
    assert answer["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("stream", [False, True])
def test_named_tool_choice(client, says, fake, stream):
    with says(say=['{"city": ', '"Paris"}']):
        answer = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=NAMED, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    calls = [call.function for one in choices for call in (one.delta if stream else one.message).tool_calls or []]
    assert (calls[0].name, "".join(call.arguments for call in calls)) == ("weather", ARGUMENTS)
    assert fake.sampling[-1]["json_schema"] == CITY


def test_digests_of_all_choices_are_returned(client, says, fake):
    """In the chunk of a stream that has the usage."""
    asked = {"extra_body": {"logits_digest": True}}
    with says(say=["a"], receipt=json.dumps({"cached_tokens": 0, "logits_digests": ["d1"]})):
        whole = client.completions.create(model="paged_llm", prompt=["x", "y"], **asked)
        chunks = list(
            client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}, **asked)
        )
    assert json.loads(fake.requests[-1]["sampling_parameters"])["logits_digest"] is True
    assert whole.logits_digests == ["d1", "d1"]
    assert [getattr(chunk, "logits_digests", None) for chunk in chunks][-1] == ["d1"]
    with says(say=["a"], receipt=json.dumps({"cached_tokens": 0})):
        assert not hasattr(client.completions.create(**PROMPT), "logits_digests")
