"""Numbers and flags that are strings."""

import pytest

from paged_backend.api.json_values import to_flag, to_integer, to_number


@pytest.mark.parametrize(
    ("convert", "value", "expected"),
    [
        (to_integer, "12", 12),
        (to_integer, "-1", -1),
        (to_integer, 12.0, 12),
        (to_number, "0.5", 0.5),
        (to_number, "1e3", 1000.0),
        (to_flag, "True", True),
        (to_flag, 0, False),
        (to_flag, "1", True),
    ],
)
def test_values_are_converted(convert, value, expected):
    found = convert(value)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("convert", "values"),
    [
        (to_integer, ["12.0", "1_0", "\uff15", "", "x", "9" * 5000, 1.5, True, None, [], float("inf")]),
        (to_number, ["1_0", "x", "", True, None, {}]),
        (to_flag, ["yes", 2, 1.0, None, []]),
    ],
)
def test_other_values_are_returned_unchanged(convert, values):
    for value in values:
        assert convert(value) is value
