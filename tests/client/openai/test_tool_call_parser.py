"""The tool call parser with recorded outputs, split at every position."""

import json
import random

import pytest

from paged_client.openai.tool_call_parser import ToolCallParser
from paged_client.openai.tool_calls import ANY, FORMATS, JSON, ArgumentsDelta, CallStart
from tests.support.openai_tools import joined

NAMES = ("weather", "search", "now")
PARIS = '{"city": "Paris", "days": [1, 2], "note": "a \\"}{\\" é"}'
CALL = f'{{"name": "weather", "arguments": {PARIS}}}'
PARAMETERS = f'{{"name": "weather", "parameters": {PARIS}}}'
SEARCH = '{"name": "search", "arguments": {"q": "x"}}'
WEATHER = ("weather", PARIS)


def read(form, pieces, **options):
    """Parse chunks and return (content, [(name, arguments)])."""
    reader = ToolCallParser(form, NAMES, **options)
    read = [piece for text in pieces for piece in reader.push(text)] + reader.finish()
    return joined(read)


def cuts(text):
    """Return a text as one chunk, as single characters, and as chunks of random lengths."""
    yield [text]
    yield list(text)
    rnd = random.Random(7)
    for _ in range(20):
        places = sorted(rnd.sample(range(len(text) + 1), min(4, len(text))))
        yield [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


RECORDED = {
    "hermes": [
        (f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
        (
            f"Let me look.\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{SEARCH}\n</tool_call>",
            "Let me look.",
            [WEATHER, ("search", '{"q": "x"}')],
        ),
        (f"<tool_call>{CALL}</tool_call>\nThat is all.", "That is all.", [WEATHER]),
        ('<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>', "", [("now", "{}")]),
        ('<tool_call>\n{"name": "now"}\n</tool_call>', "", [("now", "{}")]),
        ('<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>', "", [("now", "{}")]),
        (
            '<tool_call>{"id": 7, "name": "now", "arguments": "{\\"a\\": 1}", "x": [1]}</tool_call>',
            "",
            [("now", '{"a": 1}')],
        ),
    ],
    "llama3_json": [
        (PARAMETERS, "", [WEATHER]),
        (f"<|python_tag|>{PARAMETERS}; {PARAMETERS}", "", [WEATHER, WEATHER]),
        ('{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{CALL}, {SEARCH}]", "", [WEATHER, ("search", '{"q": "x"}')]),
        (f"[TOOL_CALLS] [{CALL}]", "", [WEATHER]),
        (f"[{CALL}]", "", [WEATHER]),  # where the decoder leaves special tokens out
        (f"One moment.[TOOL_CALLS]weather{PARIS}", "One moment.", [WEATHER]),
        (f"[TOOL_CALLS]weather[CALL_ID]abc123[ARGS]{PARIS}[TOOL_CALLS]now{{}}", "", [WEATHER, ("now", "{}")]),
    ],
}
CASES = [(FORMATS[form], *case) for form, cases in RECORDED.items() for case in cases]
CASES += [(ANY, *case) for cases in RECORDED.values() for case in cases]

TEXTS = [
    "",
    "Plain words, and 1 < 2.",
    "  {not JSON}",
    "[1] As noted, [2] says so.",
    '{"answer": 42}',
    '{"name": "Ada", "arguments": {"born": 1815}}',  # no such tool
    '{"name": "weather", "arguments": 3}',
    '{"name": ["weather"]}',
    '[{"name": 3}]',
    '{"name": "weather"',
    '{"nam',
    "The tag is \n<tool_call> and nothing more. ",
    '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
    "<tool_call>weather</tool_call>",
    "<tool",
    "[TOOL_CALLS]nobody{}",
    "[TOOL_CALLS]weather",
    "ends in space \n",
    '{"' + "a" * 300,
    "{" * 2000,
    '{"name": "weather", "arguments": ' + "[" * 2000,
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_parsed_independent_of_chunks(form, text, content, calls):
    for pieces in cuts(text):
        assert read(form, pieces) == (content, calls), pieces
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("form", [*FORMATS.values(), ANY, JSON])
@pytest.mark.parametrize("text", TEXTS)
def test_text_without_call_is_unchanged(form, text):
    for pieces in cuts(text):
        assert read(form, pieces) == (text, []), pieces


def test_call_is_streamed_before_it_is_complete():
    reader = ToolCallParser(ANY, NAMES)
    pieces = reader.push('<tool_call>{"name": "weather", "arguments": {"city": "Pa')
    assert pieces == [CallStart(0, "weather"), ArgumentsDelta(0, '{"city": "Pa')]
    assert reader.push('ris"}') == [ArgumentsDelta(0, 'ris"}')]
    assert reader.push("}</tool_call>") + reader.finish() == []


def test_truncated_call_keeps_its_arguments():
    assert read(ANY, [f"<tool_call>{CALL[:50]}"]) == ("", [("weather", CALL[:50].partition('"arguments": ')[2])])


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_only_the_first_call_without_parallel_calls(form):
    text = {"hermes": f"<tool_call>{CALL}</tool_call><tool_call>{SEARCH}</tool_call>", "mistral": f"[{CALL}, {SEARCH}]"}
    for pieces in cuts(text[form]):
        assert read(FORMATS[form], pieces, parallel=False) == ("", [WEATHER])


def test_malformed_second_call_is_content():
    for pieces in cuts(f"[{CALL}, {{3}}] so"):
        assert read(JSON, pieces) == ("{3}] so", [WEATHER])
    for pieces in cuts(f"<tool_call>{CALL}</tool_call>\n<tool_call>{{3}}</tool_call>"):
        assert read(ANY, pieces) == ("<tool_call>{3}</tool_call>", [WEATHER])


def test_random_text_is_parsed_independent_of_chunks():
    """Random texts of fragments of calls are parsed the same in chunks and as a whole, and no text is lost."""
    rnd = random.Random(3)
    parts = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "{", "}", '"name"', ":", '"weather"', ",", '"arguments"',
             "{}", " ", "[", "]", "a", "\n", CALL, "weather"]  # fmt: skip
    for _ in range(400):
        text = "".join(rnd.choices(parts, k=rnd.randrange(1, 14)))
        whole = read(ANY, [text])
        assert read(ANY, list(text)) == whole, text
        assert whole[0] or whole[1] or not text.strip(" \n"), text
