"""The number of restarts, as an environment variable."""

import pytest

from paged_backend.utils import restarts


def test_counts_are_passed_on(monkeypatch):
    for name, value in restarts.write({"exited": 2}).items():
        monkeypatch.setenv(name, value)
    assert restarts.read() == dict.fromkeys(restarts.REASONS, 0) | {"exited": 2}


@pytest.mark.parametrize("value", ["", "x", "[]", '{"exited": "x"}', '{"exited": null}'])
def test_an_invalid_variable_is_ignored(monkeypatch, value):
    monkeypatch.setenv(restarts.VARIABLE, value)
    assert restarts.read() == dict.fromkeys(restarts.REASONS, 0)
