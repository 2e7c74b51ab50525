"""The `paged` command line without a command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged_client.cli import main
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
