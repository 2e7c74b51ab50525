"""The tests of several ranks on CPUs, on a machine with GPUs: in a process that sees none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SELECTION = "ranks and not nightly"


def run_tests(*arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-q", "-m", SELECTION, "-p", "no:cacheprovider", "-p", "no:costs"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def files_with_ranks():
    """The test files that have the marker `ranks`, but not those that start servers, which take a machine of their
    own."""
    files = sorted({*(ROOT / "tests").glob("*/test_*.py")} - {*(ROOT / "tests/e2e").iterdir(), Path(__file__)})
    return [str(file) for file in files if "mark.ranks" in file.read_text()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: these tests run by themselves")
def test_ranks_run_without_the_gpus():
    done = run_tests(*files_with_ranks())
    assert done.returncode == 0, done.stdout[-4000:]
