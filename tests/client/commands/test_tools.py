"""`paged bench`: which benchmarks there are."""

import sys

import pytest

from paged_client.cli import main


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
