"""The `paged` command line without a command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged_client.cli import main
from tests.support.client_calls import standard_input
from tests.support.fake_servers import WAIT

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [[], ["nope"], ["generate", "--top-k", "x"]])
def test_argparse_errors(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: paged" in capsys.readouterr().err


def test_unknown_command_suggests_a_similar_one(capsys):
    assert main(["serv", "demo"]) == 2
    assert capsys.readouterr().err == "paged serv: unknown command; did you mean paged serve?\n"


def test_unknown_argument_suggests_a_similar_one(capsys):
    assert main(["chat", "--sytem", "x"]) == 2
    assert "--sytem: unknown argument; did you mean --system?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "x", "--protocol", "http"], ["map"], ["probe"]])
def test_failed_command_exits_although_a_thread_is_left(arguments, tmp_path):
    """The interpreter waits for threads at exit, and a thread of a library may never end."""
    text = "import threading\nthreading.Thread(target=threading.Event().wait).start()"
    (tmp_path / "sitecustomize.py").write_text(text)
    command = [sys.executable, "-m", "paged_client", *arguments, "--url", "localhost:9"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'kernels'}:{ROOT / 'client'}"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing listens at localhost:9" in done.stderr
    assert "Start a server with `paged serve MODEL`" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["generate", "x", "--n", "2"], "--n: unknown argument; sampling parameters without an option of their own"),
        (["generate", "x", "--n", "2"], "are set with -p: -p n=2\n"),
        (["generate", "-n", "3", "x"], "-p n=3\n"),
        (["chat", "--n=4"], "-p n=4\n"),
        (["generate", "x", "--json-schema", '{"type": "object"}'], """-p json_schema='{"type": "object"}'\n"""),
        (["generate", "x", "--guided-json"], "-p json_schema=VALUE\n"),
        (["generate", "x", "--max_tokens", "5"], "did you mean --max-tokens?"),
        (["generate", "x", "--max-new-tokens", "5"], "did you mean --max-tokens?"),
        (["generate", "x", "--no-strem"], "did you mean --no-stream?"),
        (["generate", "x", "--system", "Be brief."], "--system: unknown argument; it is an option of paged chat\n"),
        (["generate", "x", "--port", "8601"], "the address of the server is --url HOST:8601\n"),
        (["map", "--port"], "the address of the server is --url HOST:PORT\n"),
        (["map", "--nothing", "5"], "--nothing: unknown argument; see paged map --help\n"),
        (
            ["--url", "localhost:8001", "generate", "hi"],
            "paged --url: unknown option; options come after the command: paged generate … --url …\n",
        ),
    ],
)
def test_unknown_arguments_have_a_hint(arguments, hint, capsys):
    assert main(arguments) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["generate", "--no-str"], ["openai", "--mod", "x"], ["probe", "--time=3"]])
def test_options_cannot_be_abbreviated(arguments, capsys):
    assert main(arguments) == 2
    assert f"{arguments[1]}: unknown argument" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("paged 0.")


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "-"], ["chat"]])
def test_closed_standard_input(arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main([*arguments, "--url", "localhost:9"]) == 2
    assert capsys.readouterr().err == f"paged {arguments[0]}: standard input is closed\n"


def test_chat_without_input(capsys, monkeypatch):
    standard_input(monkeypatch, "\n")
    assert main(["chat", "--url", "localhost:9"]) == 2
    assert "paged chat: standard input is empty" in capsys.readouterr().err
