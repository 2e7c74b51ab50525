"""The programs of Triton on this machine."""

import os
import subprocess

import pytest

from paged_client.serving.server_files import perf_analyzer


def test_perf_analyzer_runs_in_its_environment():
    found = perf_analyzer()
    if found is None:
        pytest.skip("no perf_analyzer for this machine")
    binary, environment = found
    shown = subprocess.run([binary, "--version"], env=environment, capture_output=True, text=True, check=True)
    assert "Perf Analyzer Version" in shown.stdout + shown.stderr
    assert environment.items() >= {key: os.environ[key] for key in ("PATH", "HOME")}.items()
