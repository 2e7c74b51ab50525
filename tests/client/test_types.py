"""Errors and pool maps as values."""

import pytest

from paged_client import PagedError, PoolMap
from tests.support.client_calls import pool_of


def test_pool_map_counts_add_up():
    pool = PoolMap(**pool_of("..cc1129+p"))
    assert (pool.free, pool.cached, pool.owned, pool.shared, pool.pinned) == (2, 2, 2, 3, 1)
    assert pool.used == pool.owned + pool.shared
    assert pool.utilisation == 20 / (5 * 16)
    assert PoolMap(**pool_of(".cp")).utilisation is None
    assert PoolMap(**pool_of("..cc1129+p") | {"state_blocks": 3}).utilisation == 20 / (2 * 16)
    assert PoolMap(**pool_of("11") | {"state_blocks": 2}).utilisation is None


def test_marks_of_a_pool_map_are_checked():
    with pytest.raises(ValueError, match=r"states='1\.x'"):
        PoolMap(**pool_of("...") | {"states": "1.x"})


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("INVALID_ARGUMENT: seed=-1: must be 0..9", "INVALID_ARGUMENT", "seed=-1: must be 0..9"),
        ("UNAVAILABLE: full", "UNAVAILABLE", "full"),
        ("Error generating stream: UNAVAILABLE: full", "UNAVAILABLE", "full"),
        ("Error generating stream: of another backend", "UNKNOWN", "of another backend"),
        ("LoRA feature is not enabled.", "INVALID_ARGUMENT", "LoRA feature is not enabled."),
        (
            "LoRA c is not supported, we currently support ['a', 'b']",
            "INVALID_ARGUMENT",
            "LoRA c is not supported, we currently support ['a', 'b']",
        ),
        (
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
            "INVALID_ARGUMENT",
            "When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
        ("INTERNAL: two\nlines", "INTERNAL", "two\nlines"),
        ("Request for unknown model: 'x'", "UNKNOWN", "Request for unknown model: 'x'"),
        ("max_tokens: A: B", "UNKNOWN", "max_tokens: A: B"),
        ("", "UNKNOWN", ""),
    ],
)
def test_error_class_and_message_are_parsed(text, code, message):
    error = PagedError.parse(text)
    assert (error.code, error.message) == (code, message)
    assert str(error) == f"{code}: {message}"


def test_message_without_class_gets_the_transport_code():
    assert PagedError.parse("gone", "UNAVAILABLE").code == "UNAVAILABLE"
    assert PagedError.parse("INTERNAL: gone", "UNAVAILABLE").code == "INTERNAL"
