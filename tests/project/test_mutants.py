"""Mutation tests: with each fault of tests/support/mutants.py, one of the scheduling tests must fail."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from random import SystemRandom

import pytest

from tests.support.mutants import BEAM_SEARCH, DISK, ENDLESS, MUTANTS, RARE, ROOT, found_by, mutated_source
from tests.support.stress import table

NO_SHRINKING = (
    "from hypothesis import Phase, settings; settings.register_profile('first', phases=[Phase.generate]);"
    " settings.load_profile('first')"
)


QUICK = [mutant for mutant in MUTANTS if mutant not in RARE]
SAMPLE = QUICK[::8]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_about_code_in_the_source(mutant):
    """The replaced source occurs once, and its replacement compiles."""
    compile(mutated_source(mutant), mutant, "exec")


def test_documented_number_of_mutants():
    expected = f"{len(SAMPLE)} must be found in `make test`, and all {len(MUTANTS)} in `make nightly`"
    assert expected in (ROOT / "docs/guides/test.md").read_text()


@pytest.mark.parametrize(
    ("mutants", "first"),
    [
        pytest.param(SAMPLE, lambda: 0, id="sample"),
        pytest.param(QUICK, lambda: SystemRandom().randrange(2**32), id="all", marks=pytest.mark.nightly),
    ],
)
def test_stress_kills_quick_mutants(mutants, first, figures):
    """Random load detects most mutants within seconds, with seeds that find nothing without a mutant. The nightly run
    starts from a random seed."""
    seed = first()
    figures(f"seeds from {seed}")
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        found = dict(zip(mutants, processes.map(found_by, mutants, repeat(seed)), strict=True))
        assert [mutant for mutant, cause in found.items() if cause is None] == []
        last = max(int(re.match(r"seed (\d+): ", cause)[1]) for cause in found.values())
        unmutated = processes.submit(found_by, None, seed, last + 1 - seed).result()
    assert unmutated is None, "the stress test fails without a mutant"
    figures(f"{len(found)} of {len(mutants)} mutants detected")
    table.record("mutants killed", len(found), of=len(mutants))


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", RARE)
def test_rare_mutant_is_killed_by_unit_tests(tmp_path, mutant):
    table.record("mutants killed", 0, of=1)
    for name in ("paged_backend", "tests", "kernels", "client", "paged_bench"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = MUTANTS[mutant][0]
    (tmp_path / "paged_backend" / file).write_text(mutated_source(mutant))
    names = sorted(file.stem for file in (ROOT / "tests/scheduling").glob("test_*.py"))
    without_models = [f"scheduling/{name}" for name in names if name not in ("test_beam_search", "test_speculation")]
    modules = [
        *without_models,
        "server/test_sessions",
        *(["scheduling/test_beam_search"] if file == BEAM_SEARCH else []),
    ]
    options = ["-x", "-q", "-p", "no:cacheprovider"]
    for random_test in (
        "scheduling/test_block_manager.py::test_hypothesis_rules",
        "scheduling/test_block_manager.py::test_seeded_rules",
    ):
        options += ["--deselect", f"tests/{random_test}"]
    if file == DISK:
        modules = ["memory/test_block_file", "engine/test_prefix_tiers"]
    options += [f"tests/{module}.py" for module in modules]
    command = [sys.executable, "-c", f"{NO_SHRINKING}; import pytest; raise SystemExit(pytest.main({options}))"]
    paths = f"{tmp_path}:{tmp_path}/kernels:{tmp_path}/client"
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    with contextlib.suppress(*([subprocess.TimeoutExpired] if mutant in ENDLESS else [])):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 1, done.stdout[-2000:]
    table.record("mutants killed", 1)
