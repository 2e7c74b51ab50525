"""The tests of sharing, held against themselves: each of these mistakes must make one of them fail."""

import contextlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from random import SystemRandom

import pytest

from tests.support.mutants import BEAMS, DISK, ENDLESS, MUTANTS, RARE, ROOT, changed, found_by
from tests.support.stress import table

NO_SHRINKING = (
    "from hypothesis import Phase, settings; settings.register_profile('first', phases=[Phase.generate]);"
    " settings.load_profile('first')"
)


QUICK = [mistake for mistake in MUTANTS if mistake not in RARE]


@pytest.mark.parametrize("mistake", MUTANTS)
def test_mutant_is_about_code_in_the_source(mistake):
    """Once, and what takes its place can be read."""
    compile(changed(mistake), mistake, "exec")


def test_documented_number_of_mutants():
    told = f"{len(QUICK)} must be found in `make test`, and all {len(MUTANTS)} in `make nightly`"
    assert told in (ROOT / "docs/guides/test.md").read_text()


@pytest.mark.parametrize(
    "first", [lambda: 0, pytest.param(lambda: SystemRandom().randrange(2**32), marks=pytest.mark.nightly)]
)
def test_stress_kills_quick_mutants(first, figures):
    """Most mistakes, within seconds; at night with seeds that nobody has tried."""
    seed = first()
    figures(f"seeds from {seed}")
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        nothing, *causes = processes.map(found_by, [None, *QUICK], repeat(seed))
    assert nothing is None, "a storm fails without a mistake"
    found = dict(zip(QUICK, causes, strict=True))
    assert [mistake for mistake, by in found.items() if by is None] == []
    figures(f"{len(found)} of {len(QUICK)} mistakes found")
    table.done("mistakes on purpose that are found", len(found), of=len(QUICK))


@pytest.mark.nightly
@pytest.mark.parametrize("mistake", RARE)
def test_rare_mutant_is_killed_by_unit_tests(tmp_path, mistake):
    table.done("mistakes on purpose that are found", 0, of=1)
    for name in ("paged_backend", "tests", "kernels", "client", "paged_bench"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = MUTANTS[mistake][0]
    (tmp_path / "paged_backend" / file).write_text(changed(mistake))
    modules = [
        "scheduling/test_scheduler",
        "scheduling/test_accounts",
        "scheduling/test_adapter_slots",
        "server/test_sessions",
        *(["scheduling/test_beam_search"] if file == BEAMS else []),
        "scheduling/test_sharing",
        "scheduling/test_block_manager",
    ]
    options = ["-x", "-q", "-p", "no:cacheprovider"]
    for storm in ("test_block_manager.py::test_whatever", "test_sharing.py::test_any_storm"):
        options += ["--deselect", f"tests/scheduling/{storm}"]
    options += [f"tests/{module}.py" for module in (["memory/test_disk"] if file == DISK else modules)]
    command = [sys.executable, "-c", f"{NO_SHRINKING}; import pytest; raise SystemExit(pytest.main({options}))"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{tmp_path}/kernels", "PYTHONDONTWRITEBYTECODE": "1"}
    with contextlib.suppress(*([subprocess.TimeoutExpired] if mistake in ENDLESS else [])):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 1, done.stdout[-2000:]
    table.done("mistakes on purpose that are found", 1)
