"""The reason of a failed load in a server's log."""

import pytest

from paged_client.serving.server_log import load_failure


@pytest.mark.parametrize(
    "log",
    [
        "E1 x] \"failed to load 'm' version 1: Internal: ValueError: a\\nb\\n\\nAt:\\n  f\\n\"\nI1 ",
        "E1 x.cc:654] failed to load 'm' version 1: Internal: ValueError: a\\nb\\n\\nAt:\nI1 more\n",
    ],
)
def test_load_failure_is_parsed_from_the_log(log):
    assert load_failure(log) == "ValueError: a\nb"


def test_load_failure_keeps_its_quotes():
    assert (
        load_failure('E1 x] "failed to load \'m\' version 1: dtype=\\"x\\": no\\n\\nAt:\\n  f\\n"\n') == 'dtype="x": no'
    )


def test_log_without_load_failure():
    assert load_failure("I1121 all is well\n") is None
