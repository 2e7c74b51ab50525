"""`paged dynamo`: wrong usage. tests/e2e/test_dynamo.py runs it."""

import socket

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
        (["--url", "localhost"], "--url='localhost': gRPC takes HOST:PORT"),
        (["--namespace", "a.b"], "--namespace 'a.b': must consist of letters, digits, - and _"),
        (["--component", ""], "--component '': must consist of letters, digits, - and _"),
        (["--model", "a", "--kv-events", "bogus"], "--kv-events bogus: must be like tcp://10.0.0.7:5557"),
        (["--model", "a", "--model", "a"], "--model a: given 2 times"),
        (["--served-model-name", ""], "--served-model-name '': must not be empty"),
        (["--router-mode", "random"], "--router-mode random: has no effect without --frontend-port"),
        (["--frontend-host", "0.0.0.0"], "--frontend-host 0.0.0.0: has no effect without --frontend-port"),
        (
            ["--discovery-backend", "mem", "--frontend-port", "9000"],
            "--discovery-backend mem: is for one process; use file, etcd or kubernetes",
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


def test_variables_of_dynamo_are_checked(monkeypatch, capsys):
    monkeypatch.setenv("DYN_EVENT_PLANE", "bogus")
    assert main(["dynamo"]) == 2
    assert capsys.readouterr().err == "paged dynamo: DYN_EVENT_PLANE=bogus: must be one of zmq, nats\n"


def test_a_port_in_use(capsys):
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["dynamo", "--frontend-port", str(port)]) == 2
    assert capsys.readouterr().err == f"paged dynamo: --frontend-port={port}: Address already in use\n"
