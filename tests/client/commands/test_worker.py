"""`paged worker`: its arguments and the environment of torchrun."""

import os

import pytest

from paged_client.cli import main


@pytest.fixture
def executed(monkeypatch):
    """What would replace this process."""
    found = []
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)

    def execve(path, command, environment):
        found.append((command[1:], {name: environment.get(name) for name in ("MASTER_ADDR", "NODE_RANK")}))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "execve", execve)
    return found


def test_arguments_precede_the_environment(executed, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    monkeypatch.setenv("NODE_RANK", "2")
    main(["worker", "--node-rank", "1", "--model", "/models/x"])
    module = ["-m", "paged_backend.engine.worker_node"]
    assert executed == [([*module, "/models/x"], {"MASTER_ADDR": "10.0.0.9", "NODE_RANK": "1"})]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--node-rank", "1"], "--master-addr is missing, and so is MASTER_ADDR in the environment"),
        (["--master-addr", "a"], "--node-rank is missing, and so is NODE_RANK in the environment"),
        (["--master-addr", "a", "--node-rank", "0"], "--node-rank (NODE_RANK) 0: must be a number from 1 to 63"),
        (
            ["--master-addr", "a:1", "--node-rank", "1"],
            "--master-addr (MASTER_ADDR) a:1: must be a host",
        ),
        (
            ["--master-addr", "a", "--node-rank", "1", "--master-port", "70000"],
            "--master-port (MASTER_PORT) 70000: must be",
        ),
    ],
)
def test_missing_and_invalid_arguments_are_named(executed, capsys, arguments, message):
    assert main(["worker", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert executed == []
