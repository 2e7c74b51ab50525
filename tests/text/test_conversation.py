"""Conversations with tools: what is passed on, and what is rejected."""

import inspect
import json
import shutil

import pytest
from transformers import PreTrainedTokenizerBase

from paged_backend.api.limits import InputLimits
from paged_backend.text.conversation import RESERVED_TEMPLATE_VARIABLES, TEMPLATE_FLAGS
from tests.support.callers import Caller, serving
from tests.support.conversations import CALL, TURNS, WEATHER
from tests.support.wire_requests import read, rejection, text


def sent(messages, **more):
    return {"messages": text(json.dumps(messages)), **{name: text(json.dumps(one)) for name, one in more.items()}}


def test_messages_and_tools_are_passed_through():
    call = read(**sent(TURNS, tools=[WEATHER]))
    assert (call.messages, call.tools, call.template_variables) == (TURNS, [WEATHER], None)
    assert read(**sent(TURNS)).tools is None
    assert read(**sent([{"role": "r" * 64, "content": "a"}])).messages[0]["role"] == "r" * 64
    assert read(**sent(TURNS, chat_template_kwargs={"a": [1]})).template_variables == {"a": [1]}


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


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, 'images are not supported (type "image_url"); send text'),
        ({"type": "image"}, "images are not supported"),
        ({"image_url": "x"}, "images are not supported"),
        ({"type": "input_audio"}, "audio is not supported"),
        ({"type": "video_url"}, "video is not supported"),
        ({"type": "file"}, "files are not supported"),
    ],
)
def test_media_are_rejected_by_name(part, reason):
    turn = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}
    assert f"messages[0].content[1]: {reason}" in rejection(**sent([turn]))


def test_list_of_texts_is_rejected():
    turn = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert "messages[0].content: must be a string, not a list" in rejection(**sent([turn]))


def test_tools_without_messages_are_rejected():
    assert "tools: only supported together with messages" in rejection(text_input=text("x"), tools=text("[]"))
    assert "tools: not valid JSON" in rejection(**sent(TURNS) | {"tools": text("[")})


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ([], 'chat_template_kwargs: must be a JSON object like {"enable_thinking": false}'),
        ("x", "chat_template_kwargs: must be a JSON object"),
        ({"x": "a" * InputLimits.max_tools_chars}, "(max_tools_chars)"),
        ({"x": "\ud800"}, "chat_template_kwargs: contain a lone surrogate"),
        ({"add_generation_prompt": "no"}, 'chat_template_kwargs: add_generation_prompt="no": must be true or false'),
        (dict.fromkeys(TEMPLATE_FLAGS, True), "add_generation_prompt and continue_final_message cannot both be true"),
    ],
)
def test_invalid_template_variables_are_rejected(variables, reason):
    assert reason in rejection(**sent(TURNS, chat_template_kwargs=variables))


@pytest.mark.parametrize("name", RESERVED_TEMPLATE_VARIABLES)
def test_reserved_template_variables_are_rejected_by_name(name):
    assert rejection(**sent(TURNS, chat_template_kwargs={"enable_thinking": False, name: 1})) == (
        f"chat_template_kwargs: {name}: is set by the server; leave it out"
    )


def test_all_arguments_of_transformers_but_variables_are_reserved():
    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    assert arguments - set(RESERVED_TEMPLATE_VARIABLES) - set(TEMPLATE_FLAGS) <= {"documents", "kwargs"}


def test_template_variables_without_messages_are_rejected():
    reason = "chat_template_kwargs: only supported together with messages"
    assert reason in rejection(text_input=text("x"), chat_template_kwargs=text("{}"))
    assert "chat_template_kwargs: not valid JSON" in rejection(**sent(TURNS) | {"chat_template_kwargs": text("{")})


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


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "<|im_end|>"}, 'messages[0].role="<|im_end|>": must be 1..64 letters, digits, _ and -'),
        ({"role": "user\n"}, "messages[0].role="),
        ({"role": "r" * 65}, "messages[0].role="),
        ({"role": ""}, "messages[0].role="),
        ({"role": "user", "name": [1]}, "messages[0].name=[1]: must be a string"),
        ({"role": "user", "tool_call_id": 1}, "messages[0].tool_call_id=1: must be a string"),
    ],
)
def test_invalid_keys_of_messages_are_rejected(turn, reason):
    assert reason in rejection(**sent([{"content": "x"} | turn]))


def test_an_unknown_key_of_a_message_is_rejected(tiny):
    """A key is known if the chat template has it."""
    turn = {"role": "user", "content": "x", "name": "y", "prefix": None}
    with serving(tiny[0], chat_template="{{ messages[0].content }}{{ messages[0].tool_plan }}") as server:
        sampling = {"sampling_parameters": '{"max_tokens": 1}'}
        for more in ({}, {"tool_plan": "z"}):
            assert server.ask(messages=json.dumps([turn | more]), **sampling)
        rejected = server.call(messages=json.dumps([turn | {"__class__": "z"}])).rejection()
        assert 'messages[0].__class__="z": unknown; known are content, name, reasoning, ' in rejected
        typed = json.dumps([turn | {"content": "<|end|>"}])
        counted = [server.ask(messages=text, return_num_input_tokens=True, **sampling) for text in (typed,)]
        assert counted[0]["num_input_tokens"] == [len("<|end|>")]
    with serving(tiny[0], chat_template="{{ messages[0].content }}", special_tokens_in_messages=True) as server:
        assert server.ask(messages=typed, return_num_input_tokens=True, **sampling)["num_input_tokens"] == [1]


def test_conversation_limits_are_enforced():
    limit = f'messages="{InputLimits.max_messages + 1} messages": must be at most {InputLimits.max_messages}'
    assert limit in rejection(**sent([{"role": "user", "content": ""}] * (InputLimits.max_messages + 1)))
    large = text("[" * (InputLimits.max_json_chars + 1))  # invalid JSON
    limit = f'="{InputLimits.max_json_chars + 1} characters": must be at most {InputLimits.max_json_chars}'
    assert f"messages{limit}" in rejection(messages=large)
    assert f"tools{limit}" in rejection(**sent(TURNS) | {"tools": large})
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
