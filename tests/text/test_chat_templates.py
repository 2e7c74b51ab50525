"""Rendering of chat templates: their time limit, the sandbox, and what they get."""

import threading

import pytest

from paged_backend.api.errors import RequestError
from paged_backend.text import chat_templates
from paged_backend.text.templates import render
from tests.support.conversations import TURNS, WEATHER
from tests.support.in_process import WAIT
from tests.support.tokenizers import ENDLESS, with_template

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


@pytest.mark.parametrize(
    ("flags", "prompt"),
    [
        ({}, "user:a;assistant:b;assistant:"),
        ({"add_generation_prompt": False}, "user:a;assistant:b;"),
        ({"continue_final_message": True}, "user:a;assistant:b"),
    ],
)
def test_flags_say_how_the_prompt_ends(flags, prompt):
    tokenizer = with_template(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert render(tokenizer, turns, None, WAIT, flags) == prompt


def test_the_template_receives_tools_tool_calls_and_variables():
    tokenizer = with_template(
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}"
        "{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}"
        "{% endfor %};{% endfor %}"
    )
    turns = "user:How is it in Paris?;assistant:Paris;tool:Fine.;"
    assert render(tokenizer, TURNS, [WEATHER], WAIT) == "[weather]" + turns
    assert render(tokenizer, TURNS, None, WAIT) == turns
    thinking = "{{ 'off' if enable_thinking is defined and not enable_thinking else 'on' }}"
    tokenizer.chat_template = thinking
    assert render(tokenizer, TURNS, None, WAIT) == "on"
    assert render(tokenizer, TURNS, None, WAIT, {"enable_thinking": False, "unused": 1}) == "off"
    tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(RequestError, match="messages: the chat template refuses them: no tools here"):
        render(tokenizer, TURNS, [WEATHER], WAIT)


@pytest.mark.parametrize(
    ("template", "all_of_them", "default"),
    [
        (None, [], None),
        ("one", ["one"], "one"),
        ({"default": "one", "tool_use": "two"}, ["one", "two"], "one"),
        ({"rag": "three"}, ["three"], None),
    ],
)
def test_templates_with_names(template, all_of_them, default):
    tokenizer = with_template(template)
    assert chat_templates.sources(tokenizer) == all_of_them
    assert chat_templates.default_source(tokenizer) == default
