"""Conversations that call tools: what may be in one, and what the template gets of it."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from paged_backend.errors import RequestError
from paged_backend.frontend.conversation import MAX_TOOL_CALLS, MAX_TOOLS, MAX_TOOLS_CHARS
from paged_backend.frontend.templates import render
from tests.test_wire import read, refusal, text

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TURNS = [
    {"role": "user", "content": "How is it in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "Fine.", "tool_call_id": "c1"},
]


def sent(messages, **more):
    return {"messages": text(json.dumps(messages)), **{name: text(json.dumps(one)) for name, one in more.items()}}


def test_messages_and_tools_come_as_they_were_sent():
    call = read(**sent(TURNS, tools=[WEATHER]))
    assert (call.messages, call.tools) == (TURNS, [WEATHER])
    assert read(**sent(TURNS)).tools is None


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ({}, "tools: must be a JSON list"),
        ([1], "tools: must be a JSON list"),
        ([{"type": "function"}], "tools: must be a JSON list"),
        ([{"function": {"name": ""}}], "tools: must be a JSON list"),
        ([WEATHER] * (MAX_TOOLS + 1), f'tools="{MAX_TOOLS + 1} tools": must be at most {MAX_TOOLS}'),
        ([{"function": {"name": "a" * MAX_TOOLS_CHARS}}], f"must be at most {MAX_TOOLS_CHARS}"),
        ([{"function": {"name": "a", "description": "\ud800"}}], "tools: hold half a character"),
    ],
)
def test_what_are_no_tools_is_refused(tools, reason):
    assert reason in refusal(**sent(TURNS, tools=tools))


def test_tools_without_a_conversation_are_refused():
    assert "tools: have a meaning with messages only" in refusal(text_input=text("x"), tools=text("[]"))
    assert "tools: not valid JSON" in refusal(**sent(TURNS) | {"tools": text("[")})


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "assistant", "content": None}, "messages[0]: must have"),
        ({"role": "assistant", "tool_calls": []}, "messages[0]: must have"),
        ({"role": "assistant", "content": 1, "tool_calls": [CALL]}, "messages[0]: must have"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls: must be a list of at most"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls: must be a list of at most"),
        ({"role": "assistant", "tool_calls": [CALL] * (MAX_TOOL_CALLS + 1)}, "messages[0].tool_calls: must be"),
    ],
)
def test_what_is_no_call_is_refused(turn, reason):
    assert reason in refusal(**sent([turn]))


def test_the_template_gets_tools_and_calls():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}"
        "{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}"
        "{% endfor %};{% endfor %}"
    )
    turns = "user:How is it in Paris?;assistant:Paris;tool:Fine.;"
    assert render(tokenizer, TURNS, [WEATHER]) == "[weather]" + turns
    assert render(tokenizer, TURNS, None) == turns
    tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(RequestError, match="messages: the chat template refuses them: no tools here"):
        render(tokenizer, TURNS, [WEATHER])
