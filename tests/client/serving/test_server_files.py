"""The programs of Triton on this machine."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from paged_client.serving import server_files
from paged_client.serving.server_files import ServerFiles, find_server, perf_analyzer

ROOT = Path(__file__).parents[3]
OWN_SCRIPT = "#!/venv/bin/python\nimport sys\nfrom paged_client.cli import run_tritonserver\nrun_tritonserver()\n"


def add_program(directory: Path, text: str) -> Path:
    directory.mkdir()
    program = directory / "tritonserver"
    program.write_text(text)
    program.chmod(0o755)
    return program


@pytest.mark.skipif(find_spec("pytriton") is None, reason="the extra server is not installed")
def test_the_servers_on_path_come_first_but_not_the_script_of_this_package(tmp_path, monkeypatch):
    own = add_program(tmp_path / "own", OWN_SCRIPT)
    monkeypatch.setenv("PATH", f"{own.parent}:{os.environ['PATH']}")
    without = find_server()
    assert without.binary != own
    theirs = add_program(tmp_path / "theirs", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{own.parent}:{theirs.parent}:{os.environ['PATH']}")
    assert find_server() == ServerFiles(theirs)


def test_a_given_backend_directory_replaces_the_one_of_the_wheel(tmp_path):
    files = ServerFiles(Path("/t"), tmp_path)
    assert files.command(["--log-verbose=1"]) == ["/t", f"--backend-directory={tmp_path}", "--log-verbose=1"]
    for given in (["--backend-directory=/b"], ["--backend-directory", "/b"]):
        assert files.command(given) == ["/t", *given]
    assert ServerFiles(Path("/t")).command(["--help"]) == ["/t", "--help"]


def test_an_installed_package_writes_to_the_cache_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("PAGED_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert server_files.cache_directory() == ROOT / ".cache"
    monkeypatch.setattr(server_files, "_IS_CHECKOUT", False)
    assert server_files.cache_directory() == tmp_path / "paged_llm"
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path / "own"))
    assert server_files.cache_directory() == tmp_path / "own"


def test_perf_analyzer_runs_in_its_environment():
    found = perf_analyzer()
    if found is None:
        pytest.skip("no perf_analyzer for this machine")
    binary, environment = found
    shown = subprocess.run([binary, "--version"], env=environment, capture_output=True, text=True, check=True)
    assert "Perf Analyzer Version" in shown.stdout + shown.stderr
    assert environment.items() >= {key: os.environ[key] for key in ("PATH", "HOME")}.items()
