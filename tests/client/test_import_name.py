"""The package is called paged_client; its former name `client` still works and warns."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "client")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path[:0] = {PATHS!r}\n"
    command = [sys.executable, "-W", "always", *(["-c", code + arguments[0]] if len(arguments) == 1 else arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_former_name_is_the_same_package():
    done = run(
        "import client.openai.keys, client.serving.ports, paged_client.openai.keys\n"
        "from client import Client, PagedError\n"
        "from client.sync_client import Client as Again\n"
        "import paged_client\n"
        "assert Client is Again is paged_client.Client\n"
        "assert client.openai.keys is paged_client.openai.keys\n"
        "assert PagedError is paged_client.PagedError"
    )
    assert done.returncode == 0, done.stderr
    assert "DeprecationWarning: the package `client` is now `paged_client`" in done.stderr


def test_unknown_module_of_the_former_name_is_an_import_error():
    done = run("import client.nothing")
    assert "ModuleNotFoundError: No module named 'paged_client.nothing'" in done.stderr


def test_new_name_does_not_warn():
    assert run("import paged_client.cli").stderr == ""
