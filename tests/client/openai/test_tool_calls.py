"""Arguments of a call to a named tool."""

from paged_client.openai.tool_calls import ArgumentsParser
from tests.support.openai_tools import joined


def test_arguments_of_a_named_tool():
    reader = ArgumentsParser("weather")
    pieces = [piece for text in ("", '{"a"', ": 1}") for piece in reader.push(text)] + reader.finish()
    assert joined(pieces) == ("", [("weather", '{"a": 1}')])
