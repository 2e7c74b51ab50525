"""Shared by all tests: no network access, costs, reports of long tests, and the tiny models of most engine tests.

Nothing here imports torch or transformers before a test needs them: seconds, for each process.
"""

import json
import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests.support import pairwise
from tests.support.runs import Costs, WithoutTorch
from tests.support.stress import table
from tests.support.support_matrix import PAGE, Records, SupportMatrix, read_page

FIGURES = pytest.StashKey[list[str]]()
MATRIX = pytest.StashKey[Records]()


@pytest.fixture
def figures(pytestconfig, request):
    """A function that reports a line at the end of the run, such as what the test has counted."""
    return lambda text: pytestconfig.stash.setdefault(FIGURES, []).append(f"{request.node.name}: {text}")


@pytest.fixture
def print_line(pytestconfig):
    """A function that prints a line at once. With several test processes it is not shown."""
    reporter = pytestconfig.pluginmanager.getplugin("terminalreporter")
    return lambda text: reporter and reporter.write_line(f"    {text}")


@pytest.fixture(scope="session", autouse=True)
def no_earlier_starts(tmp_path_factory):
    """Each model that is loaded in this process is verified: its user's directory is new."""
    from paged_backend.utils import machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "user_cache_directory", lambda: tmp_path_factory.mktemp("user"))
        yield


@pytest.fixture(scope="session")
def support_matrix(pytestconfig):
    """What the tests of model families record their results with."""
    is_recorded = pytestconfig.getoption("--support-matrix") is not None
    matrix = SupportMatrix(None if is_recorded else read_page(PAGE.read_text()))
    pytestconfig.stash[MATRIX] = matrix.records
    return matrix


@pytest.fixture
def hours(pytestconfig):
    """The hours that a long test may take."""
    return pytestconfig.getoption("--hours")


@pytest.fixture
def until(hours):
    """The time.monotonic() at which a long test has to end."""
    return time.monotonic() + 3600 * hours


@pytest.fixture
def in_time(until):
    """A function that yields items until the time of a long test is over, and at least one."""

    def some(items):
        for item in items:
            yield item
            if time.monotonic() > until:
                return

    return some


def pytest_configure(config):
    pairwise.nightly = pairwise.includes_nightly(config.getoption("markexpr"))
    config.pluginmanager.register(Costs(config), "costs")
    if config.getoption("--without-torch"):
        config.pluginmanager.register(WithoutTorch(), "without_torch")


def pytest_addoption(parser):
    parser.addoption("--costs", action="store_true", help="print CPU seconds, and fail if a package exceeds its budget")
    parser.addoption("--record-costs", action="store_true", help="write the CPU seconds to tests/costs.json")
    parser.addoption("--without-torch", action="store_true", help="leave out the tests that import torch")
    parser.addoption(
        "--max-cost", type=float, help="leave out the modules whose recorded cost is higher, in CPU seconds"
    )
    sizes = "sizes of the stress tests: 'cycles=20 restarts=10 responses=300000'; also killed, left, held, preemptions"
    parser.addoption("--stress", "--storm", default="", help=sizes)
    longest = "time limit of each long test, in hours"
    parser.addoption("--hours", type=float, default=1.0, help=longest)
    recorded = "write the results of the support matrix to this JSON file instead of comparing them with the page"
    parser.addoption("--support-matrix", type=Path, metavar="FILE", help=recorded)


def pytest_sessionfinish(session):
    stash = session.config.stash
    if (report := getattr(session.config, "workeroutput", None)) is not None:
        report["figures"], report["table"] = stash.get(FIGURES, []), table.state()
        report["matrix"] = stash.get(MATRIX, Records()).dump()
    elif file := session.config.getoption("--support-matrix"):
        file.write_text(json.dumps(stash.get(MATRIX, Records()).dump()))


def pytest_runtest_setup(item):
    if item.get_closest_marker("ranks"):
        import torch

        if torch.cuda.is_available():
            pytest.skip("a GPU is visible; tests/distributed/test_beside_gpus.py runs this test without")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Collect the reports of a test process that has ended."""
    if report := getattr(node, "workeroutput", None):
        node.config.stash.setdefault(FIGURES, []).extend(report["figures"])
        node.config.stash.setdefault(MATRIX, Records()).add(Records.parse(report["matrix"]))
        table.add(report["table"])


def pytest_terminal_summary(terminalreporter, config):
    if lines := config.stash.get(FIGURES, []):
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.line(line)
    if table.rows:
        terminalreporter.section("stress tests")
        terminalreporter.line(table.text())
    if goals := table.goals():
        terminalreporter.section("goals")
        terminalreporter.line(goals)


@pytest.fixture(params=[pytest.param(False, id="sync", marks=pytest.mark.nightly), pytest.param(True, id="async")])
def async_scheduling(request, monkeypatch):
    """Schedule each step before the last is committed. Nightly the test runs without that, too, as most others do."""
    from tests.support.in_process import TINY

    monkeypatch.setitem(TINY, "async_scheduling", request.param)
    return request.param


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """(directory, model): three layers with grouped-query attention and random fp32 weights."""
    from transformers import LlamaConfig

    from tests.support.in_process import save_tiny

    directory = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return directory, save_tiny(config, directory)


@pytest.fixture(scope="session")
def draft(tmp_path_factory):
    """The directory of a tiny draft model with the same vocabulary, whose draft tokens are mostly rejected."""
    from transformers import LlamaConfig

    from tests.support.in_process import save_tiny

    directory = tmp_path_factory.mktemp("draft")
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256,
    )  # fmt: skip
    save_tiny(config, directory)
    return directory
