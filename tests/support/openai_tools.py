"""Tools, and an output that calls them."""

from paged_client.openai.tool_calls import ArgumentsDelta, CallStart, Content

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
TOOLS = [WEATHER, NOW]
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
PATH = "/v1/chat/completions"


def joined(pieces):
    content, calls = "", []
    for piece in pieces:
        if isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, CallStart):
            assert piece.call == len(calls)
            calls.append([piece.name, ""])
        else:
            assert isinstance(piece, ArgumentsDelta)
            calls[piece.call][1] += piece.text
    return content, [tuple(call) for call in calls]


STRICT = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
CALLED = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
