"""How the tests run: pairwise parameters, the order by cost, budgets, and the selection without torch."""

import itertools
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.support import pairwise as module
from tests.support import runs
from tests.support.pairwise import mostly_nightly, pairwise
from tests.support.runs import MARGIN, ROOT, SLACK, Costs

AXES = (range(4), "abc", (None, 1.5), range(5))


@pytest.fixture
def nightly(monkeypatch):
    """Sets whether the run includes nightly tests."""
    return lambda value: monkeypatch.setattr(module, "nightly", value)


def test_every_two_values_occur_together(nightly):
    nightly(False)
    chosen = [parameter.values for parameter in pairwise(*AXES)]
    for one, other in itertools.combinations(range(len(AXES)), 2):
        assert {(each[one], each[other]) for each in chosen} == set(itertools.product(AXES[one], AXES[other]))
    assert len(chosen) < 30


def test_every_combination_occurs_nightly(nightly):
    nightly(True)
    found = pairwise(*AXES)
    assert sorted(map(repr, (one.values for one in found))) == sorted(map(repr, itertools.product(*AXES)))
    marked = [one for one in found if one.marks]
    nightly(False)
    assert len(found) - len(marked) == len(pairwise(*AXES))


def test_only_the_default_selection_has_no_nightly_parameters(pytestconfig):
    assert not module.includes_nightly(pytestconfig.getini("addopts")[1])
    selections = re.findall("pytest -m ('.*?'|nightly)", (ROOT / "Makefile").read_text())
    assert len(selections) == 2, "make nightly and make matrix"
    assert all(module.includes_nightly(one.strip("'")) for one in selections)


def test_other_values_are_nightly(nightly):
    nightly(False)
    assert [one.values for one in mostly_nightly("abcd", default="db")] == [("b",), ("d",)]
    nightly(True)
    assert [(one.values, bool(one.marks)) for one in mostly_nightly("abcd", default="db")] == [
        (("a",), True),
        (("b",), False),
        (("c",), True),
        (("d",), False),
    ]


@pytest.fixture
def costs(pytestconfig, monkeypatch):
    monkeypatch.setattr(pytestconfig.option, "max_cost", None)
    made = Costs(pytestconfig)
    made.recorded = {"tests/api/test_a.py": 20.0, "tests/api/test_b.py": 4.0, "tests/test_c.py": 1.0}
    return made


def test_a_package_over_its_budget_is_named(costs):
    costs.measured.update({"tests/api/test_a.py": 20.0, "tests/api/test_b.py": 4.0 * MARGIN, "tests/test_c.py": 1.0})
    assert costs.exceeded() == []
    costs.measured["tests/api/test_new.py"] = 24 * MARGIN + SLACK
    (line,) = costs.exceeded()
    assert line.startswith("tests/api: 72 CPU seconds, recorded: 24, limit: 46, most in test_new.py (+46), ")


def test_budgets_grow_on_a_slow_machine(costs):
    costs.measured.update({"tests/api/test_a.py": 60.0, "tests/api/test_b.py": 12.0, "tests/test_c.py": 3.0})
    assert costs.exceeded() == []
    costs.measured["tests/api/test_new.py"] = 24 * 3 * (MARGIN - 1) + SLACK + 1
    assert len(costs.exceeded()) == 1


def test_only_modules_that_ran_are_in_the_budget(costs):
    costs.measured.update({"tests/api/test_b.py": 4.0 * MARGIN + SLACK + 1})
    assert len(costs.exceeded()) == 1


def item(path, *, server=None):
    """Return what is used of a test's item. server: a fixture of this name, of this scope."""
    definitions = {} if server is None else {server[0]: [SimpleNamespace(scope=server[1])]}
    info = SimpleNamespace(name2fixturedefs=definitions)
    return SimpleNamespace(path=ROOT / path, _fixtureinfo=info, add_marker=lambda mark: None)


def test_costly_groups_come_first_and_stay_together(costs):
    cheap, costly, other = (item(f"tests/{name}.py") for name in ("test_c", "api/test_a", "api/test_b"))
    shared = [item(f"tests/e2e/test_{name}.py", server=("server", "session")) for name in "xy"]
    own = item("tests/e2e/test_x.py", server=("server", "module"))
    costs.recorded |= {"tests/e2e/test_x.py": 5.0, "tests/e2e/test_y.py": 50.0}
    items = [shared[0], cheap, own, other, costly, shared[1]]
    costs.pytest_collection_modifyitems(items)
    assert items == [*shared, costly, own, other, cheap]


def test_costly_modules_are_left_out(costs, pytestconfig, monkeypatch):
    monkeypatch.setattr(pytestconfig.option, "max_cost", 4)
    cheap, costly, new = (item(f"tests/{name}.py") for name in ("api/test_b", "api/test_a", "api/test_new"))
    items = [costly, cheap, new]
    costs.pytest_collection_modifyitems(items)
    assert items == [cheap, new]


def test_used_seconds_count_processes_that_run_and_that_have_ended():
    before = runs.used_seconds()
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        running = runs.used_seconds()
        process.communicate(b"\n")
    assert running - before > 0.25
    assert runs.used_seconds() >= running


def test_modules_and_tests_that_import_torch_are_left_out(tmp_path):
    (tmp_path / "test_one.py").write_text("import torch\ndef test_module(): pass\n")
    (tmp_path / "test_two.py").write_text(
        "def test_late():\n    import torch\ndef test_free(): pass\ndef test_broken():\n    import torch_is_missing\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rootdir={ROOT}",
        f"--confcutdir={ROOT}",
    ]
    command += ["-c", str(ROOT / "pyproject.toml"), "--without-torch", "-rfs", str(tmp_path)]
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed, 1 skipped" in done.stdout, done.stdout
    assert "test_broken" in done.stdout


def test_a_group_runs_in_one_process():
    """pytest-xdist finds the groups in the names of tests, which depends on the version of pytest."""
    modules = ["tests/api/test_request.py", "tests/api/test_secrets.py"]
    command = [sys.executable, "-m", "pytest", "-v", "--numprocesses=2", "--dist=loadgroup", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *modules], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for name in modules:
        assert len(set(re.findall(rf"\[(gw\d+)\].*{name}", done.stdout))) == 1, done.stdout
