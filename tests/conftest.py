"""Shared by all tests: no network, few threads, and a tiny model that most engine tests use."""

import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from transformers import LlamaConfig

from tests.support.in_process import TINY, save_tiny
from tests.support.stress import table

FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def figures(pytestconfig, request):
    """Call it with what a test has counted: it is told at the end of the run."""
    return lambda text: pytestconfig.stash.setdefault(FIGURES, []).append(f"{request.node.name}: {text}")


@pytest.fixture
def tell(pytestconfig):
    """Call it with a line that is to be seen at once; where tests run in several processes nobody sees it."""
    reporter = pytestconfig.pluginmanager.getplugin("terminalreporter")
    return lambda text: reporter and reporter.write_line(f"    {text}")


@pytest.fixture
def hours(pytestconfig):
    """That a long test may take."""
    return pytestconfig.getoption("--hours")


@pytest.fixture
def until(hours):
    """When a long test has had them, by the monotonic clock."""
    return time.monotonic() + 3600 * hours


@pytest.fixture
def in_time(until):
    """Of what is to be tried, all that a long test has the time for, and at least one."""

    def some(items):
        for item in items:
            yield item
            if time.monotonic() > until:
                return

    return some


def pytest_addoption(parser):
    sizes = "sizes of the stress tests: 'cycles=20 restarts=10 responses=300000'; also killed, left, held, preemptions"
    parser.addoption("--stress", "--storm", default="", help=sizes)
    longest = "hours that each long test goes on at the most, where what it is to reach takes longer"
    parser.addoption("--hours", type=float, default=1.0, help=longest)


def pytest_sessionfinish(session):
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told["figures"], told["table"] = session.config.stash.get(FIGURES, []), table.state()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """One of the processes that tests run in has come to its end."""
    if told := getattr(node, "workeroutput", None):
        node.config.stash.setdefault(FIGURES, []).extend(told["figures"])
        table.add(told["table"])


def pytest_terminal_summary(terminalreporter, config):
    if told := config.stash.get(FIGURES, []):
        terminalreporter.section("figures")
        for line in told:
            terminalreporter.line(line)
    if table.rows:
        terminalreporter.section("stress tests")
        terminalreporter.line(table.text())
    if told := table.goals():
        terminalreporter.section("goals")
        terminalreporter.line(told)


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def planning(request, monkeypatch):
    """Tests that take it run twice: with each step committed before the next is planned, and after."""
    monkeypatch.setitem(TINY, "async_scheduling", request.param)
    return request.param


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """(directory, model): three layers of grouped-query attention with random weights, in fp32."""
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
    """Another tiny model of the same tokens, which guesses badly."""
    directory = tmp_path_factory.mktemp("draft")
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256,
    )  # fmt: skip
    save_tiny(config, directory)
    return directory
