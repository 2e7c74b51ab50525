"""`paged openai`: arguments."""

import pytest

from paged_client import cli
from paged_client.openai import command


@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_limits_must_be_positive(value, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["openai", f"--max-request-bytes={value}"])
    assert "must be a whole number, at least 1" in capsys.readouterr().err


def test_arguments_are_passed_to_the_gateway(monkeypatch):
    calls = []
    monkeypatch.setattr(command, "run", lambda **arguments: calls.append(arguments) or 7)
    flags = [
        "--url",
        "a:1",
        "--url",
        "b:2",
        "--api-key",
        "k",
        "--port",
        "80",
        "--body-timeout",
        "2.5",
        "--max-inputs",
        "9",
    ]
    assert cli.main(["openai", *flags, "--access-log"]) == 7
    assert cli.main(["openai"]) == 7
    given, default = calls
    changed = {"urls": ["a:1", "b:2"], "api_keys": ["k"], "port": 80, "body_timeout": 2.5, "max_inputs": 9}
    assert given == default | changed | {"access_log": True}
    assert (default["urls"], default["api_keys"], default["port"], default["max_prompts"]) == ([], [], 9000, 128)
