"""The scanner of JSON in text that arrives in parts."""

import pytest

from paged_client.openai.json_scanner import MAX_STRING, Scanner


def scan(method, parts):
    """Feed parts to a generator of the scanner. Return its result, what is left, and how often it waited."""
    scanner, waits, rest = Scanner(), 0, list(parts)
    running = method(scanner)
    while True:
        try:
            next(running)
        except StopIteration as end:
            return end.value, scanner.rest + "".join(rest), waits
        waits += 1
        if rest:
            scanner.feed(rest.pop(0))
        else:
            scanner.end()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, {"b": "}"}]}, 2', '{"a": [1, {"b": "}"}]}'),
        (r'"a\"]\\" ]', r'"a\"]\\"'),
        ("-1.5e3]", "-1.5e3"),
        ("null}", "null"),
        ("[] []", "[]"),
    ],
)
def test_a_value_ends_at_its_last_character(text, value):
    for parts in ([text], list(text)):
        written = []
        complete, rest, _ = scan(lambda scanner, to=written: scanner.value(to.append), parts)
        assert (complete, "".join(written), rest) == (True, value, text[len(value) :])


def test_a_value_is_written_as_it_arrives_and_may_be_truncated():
    written = []
    assert scan(lambda scanner: scanner.value(written.append), ['{"a', '": 1'])[0] is False
    assert [text for text in written if text] == ['{"a', '": 1']


@pytest.mark.parametrize(
    ("text", "string"), [(r'"a\"b": 1', r'"a\"b"'), ("5", ""), ('"a', ""), ('"' + "a" * 2 * MAX_STRING, "")]
)
def test_a_short_string_is_consumed_whole_or_not_at_all(text, string):
    for parts in ([text], list(text)):
        found, rest, _ = scan(Scanner.short_string, parts)
        assert (found, rest) == (string, text[len(string) :])


@pytest.mark.parametrize("parts", [["\n<tag> x"], list("\n<tag> x"), ["\n<t", "ag> x"]])
def test_a_marker_is_skipped_in_parts(parts):
    assert scan(lambda scanner: scanner.skip(" \n", ["<tag>"]), parts)[:2] == ("\n<tag> ", "x")


def test_the_start_of_a_marker_at_the_end_is_not_skipped():
    assert scan(lambda scanner: scanner.skip(" ", ["<tag>"]), [" <ta"])[:2] == (" ", "<ta")


def test_a_long_string_is_not_waited_for():
    assert scan(Scanner.short_string, ['"' + "a" * MAX_STRING, '"'])[2] == 1
