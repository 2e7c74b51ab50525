"""Mutation tests: with each fault of tests/support/mutants.py, one of the scheduling tests must fail."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import SystemRandom

import pytest

from tests.support.mutants import (
    BEAM_SEARCH,
    DISK,
    ENDLESS,
    FIRST,
    LATE,
    MUTANTS,
    RARE,
    ROOT,
    STORES,
    found_by,
    mutated_source,
)
from tests.support.stress import table

NO_SHRINKING = (
    "from hypothesis import Phase, settings; settings.register_profile('first', phases=[Phase.generate]);"
    " settings.load_profile('first')"
)


QUICK = [mutant for mutant in MUTANTS if mutant not in RARE]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_about_code_in_the_source(mutant):
    """The replaced source occurs once, and its replacement compiles."""
    compile(mutated_source(mutant), mutant, "exec")


def test_documented_number_of_mutants():
    expected = f"The tests must find all of them: {len(QUICK)} in `make test`, and {len(MUTANTS)} in `make nightly`"
    assert expected in (ROOT / "docs/guides/test.md").read_text()


@pytest.mark.parametrize(
    "first", [lambda: FIRST, pytest.param(lambda: SystemRandom().randrange(2**32), marks=pytest.mark.nightly)]
)
def test_stress_kills_quick_mutants(first, figures):
    """Random load detects most mutants within seconds, with seeds that find nothing without a mutant. The nightly run
    starts from a random seed."""
    seed = first()
    figures(f"seeds from {seed}")
    usual = range(seed, seed + 120)
    seeds = [(LATE[mutant], *usual) if seed == FIRST and mutant in LATE else usual for mutant in QUICK]
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        found = dict(zip(QUICK, processes.map(found_by, QUICK, seeds), strict=True))
        assert [mutant for mutant, cause in found.items() if cause is None] == []
        killing = {int(re.match(r"seed (\d+): ", cause)[1]) for cause in found.values()}
        unmutated = processes.submit(found_by, None, sorted(killing)).result()
    assert unmutated is None, "the stress test fails without a mutant"
    figures(f"{len(found)} of {len(QUICK)} mutants detected")
    table.record("mutants killed", len(found), of=len(QUICK))


def unit_tests_of(file):
    """The test files that find a rare mutant of a file."""
    if file in (DISK, STORES):
        return ("kv/stores/test_block_file", "engine/test_prefix_stores")
    slow = {"test_speculation"} if file == BEAM_SEARCH else {"test_speculation", "test_beam_search"}
    names = sorted(file.stem for file in (ROOT / "tests/scheduling").glob("test_*.py"))
    of_blocks = (f"kv/test_{name}" for name in ("blocks", "content", "host", "pages", "pins", "scores", "states"))
    return ("api/test_block_layout", *of_blocks, *(f"scheduling/{name}" for name in names if name not in slow),
            "server/prompts/test_sessions")  # fmt: skip


def run_unit_tests(modules, directory, mutant=None):
    """Run these tests of a copy of the project, with a mutant in it, up to the first failure."""
    for name in ("paged_backend", "tests", "kernels", "client", "paged_bench"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant:
        (directory / "paged_backend" / MUTANTS[mutant][0]).write_text(mutated_source(mutant))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:costs"]  # costs: would fail without a failed test
    options += [f"tests/{module}.py" for module in modules]
    command = [sys.executable, "-c", f"{NO_SHRINKING}; import pytest; raise SystemExit(pytest.main({options}))"]
    paths = f"{directory}:{directory}/kernels:{directory}/client"
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.nightly
@pytest.mark.parametrize("modules", sorted({unit_tests_of(MUTANTS[mutant][0]) for mutant in RARE}), ids=len)
def test_unit_tests_pass_without_a_mutant(tmp_path, modules):
    """The control of each selection: what fails with a mutant must fail because of it."""
    done = run_unit_tests(modules, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", RARE)
def test_rare_mutant_is_killed_by_unit_tests(tmp_path, mutant):
    table.record("mutants killed", 0, of=1)
    modules = unit_tests_of(MUTANTS[mutant][0])
    with contextlib.suppress(*([subprocess.TimeoutExpired] if mutant in ENDLESS else [])):
        done = run_unit_tests(modules, tmp_path, mutant)
        assert done.returncode == 1, done.stdout[-2000:]
    table.record("mutants killed", 1)
