"""`paged openai`: arguments."""

import pytest

from paged_client import cli
from paged_client.openai import command


@pytest.mark.parametrize("value", ["0", "-1", "x", "0MB", "20 XB"])
def test_limits_must_be_positive(value, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["openai", f"--max-request-bytes={value}"])
    assert "must be a whole number, at least 1" in capsys.readouterr().err


def test_size_of_a_body_has_a_unit(monkeypatch):
    sizes = []
    monkeypatch.setattr(command, "run", lambda **arguments: sizes.append(arguments["max_request_bytes"]) or 7)
    for value in ("4096", "20MB", "20MiB", "1.5GiB"):
        assert cli.main(["openai", "--max-request-bytes", value]) == 7
    assert sizes == [4096, 20 * 10**6, 20 << 20, 3 << 29]


def test_a_second_server_is_rejected(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["openai", "--url", "a:1", "--url", "b:1"])
    assert "--url: b:1: a:1 is given too; a gateway has one server" in capsys.readouterr().err


def test_arguments_are_passed_to_the_gateway(monkeypatch):
    calls = []
    monkeypatch.setattr(command, "run", lambda **arguments: calls.append(arguments) or 7)
    flags = [
        "--url",
        "a:1",
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
    changed = {"url": "a:1", "api_keys": ["k"], "port": 80, "body_timeout": 2.5, "max_inputs": 9}
    assert given == default | changed | {"access_log": True}
    assert (default["url"], default["api_keys"], default["port"], default["max_prompts"]) == (None, [], 9000, 128)
