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
def test_conflicting_fields_are_rejected(front, fields, named):
    status, body = front.ask(PATH, CHAT | fields)
    assert (status, error_of(status, body)["param"]) == (400, named)
