"""The build of the C++ kernels, their selection, and the fallback without them."""

import fcntl
import io
import logging
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from paged_kernels import ops
from paged_kernels.cpu import build, native
from tests.support.waiting import until

# A fake compiler that writes the output file and a line for each call, and rejects the flags of AMX tiles.
COMPILER = """#!/bin/sh
echo "$*" >> "{log}"
case "$*" in *-mamx-tile*|*{refuses}*) echo "level.cpp:1: error: unknown flag" >&2; exit 1;; esac
for target; do :; done
while [ "$1" != -o ]; do shift; done
echo "$*" > "$2"
"""

needs_kernels = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Use a fake compiler that fails where its command has a text. Returns the file of its commands."""

    def make(refuses: str = "nothing") -> Path:
        script, log = tmp_path / "compiler", tmp_path / "log"
        script.write_text(COMPILER.replace("{refuses}", refuses).replace("{log}", str(log)))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return log

    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    monkeypatch.setattr(build, "supported", lambda: ("amx", "avx2", "plain"))
    monkeypatch.setattr(
        build, "LEVELS", {"amx": "-mamx-tile", "avx2": "-mavx2", "plain": "", "avx512_bf16": "-mavx512f"}
    )
    return make


def built() -> set[str]:
    return {file.stem.split("-")[-1] for file in build.BUILT.glob("*.so")}


def test_best_level_that_the_compiler_knows_is_compiled(compiler, capsys):
    log = compiler()
    assert build.main([]) == 0
    said = capsys.readouterr().out
    assert "Skipped level amx: " in said and "level.cpp:1: error: unknown flag" in said
    assert "Compiled the C++ kernels (avx2) in " in said
    assert built() >= {"avx2", "common"} and "plain" not in built()
    assert [file for file in build.BUILT.iterdir() if not file.name.startswith((".lock", "paged_cpu-"))] == []
    commands = log.read_text()
    assert build.main([]) == 0
    assert "Compiled" not in capsys.readouterr().out
    again = log.read_text().removeprefix(commands)
    assert "-mavx2" not in again and "binding.cpp" not in again, "compiled again"


def test_a_level_needs_the_instructions_of_its_options_only():
    cpuinfo = Path("/proc/cpuinfo")
    found = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    assert ("avx2" in build.supported()) == ("avx2" in build.LEVELS and {"avx2", "fma", "f16c"} <= found)


def test_levels_are_compiled_by_name_and_all_of_them(compiler, capsys):
    compiler()
    assert build.main(["plain"]) == 0
    assert built() == {"plain", "common"}
    assert build.main(["--all"]) == 0
    assert built() == {"plain", "avx2", "avx512_bf16", "common"}
    assert "Skipped level amx: " in capsys.readouterr().out
    assert build.main(["amx"]) == 1
    with pytest.raises(SystemExit):
        build.main(["sse9"])
    assert "'sse9': must be one of amx, avx2, plain" in capsys.readouterr().err


def test_levels_are_compiled_without_torch(compiler, monkeypatch, capsys):
    """The set-up compiles the best level while torch is being installed."""
    log = compiler()
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    level, skipped = build.build_best(common=False)
    assert (level, len(skipped)) == ("avx2", 1)
    assert "torch" not in log.read_text() and "avx2" in built()
    assert build.main([]) == 1
    assert "The C++ kernels were not compiled; PyTorch is used, which is slower: torch is not installed" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("missing", [True, False])
def test_failed_build_reports_the_error_and_leaves_no_library(compiler, monkeypatch, capsys, missing):
    compiler(refuses="binding.cpp")
    if missing:
        monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main([]) == 1
    reason = "no C++ compiler: none of no-such-compiler is on PATH" if missing else "exited with 1: level.cpp:1: error"
    assert reason in capsys.readouterr().err
    assert "common" not in built()


def test_processes_that_need_the_same_level_compile_it_once(compiler):
    """The second one waits for the lock, and then finds the library."""
    log = compiler()
    script = (
        "import sys; from pathlib import Path; from paged_kernels.cpu import build; build.BUILT = Path(sys.argv[1]);"
        "print('started', flush=True); sys.exit(bool(build.build(['plain'])))"
    )
    paths = os.pathsep.join([str(Path(build.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    build.BUILT.mkdir()
    with open(build.BUILT / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        processes = [
            subprocess.Popen([sys.executable, "-c", script, str(build.BUILT)], env=os.environ | {"PYTHONPATH": paths},
                             stdout=subprocess.PIPE)
            for _ in range(2)
        ]  # fmt: skip
        for process in processes:
            assert process.stdout.readline() == b"started\n"
        assert not log.exists(), "compiled without the lock"
    assert [process.wait() for process in processes] == [0, 0]
    for process in processes:
        process.stdout.close()
    compiled = Counter(word for line in log.read_text().splitlines() for word in line.split() if word.endswith(".cpp"))
    assert len(compiled) == len(build.LEVEL_SOURCES) and set(compiled.values()) == {1}


def test_changed_sources_change_the_library_name(tmp_path, monkeypatch):
    before = build.library("plain")
    for source in build.SOURCES.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.library("plain") == before
    (tmp_path / "level.cpp").write_text("// changed")
    assert build.library("plain") != before


def test_library_does_not_depend_on_the_version_of_torch(monkeypatch):
    before = build.library(build.COMMON)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert build.library(build.COMMON) == before


@needs_kernels
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_common_library_uses_only_the_c_functions_of_torch():
    """These are stable, so that a library also works with other versions of torch. C++ functions of torch are not."""
    command = ["nm", "--dynamic", "--undefined-only", build.library(build.COMMON)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "aoti_torch_get_data_ptr" in listed
    assert [name for name in listed if re.match(r"_Z.*(2at|3c10|5torch)", name)] == []


def test_progress_without_a_terminal_is_plain_text():
    progress = build.Progress()
    progress.update("Packages", 3, 0, "found")
    progress.update("Compiling", 3, 9, "files")
    assert progress.line() == "Packages: 3 found, 0 s; Compiling: 3 of 9 files, 0 s"
    progress.end("Pack")
    assert progress.line() == "Compiling: 3 of 9 files, 0 s"


def test_progress_on_a_terminal_is_one_line_with_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        isatty = staticmethod(lambda: True)

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with build.Progress() as progress:
        progress.update("Compiling", 3, 9, "files")
        until(lambda: "Compiling: 3 of 9 files" in terminal.getvalue(), "a line")
    assert "[#######-------------] Compiling: 3 of 9 files, " in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K") and "\n" not in terminal.getvalue()


def test_without_compiled_kernels_pytorch_is_used_and_a_warning_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(native, "library", lambda name: tmp_path / f"{name}.so")
    monkeypatch.setattr(native, "levels", native.levels.__wrapped__)
    with caplog.at_level(logging.WARNING):
        attend = ops._implementation.__wrapped__("paged_attention", "paged_attention", True)
    assert attend.__module__ == "paged_kernels.cpu.paged_attention"
    assert ops._implementation.__wrapped__("swiglu", "swiglu", True).__module__ == "paged_kernels.cpu.pytorch"
    assert "(not compiled): PyTorch is used, which is slower. Fix: run python -m paged_kernels.cpu.build" in caplog.text


USE = """
import logging, os, sys
from pathlib import Path
from paged_kernels.cpu import build, native
{before}
logging.basicConfig()
import torch
try:
    print(native.swiglu(torch.ones(1, 8), level="plain").tolist())
except ValueError as error:
    print(error)
print(*native.levels())
"""


@pytest.fixture
def run_without_plain(compiled_environment, tmp_path):
    """Run a script in a process that has all libraries but that of the level plain."""
    folder = tmp_path / "built"
    folder.mkdir()
    for file in build.BUILT.glob("*.so"):
        if file != build.library("plain"):
            (folder / file.name).symlink_to(file)

    def run(before: str, **environment: str) -> str:
        code = USE.replace("{before}", f"build.BUILT = Path({str(folder)!r})\n{before}")
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=compiled_environment | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    return run


@pytest.mark.nightly
@needs_kernels
def test_level_that_was_not_compiled_is_compiled_on_demand_only(run_without_plain):
    said = run_without_plain("")
    assert "level=plain: not compiled; run python -m paged_kernels.cpu.build plain" in said
    assert "plain" not in said.splitlines()[-1], "a level without a library"
    said = run_without_plain("native.compile_on_demand()", CXX="no-such-compiler")
    assert "level=plain: not compiled" in said
    said = run_without_plain("native.compile_on_demand()")
    assert said.splitlines()[-2].startswith("[[0.73") and "plain" in said.splitlines()[-1]


@needs_kernels
def test_level_is_selected_by_environment_variable(monkeypatch, tmp_path, caplog):
    assert build.build(["plain"]) == {}
    monkeypatch.setenv(native.LEVEL, "plain")
    assert "plain" in native.levels.__wrapped__() and native.level() == "plain"
    monkeypatch.setenv(native.LEVEL, "sse9")
    with pytest.raises(ValueError, match=r"PAGED_CPU_LEVEL=sse9: this machine has .*plain"):
        native.levels.__wrapped__()
    best, path = build.supported()[0], build.library
    monkeypatch.setattr(native, "_compiles", False)
    monkeypatch.setattr(native, "library", lambda name: tmp_path / "missing" if name == best else path(name))
    monkeypatch.setenv(native.LEVEL, best)
    if best != "plain":
        with pytest.raises(ValueError, match=rf"PAGED_CPU_LEVEL={best}: not compiled; run .* {best}"):
            native.levels.__wrapped__()
        monkeypatch.delenv(native.LEVEL)
        with caplog.at_level(logging.WARNING):
            assert best not in native.levels.__wrapped__()
        assert f"This processor has level {best}, which is not compiled; it is faster. Fix: run" in caplog.text
