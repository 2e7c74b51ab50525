"""Compilation in processes: what is compiled, and what happens to processes that fail or do not end."""

import subprocess
import sys
from pathlib import Path

from paged_kernels.compilation import FAILED, TOO_LONG, Compiler
from tests.support.stub_kernels import StubVariant
from tests.support.waiting import WAIT, until

VARIANTS = """
import torch
from triton import knobs
from triton.runtime import driver
from paged_kernels.launch import Device
from paged_kernels.compilation import missing_variants
from paged_kernels.layer_ops import plan_swiglu
from tests.support.fake_gpu import FakeDriver

driver.set_active(FakeDriver())
hook = knobs.runtime.jit_cache_hook = lambda **details: None
launches = [plan_swiglu(torch.empty(4, n), torch.empty(4, 2 * n), device=Device("xpu", 1)) for n in (64, 128, 64)]
before = missing_variants(launches), missing_variants(launches)
launches[0].kernel.warmup(**launches[0].arguments, grid=launches[0].grid)
after = missing_variants(launches)
print(before[0] == before[1], len(before[0]), len(set(before[0])), len(after), after[0] == before[0][1])
print(knobs.runtime.jit_cache_hook is hook, {one.name for one in after})
"""
PATIENT = dict(spare_seconds=10.0 * WAIT, max_seconds=10.0 * WAIT)  # limits that no test reaches


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ids_in(file):
    """Wait for the ids that a stub writes."""
    until(lambda: file.exists() and file.read_text().endswith("\n"))
    return [int(one) for one in file.read_text().split()]


def wait_for_end(ids):
    until(lambda: not any(map(is_running, ids)))


def test_variants_are_compiled_once(tmp_path):
    first, second = (StubVariant("compiles", tmp_path / name) for name in "ab")
    with Compiler(2, **PATIENT) as compiler:
        futures = [compiler.submit(variants) for variants in ((first, second), (first, second), ())]
        assert [future.result(WAIT) for future in futures] == [None, None, None]
    assert [len(ids_in(tmp_path / name)) for name in "ab"] == [1, 1]


def test_failing_and_crashing_compilers_do_not_affect_others(tmp_path):
    names = ("fails", "crashes", "compiles", "fails", "compiles")
    with Compiler(1, **PATIENT) as compiler:
        futures = [compiler.submit((StubVariant(name, tmp_path / str(i)),)) for i, name in enumerate(names)]
        assert [future.result(WAIT) for future in futures] == [FAILED, FAILED, None, FAILED, None]
        assert compiler.submit((StubVariant("fails", tmp_path / "0"),)).result(WAIT) == FAILED
    assert len(ids_in(tmp_path / "0")) == 1  # not repeated


def test_compilation_that_takes_much_longer_than_others_is_killed(tmp_path):
    with Compiler(2, spare_seconds=0.1, max_seconds=10 * WAIT) as compiler:
        slow = compiler.submit((StubVariant("never_ends", tmp_path / "slow"),))
        ids = ids_in(tmp_path / "slow")
        assert all(map(is_running, ids))
        assert compiler.submit((StubVariant("compiles", tmp_path / "other"),)).result(WAIT) is None
        assert slow.result(WAIT) == TOO_LONG
        wait_for_end(ids)
        assert compiler.submit((StubVariant("never_ends", tmp_path / "slow"),)) is slow  # not repeated


def test_the_first_compilation_has_a_limit_too(tmp_path):
    with Compiler(1, max_seconds=0.2) as compiler:
        assert compiler.submit((StubVariant("never_ends", tmp_path / "slow"),)).result(WAIT) == TOO_LONG


def test_leaving_kills_the_processes(tmp_path):
    with Compiler(1, **PATIENT) as compiler:
        running = compiler.submit((StubVariant("never_ends", tmp_path / "slow"),))
        waiting = compiler.submit((StubVariant("compiles", tmp_path / "next"),))
        ids = ids_in(tmp_path / "slow")
    wait_for_end(ids)
    assert running.done() and waiting.cancelled()
    assert not (tmp_path / "next").exists()


def test_missing_variants_are_those_that_this_process_has_not_compiled(compiled_environment, tmp_path):
    environment = {**compiled_environment, "TRITON_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", VARIANTS], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.stdout.splitlines() == ["True 3 2 1 True", "True {'swiglu_kernel'}"], ended.stderr
