"""Secrets from the environment and from files."""

import pytest

from paged_backend.api.errors import ConfigError
from paged_backend.api.secrets import read_secret


def test_secret_is_read_from_the_variable_or_the_file(monkeypatch, tmp_path):
    assert read_secret("SOME_SECRET") is None
    (tmp_path / "secret").write_text("in a file \n")
    monkeypatch.setenv("SOME_SECRET_FILE", str(tmp_path / "secret"))
    assert read_secret("SOME_SECRET") == "in a file "
    monkeypatch.delenv("SOME_SECRET_FILE")
    monkeypatch.setenv("SOME_SECRET", "set")
    assert read_secret("SOME_SECRET") == "set"


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"SOME_SECRET": "a", "SOME_SECRET_FILE": "b"}, "SOME_SECRET and SOME_SECRET_FILE are both set"),
        ({"SOME_SECRET": ""}, "SOME_SECRET: the secret is empty"),
        ({"SOME_SECRET_FILE": "{tmp_path}/missing"}, r"SOME_SECRET_FILE={tmp_path}/missing: .*No such file"),
        ({"SOME_SECRET_FILE": "/dev/null"}, "SOME_SECRET_FILE=/dev/null: the secret is empty"),
    ],
)
def test_unusable_secrets_are_rejected(monkeypatch, tmp_path, variables, problem):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path=tmp_path))
    with pytest.raises(ConfigError, match=problem.format(tmp_path=tmp_path)):
        read_secret("SOME_SECRET")
