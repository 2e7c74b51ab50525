"""How the tests run: in the order of their cost in CPU seconds, within a budget for each package; or without torch.

`tests/costs.json` has the CPU seconds of each test module, with the processes that it starts. Tests that use the same
shared server are one group; every other module is a group of its own. A group runs in one process, the costliest group
first, so that no module that begins late bounds the run. `make quick` leaves out costly modules. `make test
ARGS=--record-costs` records the file again.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[2]
COSTS = ROOT / "tests/costs.json"
# Servers that run until the end of the session, from tests/support/triton.py
SHARED = ("demo_server", "server", "tiny_server", "adapted_server", "two_servers")
MARGIN = 1.5  # times the recorded cost of a package, and the machine's slowness, and
SLACK = 10  # seconds, after which the run fails
TICKS = os.sysconf("SC_CLK_TCK")


def group_of(item: pytest.Item) -> str:
    """Return the name of the group that a test runs in: its shared server or its module."""
    for name in SHARED:
        definitions = item._fixtureinfo.name2fixturedefs.get(name)  # type: ignore[attr-defined]
        if definitions and definitions[-1].scope == "session":
            return name
    return module_of(item)


def module_of(item: pytest.Item) -> str:
    """Return the path of a test's module, relative to the root."""
    return os.path.relpath(item.path, ROOT)


def package_of(module: str) -> str:
    """Return the name of the package that a module's cost counts for."""
    return "/".join(module.split("/")[1:-1][:1]) or "architecture"


def used_seconds() -> float:
    """Return the CPU seconds of this process and of all its descendants, running or ended."""
    seconds, children = {}, defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
        except OSError:  # it has ended
            continue
        values = stat.rpartition(")")[2].split()
        children[int(values[1])].append(int(name))
        seconds[int(name)] = sum(map(int, values[11:15]))
    total, pending = 0, [os.getpid()]
    while pending:
        process = pending.pop()
        total += seconds.get(process, 0)
        pending += children[process]
    return total / TICKS


class Costs:
    """A pytest plugin that orders the tests by cost, and measures it. In a run with several processes each has one."""

    def __init__(self, config: pytest.Config):
        self.recorded: dict[str, float] = json.loads(COSTS.read_text()) if COSTS.exists() else {}
        self.measured: Counter[str] = Counter()
        self._before: float | None = None
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        limit = self._config.getoption("--max-cost")
        if limit is not None:
            cheap: list[pytest.Item] = []
            costly: list[pytest.Item] = []
            for item in items:
                (costly if self.recorded.get(module_of(item), 0) > limit else cheap).append(item)
            self._config.hook.pytest_deselected(items=costly)
            items[:] = cheap
        groups: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            groups[group_of(item)].append(item)
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
        items[:] = [
            item for name in sorted(groups, key=lambda name: -self._cost(groups[name])) for item in groups[name]
        ]

    def _cost(self, items: list[pytest.Item]) -> float:
        return sum(self.recorded.get(name, 0) for name in {module_of(item) for item in items})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if self._before is None:
            self._before = used_seconds()
        result = yield
        if nextitem is None or module_of(nextitem) != module_of(item):
            now = used_seconds()
            # A process that its parent did not wait for takes its seconds with it.
            self.measured[module_of(item)] += max(0, now - self._before)
            self._before = now
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["costs"] = dict(self.measured)
        elif session.config.getoption("--record-costs"):
            merged = {name: seconds for name, seconds in self.recorded.items() if (ROOT / name).exists()}
            merged |= {name: round(seconds, 1) for name, seconds in self.measured.items()}
            COSTS.write_text(json.dumps(merged, indent=0, sort_keys=True) + "\n")
        elif session.config.getoption("--costs") and (exceeded := self.exceeded()):
            session.config.stash[EXCEEDED] = exceeded
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.measured.update(getattr(node, "workeroutput", {}).get("costs", {}))

    def packages(self) -> dict[str, tuple[float, float]]:
        """Return the CPU seconds of each package that ran, and those recorded for the same modules."""
        spent: Counter[str] = Counter()
        budget: Counter[str] = Counter()
        for name, seconds in self.measured.items():
            package = package_of(name)
            spent[package] += seconds
            budget[package] += self.recorded.get(name, 0)
        return {package: (spent[package], budget[package]) for package in sorted(spent)}

    def exceeded(self) -> list[str]:
        """Return a line for each package that costs more than its budget allows.

        Machines differ: the budget of a package grows with the median by which the other packages exceed theirs.
        """
        packages = self.packages()
        ratios = {package: spent / budget for package, (spent, budget) in packages.items() if budget}
        lines = []
        for package, (spent, budget) in packages.items():
            others = [ratio for name, ratio in ratios.items() if name != package]
            limit = MARGIN * budget * max(1, median(others) if others else 1) + SLACK
            if spent > limit:
                lines.append(
                    f"tests/{package}: {spent:.0f} CPU seconds, recorded: {budget:.0f}, limit: {limit:.0f}, most in "
                    f"{self._most_above_record(package)}. Make the tests cheaper, or record their cost: make test "
                    "ARGS=--record-costs"
                )
        return lines

    def _most_above_record(self, package: str) -> str:
        """Return the modules of a package that exceed their recorded cost by the most seconds, with these seconds."""
        above = Counter({
            name: seconds - self.recorded.get(name, 0)
            for name, seconds in self.measured.items()
            if package_of(name) == package
        })  # fmt: skip
        return ", ".join(f"{name.rpartition('/')[2]} ({seconds:+.0f})" for name, seconds in above.most_common(3))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._config.getoption("--costs"):
            terminalreporter.section("CPU seconds (recorded)")
            costs = (f"{package} {spent:.0f} ({budget:.0f})" for package, (spent, budget) in self.packages().items())
            terminalreporter.line(", ".join(costs))
        for line in self._config.stash.get(EXCEEDED, []):
            terminalreporter.line(line, red=True)


EXCEEDED = pytest.StashKey[list[str]]()


class WithoutTorch:
    """A pytest plugin that leaves out the modules and tests that import torch, or start a server, which needs it."""

    BLOCKED = ("torch", "transformers", "triton", "tests.support.triton")

    def __init__(self) -> None:
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self.BLOCKED:
            raise NeedsTorch(f"{name} is left out by --without-torch")

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        report = yield
        error = getattr(report, "call", None) and report.call.excinfo  # type: ignore[attr-defined]
        if error and needs_torch(error.value):
            report.outcome, report.longrepr, report.result = "passed", None, []  # type: ignore[attr-defined]
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        if call.excinfo and needs_torch(call.excinfo.value):
            report.outcome, report.longrepr = "skipped", ("", 0, "Skipped: needs torch")  # type: ignore[attr-defined]
        return report


class NeedsTorch(ImportError):
    """A module that --without-torch leaves out is imported."""


def needs_torch(error: BaseException | None) -> bool:
    """Return whether an error is, or was caused by, an import that --without-torch leaves out."""
    while error is not None and not isinstance(error, NeedsTorch):
        error = error.__cause__ or error.__context__
    return error is not None
