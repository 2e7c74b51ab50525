"""Conversations with tools: checks, limits, and chat templates."""

import json
import shutil
import threading

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from paged_backend.api.errors import RequestError
from paged_backend.api.limits import InputLimits
from paged_backend.text import templates
from paged_backend.text.templates import check_template, render
from tests.support.callers import Caller, serving
from tests.support.in_process import WAIT
from tests.support.wire_requests import read, rejection, text

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TURNS = [
    {"role": "user", "content": "How is it in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "Fine.", "tool_call_id": "c1"},
]


def sent(messages, **more):
    return {"messages": text(json.dumps(messages)), **{name: text(json.dumps(one)) for name, one in more.items()}}


def test_messages_and_tools_are_passed_through():
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
        (
            [WEATHER] * (InputLimits.max_tools + 1),
            f'tools="{InputLimits.max_tools + 1} tools": must be at most {InputLimits.max_tools}',
        ),
        ([{"function": {"name": "a" * InputLimits.max_tools_chars}}], f"must be at most {InputLimits.max_tools_chars}"),
        ([{"function": {"name": "a", "description": "\ud800"}}], "tools: contain a lone surrogate"),
    ],
)
def test_invalid_tools_are_rejected(tools, reason):
    assert reason in rejection(**sent(TURNS, tools=tools))


def test_tools_without_messages_are_rejected():
    assert "tools: only supported together with messages" in rejection(text_input=text("x"), tools=text("[]"))
    assert "tools: not valid JSON" in rejection(**sent(TURNS) | {"tools": text("[")})


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "assistant", "content": None}, "messages[0]: must have"),
        ({"role": "assistant", "tool_calls": []}, "messages[0]: must have"),
        ({"role": "assistant", "content": 1, "tool_calls": [CALL]}, "messages[0]: must have"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls: must be a list of objects"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls: must be a list of objects"),
        ({"role": "assistant", "tool_calls": [CALL] * (InputLimits.max_tool_calls + 1)}, "messages[0].tool_calls="),
    ],
)
def test_invalid_tool_calls_are_rejected(turn, reason):
    assert reason in rejection(**sent([turn]))


def test_conversation_limits_are_enforced():
    limit = f'messages="{InputLimits.max_messages + 1} messages": must be at most {InputLimits.max_messages}'
    assert limit in rejection(**sent([{"role": "user", "content": ""}] * (InputLimits.max_messages + 1)))
    large = text("[" * (InputLimits.max_json_chars + 1))  # invalid JSON
    limit = f'="{InputLimits.max_json_chars + 1} characters": must be at most {InputLimits.max_json_chars}'
    assert f"messages{limit}" in rejection(messages=large)
    assert f"tools{limit}" in rejection(**sent(TURNS) | {"tools": large})
    assert f"sampling_parameters{limit}" in rejection(text_input=text("x"), sampling_parameters=large)
    assert f"embedding_request{limit}" in rejection(embedding_request=large)


def test_a_session_over_max_messages_is_rejected(tiny, tmp_path):
    """Each turn is within the limit, but all of them together exceed it."""
    shutil.copytree(tiny[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
    turns = json.dumps([{"role": "user", "content": "x"}] * 2)

    def sent_turn(server, **parameters):
        caller = Caller(messages=turns, sampling_parameters='{"max_tokens": 1}')
        caller.parameters = lambda: json.dumps({"sequence_id": 7} | parameters)
        server.service.submit(caller)
        return caller

    with serving(tmp_path, max_messages=3) as server:
        sent_turn(server, sequence_start=True).all()
        assert 'messages="5 messages": must be at most 3' in sent_turn(server).rejection()


def with_template(template):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    tokenizer.chat_template = template
    return tokenizer


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
CUBIC = "{% for a in m %}{% for b in m %}{% for c in m %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template", [ENDLESS + "{% endfor %}", "{% set m = messages[0].content %}" + CUBIC], ids=["by itself", "by a text"]
)
def test_a_template_that_does_not_terminate_is_stopped(template):
    reason = r"messages: the chat template does not end within 0\.2 s on them \(chat_template_timeout\)"
    with pytest.raises(RequestError, match=reason):
        render(with_template(template), [{"role": "user", "content": "x" * 10_000}], None, 0.2)
    for thread in threading.enumerate():
        if thread.name == "template":
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("template", "seconds", "reason"),
    [
        ("{% if %}", WAIT, "is not valid Jinja: line 1"),
        (ENDLESS + "{% endfor %}", 0.2, r"does not end within 0\.2 s \(chat_template_timeout\)"),
        ("x" * (templates.MAX_TEMPLATE_CHARS + 1), WAIT, "must be a text of at most"),
        ({"default": "x", "tools": 5}, WAIT, "must be a text of at most"),
    ],
)
def test_an_unusable_template_is_rejected_at_load(template, seconds, reason):
    with pytest.raises(ValueError, match=reason):
        check_template(with_template(template), seconds)


@pytest.mark.parametrize("template", [None, "x", "{{ raise_exception('two turns, please') }}", "{{ messages[1].x }}"])
def test_a_template_that_rejects_the_probe_is_accepted(template):
    check_template(with_template(template), WAIT)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_are_sandboxed(template):
    with pytest.raises(RequestError, match="messages: the chat template refuses them"):
        render(with_template(template), TURNS[:1], None, WAIT)


def test_the_template_receives_tools_and_tool_calls():
    tokenizer = with_template(
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}"
        "{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}"
        "{% endfor %};{% endfor %}"
    )
    turns = "user:How is it in Paris?;assistant:Paris;tool:Fine.;"
    assert render(tokenizer, TURNS, [WEATHER], WAIT) == "[weather]" + turns
    assert render(tokenizer, TURNS, None, WAIT) == turns
    tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(RequestError, match="messages: the chat template refuses them: no tools here"):
        render(tokenizer, TURNS, [WEATHER], WAIT)
