"""Messages and tools of chat requests, and what is rejected."""

import pytest

from tests.support.gateway import CHAT, error_of, gateway
from tests.support.openai_tools import NOW, PATH, TOOLS


@pytest.fixture(scope="module")
def front(fake):
    with gateway(fake.url) as made:
        yield made


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
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_json": {}}, "tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        ({"messages": [asks_for("{}") | {"role": "user", "content": "x"}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages.0.tool_calls"),
        *(
            ({"messages": [asks_for(arguments)]}, "messages.0.tool_calls.0.function.arguments")
            for arguments in ("[1]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": ' * 900 + "1" + "}" * 900)
        ),
    ],
)
def test_conflicting_fields_are_rejected(front, fields, named):
    status, body = front.ask(PATH, CHAT | fields)
    assert (status, error_of(status, body)["param"]) == (400, named)
