"""The build of the C++ kernels, their selection, and the fallback without them."""

import logging
import subprocess
import sys

import pytest

from paged_kernels import ops
from paged_kernels.cpu import build, native

# A fake compiler that writes the output file, and rejects the flags of AMX tiles.
COMPILER = """#!/bin/sh
case "$*" in *-mamx-tile*|*{refuses}*) echo "level.cpp:1: error: unknown flag" >&2; exit 1;; esac
for target; do :; done
while [ "$1" != -o ]; do shift; done
echo "$*" > "$2"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    def make(refuses: str) -> None:
        script = tmp_path / "compiler"
        script.write_text(COMPILER.replace("{refuses}", refuses))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    return make


def test_level_unknown_to_the_compiler_is_skipped(compiler, monkeypatch, capsys):
    compiler(refuses="nothing")
    monkeypatch.setitem(build.LEVELS, "amx", "-mamx-tile")
    assert build.main() == 0
    said = capsys.readouterr().out
    assert "Skipped level amx: " in said and "level.cpp:1: error: unknown flag" in said
    assert [file.name for file in build.BUILT.iterdir()] == [build.library().name]
    assert build.main() == 0
    assert capsys.readouterr().out == "", "compiled again"


@pytest.mark.parametrize("missing", [True, False])
def test_failed_build_reports_the_error_and_leaves_no_library(compiler, monkeypatch, capsys, missing):
    compiler(refuses="binding.cpp")
    if missing:
        monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main() == 1
    reason = "no C++ compiler: none of no-such-compiler is on PATH" if missing else "exited with 1: level.cpp:1: error"
    assert reason in capsys.readouterr().err
    assert not build.library().exists()


def test_changed_sources_change_the_library_name(tmp_path, monkeypatch):
    before = build.library()
    for source in build.SOURCES.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.library() == before
    (tmp_path / "level.cpp").write_text("// changed")
    assert build.library() != before


def test_without_compiled_kernels_pytorch_is_used_and_a_warning_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(native, "library", lambda: tmp_path / "none.so")
    monkeypatch.setattr(native, "levels", native.levels.__wrapped__)
    with caplog.at_level(logging.WARNING):
        attend = ops._implementation.__wrapped__("paged_attention", "paged_attention", True)
    assert attend.__module__ == "paged_kernels.cpu.paged_attention"
    assert ops._implementation.__wrapped__("swiglu", "swiglu", True).__module__ == "paged_kernels.cpu.layer_ops"
    assert "(not compiled): PyTorch is used, which is slower. Fix: run python -m paged_kernels.cpu.build" in caplog.text


@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
def test_level_is_selected_by_environment_variable(compiled_environment, monkeypatch):
    script = "from paged_kernels.cpu import native; print(native.level())"
    asked = compiled_environment | {native.LEVEL: "plain"}
    said = subprocess.run([sys.executable, "-c", script], check=True, env=asked, capture_output=True, text=True)
    assert said.stdout.strip() == "plain"
    monkeypatch.setenv(native.LEVEL, "sse9")
    with pytest.raises(ValueError, match=r"PAGED_CPU_LEVEL=sse9: this machine has .*plain"):
        native.levels.__wrapped__()
