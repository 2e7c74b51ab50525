"""`paged profile` with a server of this machine."""

import json
import os
import socket
from functools import partial

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.server.connections.listener import Listener
from paged_backend.utils import local_socket
from paged_client.cli import main
from paged_client.commands.profile import report
from tests.support.local_engine import socket_directory

__all__ = ["socket_directory"]
PHASE = {"seconds": 0.002, "share": 0.2}
PROFILE = {
    "seconds": 1.0,
    "steps": {
        "count": 100,
        "sequences": 4.0,
        "tokens": 5.5,
        "replayed": 90,
        "phases": {"launch": PHASE, "wait": PHASE},
    },
    "functions": [{"thread": "engine", "function": "run (a.py:1)", "share": 0.5}],
    "server_threads": [{"thread": 1, "name": "grpc", "share": 0.25}],
    "trace": {"traceEvents": []},
}
pytestmark = pytest.mark.usefixtures("socket_directory")


@pytest.fixture
def listening():
    """Return a function that opens the socket of a model whose profiles `record` returns."""
    opened = []

    def listen(record, model="paged_llm"):
        opened.append(Listener(model, print, record_profile=record))
        return opened[-1]

    yield listen
    for listener in opened:
        listener.drain(0)
        listener.close()


def test_the_trace_is_written_and_tables_are_printed(listening, tmp_path, capsys):
    lengths = []
    listening(lambda seconds: (lengths.append(seconds), PROFILE)[1])
    assert main(["profile", "--seconds", "1.5", "--output", str(tmp_path / "p.json")]) == 0
    assert lengths == [1.5]
    assert json.loads((tmp_path / "p.json").read_text()) == PROFILE["trace"]
    printed = capsys.readouterr().out
    assert "100 steps in 1.0 s, on average 4.0 sequences and 5.5 tokens; 90 in CUDA graphs" in printed
    for line in (["launch", "2.000", "20.0%"], ["outside", "of", "steps", "60.0%"], ["grpc", "25.0%"]):
        assert line in [one.split() for one in printed.splitlines()]
    assert "50.0%  run (a.py:1)" in printed


def test_errors_of_the_server_are_reported(listening, tmp_path, capsys):
    def refuse(seconds):
        raise RequestError(ErrorCode.UNAVAILABLE, "another profile is being taken")

    listening(refuse)
    assert main(["profile", "--output", str(tmp_path / "p.json")]) == 1
    assert "paged: UNAVAILABLE: another profile is being taken\n" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_without_a_server_the_model_is_named(capsys, tmp_path):
    assert main(["profile", "--model", "other", "--output", str(tmp_path / "p.json")]) == 2
    assert "no server of this user on this machine serves other" in capsys.readouterr().err


def test_the_address_chooses_one_of_several_servers(monkeypatch, capsys, tmp_path, listening):
    """The port is one that the server's process listens on: here the parent of this process, or this process."""
    asked = []
    listening(lambda seconds: (asked.append(seconds), PROFILE)[1])
    monkeypatch.setattr(local_socket, "servers", lambda model: [os.getpid(), os.getppid()])
    monkeypatch.setattr(local_socket, "find", partial(_find, local_socket.find))
    command = ["profile", "--output", str(tmp_path / "p.json")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "--url: missing; 2 servers on this machine serve paged_llm: localhost:" in error
        assert main([*command, "--url", f"localhost:{port}"]) == 0
    assert len(asked) == 1
    assert main([*command, "--url", f"localhost:{port}"]) == 2
    assert f"serves paged_llm at localhost:{port}" in capsys.readouterr().err


def _find(find, model, server):
    """Find the sockets of this process's server, which is its parent."""
    assert server == os.getpid()
    return find(model)


@pytest.mark.parametrize("url", ["example.com:8001", "localhost", "localhost:x"])
def test_an_address_elsewhere_is_rejected(listening, capsys, url):
    listening(print)
    assert main(["profile", "--url", url]) == 2
    assert f"--url {url}: must be HOST:PORT with one of the hosts localhost" in capsys.readouterr().err


def test_the_output_must_be_a_file(capsys, tmp_path):
    assert main(["profile", "--output", str(tmp_path)]) == 2
    assert "must be a file in an existing directory" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_reported_first(listening, capsys):
    listening(lambda seconds: PROFILE)
    assert main(["profile", "--output", "/proc/x"]) == 2
    assert capsys.readouterr().err == "paged profile: --output /proc/x: No such file or directory\n"


def test_tables_are_printed_although_the_trace_cannot_be_written(listening, tmp_path, capsys):
    def record(seconds):
        (tmp_path / "p.json").mkdir()
        return PROFILE

    listening(record)
    assert main(["profile", "--output", str(tmp_path / "p.json")]) == 1
    printed = capsys.readouterr()
    assert "100 steps in 1.0 s" in printed.out
    assert f"paged profile: --output {tmp_path / 'p.json'}: Is a directory\n" in printed.err


def test_a_profile_that_is_too_long_is_rejected_first(listening, capsys):
    listening(lambda seconds: PROFILE)
    assert main(["profile", "--seconds", "100"]) == 2
    assert capsys.readouterr().err == "paged profile: --seconds 100: must be at most 60\n"


def test_a_profile_without_steps():
    assert report(PROFILE | {"steps": {"count": 0}, "functions": [], "server_threads": []}) == ["no step in 1.0 s"]
