"""Checks of options."""

import pytest

from paged_backend.api.options import (
    above_zero,
    at_least_zero,
    flag,
    fraction,
    integer,
    one_of,
    parse_string,
    power_of_two,
    text,
)


@pytest.mark.parametrize(
    ("check", "valid", "invalid"),
    [
        (text, ["a"], ["", 1, None]),
        (flag, [True, False], [0, 1, "true"]),
        (integer(2), [2, 10**9], [1, 2.0, True, "2"]),
        (integer(2, 4), [2, 4], [1, 5]),
        (fraction, [0.5, 1], [0, 1.1, True, float("nan")]),
        (at_least_zero, [0, 0.5], [-1, float("inf"), float("nan"), False]),
        (above_zero, [0.5, 1], [0, -1, float("inf")]),
        (one_of(0, "a"), [0, "a"], [False, "b", None]),
        (power_of_two(8), [1, 2, 4, 8], [0, 3, 16, True]),
    ],
)
def test_checks_say_what_a_value_must_be(check, valid, invalid):
    assert [check(value) for value in valid] == [None] * len(valid)
    for value in invalid:
        assert check(value).startswith("must be ")


@pytest.mark.parametrize(
    ("value", "parsed"),
    [("true", True), ("False", False), ("8", 8), ("0.5", 0.5), ("8b", "8b"), ("-1", "-1"), ("auto", "auto"), (3, 3)],
)
def test_strings_that_spell_booleans_and_numbers_are_parsed(value, parsed):
    assert parse_string(value) == parsed
