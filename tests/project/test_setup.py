"""Tests of the setup on a new machine: the Makefile, the lock file and the project file."""

import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(*arguments: str, directory: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_make_without_target_prints_help():
    shown = make().stdout
    for target in ["serve", "test", "nightly", "lint", "demo-model", "wheel", "clean"]:
        assert f"make {target}" in shown


def test_make_serve_passes_variables():
    variables = ["MODEL=/m n", "OPTIONS=block_size=32 dtype=float32", "HTTP_PORT=1", "GRPC_PORT=2"]
    shown = make("-n", "serve", *variables)
    line = " ".join(shown.stdout.replace("\\\n", " ").split())
    assert "paged serve '/m n' -o 'block_size=32' -o 'dtype=float32'" in line
    assert "--http-port 1 --grpc-port 2 --metrics-port 8002" in line


def test_make_reports_the_required_python(tmp_path):
    result = make("setup", f"VENV={tmp_path}/venv", "PYTHON=/bin/false")
    assert result.returncode != 0
    assert "'/bin/false'" in result.stderr
    assert "python3-venv" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_environment_is_reinstalled_only_after_changes(tmp_path):
    """The name of the stamp depends on the contents of the files, not on the environment."""
    shown = make("-n", "-p", "help").stdout
    first = re.search(r"^STAMP := (\S+)", shown, re.MULTILINE)
    assert first
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + "# changed\n")
    (tmp_path / "constraints.txt").write_text((ROOT / "constraints.txt").read_text())
    changed = make("-n", "-p", "help", directory=tmp_path).stdout
    assert "STAMP := " in changed
    assert f"STAMP := {first[1]}" not in changed


def lock() -> list[str]:
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def test_lock_has_exact_versions_and_no_paths():
    pin = r"[a-z0-9.-]+==[A-Za-z0-9.]+( ; python_full_version [<>=]+ '3\.1\d(\.\*|\.\d+)?')?"
    assert [line for line in lock() if not re.fullmatch(pin, line)] == []


@pytest.mark.parametrize(
    "pin",
    ["torch==2.13.0", "triton==3.7.1", "numpy==1.26.4", "protobuf==4.25.9", "tritonclient==2.51.0"],
)
def test_lock_has_the_pinned_versions(pin):
    assert pin in lock()


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="not the environment that make sets up")
def test_environment_matches_the_lock():
    """A package that is not in the lock could have any version on another machine."""
    names = {line.split("==")[0] for line in lock()}
    installed = {re.sub(r"[._]+", "-", package.metadata["Name"].lower()) for package in distributions()}
    assert installed - {"pip", "paged-llm-triton"} <= names
