"""`paged bench`: which benchmarks there are. `paged tritonserver`: how the server is started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged_client.cli import main

ROOT = Path(__file__).parents[3]
PATHS = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "client")))


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A package with a benchmark and a private helper module."""
    bench = tmp_path / "paged_bench"
    bench.mkdir()
    (bench / "__init__.py").touch()
    (bench / "_helper.py").touch()
    (bench / "on_gpu.py").touch()
    (bench / "throughput.py").write_text("def main(argv):\n    print(argv)\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("paged_bench")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.startswith("paged_bench")]:
        del sys.modules[name]


def test_bench_passes_all_arguments_on(capsys):
    assert main(["bench", "throughput", "--url", "x", "--", "-h"]) == 3
    assert capsys.readouterr().out == "['--url', 'x', '--', '-h']\n"


@pytest.mark.parametrize("arguments", [[], ["nope"], ["_helper"], ["on_gpu"]])
def test_unknown_benchmark_lists_available_ones(capsys, arguments):
    assert main(["bench", *arguments]) == 2
    message = capsys.readouterr().err
    assert "\n  throughput" in message
    assert "  _helper" not in message
    assert "  on_gpu" not in message


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_tritonserver_gets_all_arguments_and_finds_the_engine(tmp_path, separator):
    server = tmp_path / "tritonserver"
    server.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$PYTHONPATH"\n')
    server.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": PATHS}
    command = [sys.executable, "-m", "paged_client", "tritonserver"]
    arguments = ["--model-repository=models", "--version", "--", "-h"]
    done = subprocess.run(
        [*command, *separator, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    *given, path = done.stdout.splitlines()
    assert given == arguments
    assert {str(ROOT), str(ROOT / "kernels")} <= set(path.split(os.pathsep))
