"""`paged dynamo`: wrong usage. tests/e2e/test_dynamo.py runs it."""

import pytest

from paged_client.cli import main

URLS = ["--url", "localhost:1", "--url", "localhost:2"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--url", "localhost:1", *URLS], "--url localhost:1: given 2 times; each must be another server"),
        (
            [*URLS, "--model", "a", "--kv-events", "tcp://localhost:5"],
            "--kv-events: 1 given; must be one for each --url, in their order",
        ),
        (
            ["--model", "a", "--model", "b", "--served-model-name", "c"],
            "--served-model-name: is for one model, not for a, b; choose one with --model",
        ),
        (
            ["--model", "a", "--model", "b", "--model-path", "/"],
            "--model-path: is for one model, not for a, b; choose one with --model",
        ),
        (
            ["--model", "a", "--model-path", "/missing"],
            "--model-path /missing: must be a directory with the model's tokenizer",
        ),
        (["--role", "encode"], "argument --role: invalid choice: 'encode'"),
        (["--frontend-port", "70000"], "argument --frontend-port: '70000': must be 1..65535"),
    ],
)
def test_wrong_usage(arguments, problem, capsys):
    try:
        code = main(["dynamo", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert problem in capsys.readouterr().err


def test_a_frontend_has_no_keys(monkeypatch, capsys):
    monkeypatch.setenv("PAGED_API_KEYS", "secret")
    assert main(["dynamo", "--model", "a", "--frontend-port", "9000"]) == 2
    assert capsys.readouterr().err == (
        "paged dynamo: PAGED_API_KEYS: Dynamo's frontend has no API keys; use the gateway, or unset it\n"
    )
