"""Error messages."""

import pytest

from paged_backend.api import errors
from paged_backend.api.errors import SHOWN_CHARS, RequestError, invalid_argument
from paged_backend.api.limits import EngineLimits
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.server.wire.call import read_call
from tests.support.wire_requests import text

LIMITS = EngineLimits(64, 320, 256, 4, 8)


def test_long_names_and_values_are_cut_in_messages():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    for name, value in (("a" * 10**6, 1), ("a", "b" * 10**6), ("a", nested), ("a", 10**5000)):
        assert len(str(invalid_argument(name, value, "no"))) < 2 * SHOWN_CHARS + 40


@pytest.mark.parametrize("name", ["z" * 10**6, "max_token" * 10**5])
def test_only_the_start_of_a_long_name_is_compared(name, monkeypatch):
    """Comparing a name with all known names takes time quadratic in its length."""
    compared, compare = [], errors.difflib.get_close_matches
    monkeypatch.setattr(
        errors.difflib, "get_close_matches", lambda word, *others: compared.append(word) or compare(word, *others)
    )
    with pytest.raises(RequestError, match="unknown"):
        read_call({"text_input": text("a")}, {name: 1})
    with pytest.raises(RequestError, match="unknown"):
        SamplingParams.parse({name: 1}, LIMITS)
    assert [len(word) for word in compared] == [SHOWN_CHARS] * 2
