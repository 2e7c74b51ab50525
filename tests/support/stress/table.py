"""A table of the figures of a test run, next to the goals of `make test` and `make nightly`.

The tests add the rows, so tests that did not run have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.stress.checker import Verdict

GROWTH_SECONDS = 60.0  # minimum duration of a soak test whose memory growth is meaningful

rows: list[tuple[str, str, str]] = []  # stress test, name of the figure, value


@dataclass
class Goal:
    """A goal of the test runs.

    Kinds: "enough" is a minimum number; "below" is a maximum for the worst measurement; "p99" is a maximum for the 99th
    percentile; "none" means that nothing that was tried may fail.
    """

    what: str
    kind: Literal["enough", "below", "p99", "none"]
    test: float
    nightly: float
    unit: str = ""
    done: list[float] = field(default_factory=list)
    tried: int = 0

    @property
    def total(self) -> float:
        if self.kind == "p99":
            return share(self.done, 0.99)
        return max(self.done, default=0) if self.kind == "below" or self.unit == "at once" else sum(self.done)

    def cells(self) -> tuple[str, ...]:
        sign = "< " if self.kind in ("below", "p99") else ""
        goals = [f"{sign}{_number(goal)} {self.unit}".strip() for goal in (self.test, self.nightly)]
        if self.kind == "none":
            return self.what, *goals, f"{self.tried:,} tried", bound(int(self.total), self.tried)
        done = f"{_number(self.total)} {self.unit}".strip()
        if self.kind == "p99":
            done += f", {len(self.done):,} times"
        elif self.tried:
            done += f" of {self.tried:,}"
        return self.what, *goals, done, self._result()

    def _result(self) -> str:
        for name, goal in (("nightly", self.nightly), ("test", self.test)):
            if self.total >= goal if self.kind == "enough" else self.total < goal:
                return f"meets make {name}"
        return f"{self.total / self.test:.0%} of the goal of make test" if self.kind == "enough" else "above"


def _goals(*goals: Goal) -> dict[str, Goal]:
    return {goal.what: goal for goal in goals}


GOALS = _goals(
    Goal("page pool: operations compared with a model", "enough", 10_000, 1_000_000),
    Goal("mutants killed", "enough", 90, 150),
    Goal("bad requests", "enough", 180, 1_000_000),
    Goal("bad requests without an error class", "none", 0, 0),
    Goal("streams killed", "enough", 60, 250_000),
    Goal("concurrent requests", "enough", 100, 20_000, "at once"),
    Goal("concurrent requests with tokens", "enough", 32, 5_000, "at once"),
    Goal("responses of a soak", "enough", 200, 100_000_000),
    Goal("preemptions", "enough", 10, 200_000),
    Goal("wrong tokens", "none", 0, 0),
    Goal("requests lost, or finished twice", "none", 0, 0),
    Goal("leaks of blocks, memory, files, threads, after each stress test", "none", 0, 0),
    Goal("memory growth in the second half of a soak, worst process", "below", 2, 1 / 60, "MiB/min"),
    Goal("models reloaded or replaced under load", "enough", 0, 500),
    Goal("servers stopped or killed, and restarted", "enough", 0, 200),
    Goal("disconnect to blocks free, p99, after a response or over gRPC", "p99", 100, 100, "ms"),
    Goal("cache hits under another salt, by probes", "none", 0, 0),
)


def record(what: str, count: float, of: int = 0) -> None:
    GOALS[what].done.append(count)
    GOALS[what].tried += of


def add_run(test: str, seed: int, verdict: Verdict, figures: dict[str, float] | None = None) -> None:
    """Add the figures of a stress test."""
    figures = figures or {}
    counts: dict[str, object] = {
        "seed": seed,
        "requests": verdict.requests,
        "responses": verdict.responses,
        "tokens compared": verdict.tokens,
        "streams killed": verdict.killed.total(),
        "open at once": verdict.most_open,
        "of them with tokens": verdict.most_with_tokens,
        "problems": len(verdict.problems),
    }
    if verdict.idle_seconds is not None:
        counts["seconds to idle, at the most"] = f"{verdict.idle_seconds:.2f}"
    if verdict.stopped_seconds is not None:
        counts["seconds from the last stream to the end"] = f"{verdict.stopped_seconds:.2f}"
    for kind, seconds in verdict.freed.items():
        counts[f"ms until blocks are free, {kind}, p50"] = f"{1e3 * share(seconds, 0.5):.1f}"
        counts[f"ms until blocks are free, {kind}, p99 of {len(seconds):,}"] = f"{1e3 * share(seconds, 0.99):.1f}"
    counts |= {name: f"{value:.4g}" if value % 1 else int(value) for name, value in figures.items()}
    rows.extend((test, name, str(value)) for name, value in counts.items())
    _record_goals(test, verdict, figures)


def _record_goals(test: str, verdict: Verdict, figures: dict[str, float]) -> None:
    found = [problem.kind for problem in verdict.problems]
    record("wrong tokens", found.count("wrong token"), verdict.tokens)
    record("requests lost, or finished twice", found.count("lost") + found.count("double terminal"), verdict.requests)
    if verdict.idle_seconds is not None:
        record("leaks of blocks, memory, files, threads, after each stress test", found.count("leak"), 1)
    if verdict.killed:
        record("streams killed", verdict.killed.total())
    record("concurrent requests", verdict.most_open)
    record("concurrent requests with tokens", verdict.most_with_tokens)
    if "preemptions" in figures:
        record("preemptions", figures["preemptions"])
    if test == "leave":
        for seconds in verdict.freed.get("noticed", ()):
            record("disconnect to blocks free, p99, after a response or over gRPC", 1e3 * seconds)
    if test == "soak":
        record("responses of a soak", verdict.responses)
        slopes = [slope for name, slope in figures.items() if name.startswith("MiB/min")]
        if slopes and figures["seconds"] >= GROWTH_SECONDS:
            record("memory growth in the second half of a soak, worst process", max(slopes))
    if test == "reload":
        record("models reloaded or replaced under load", figures["unloaded and loaded"])


def state() -> dict[str, Any]:
    """Return all rows and goals in plain types, for the process that collects them."""
    return {"rows": rows, "goals": {what: (goal.done, goal.tried) for what, goal in GOALS.items()}}


def add(state: dict[str, Any]) -> None:
    rows.extend(tuple(row) for row in state["rows"])
    for what, (done, tried) in state["goals"].items():
        GOALS[what].done += done
        GOALS[what].tried += tried


def bound(wrong: int, tried: int) -> str:
    """Return a failure count; without failures, with the 95% upper bound of the failure rate."""
    if wrong or not tried:
        return f"{wrong:,} of {tried:,}"
    return f"0 of {tried:,}: under {100 * (1 - 0.05 ** (1 / tried)):.2g}% at 95%"


def share(values: Sequence[float], part: float) -> float:
    """Return the value that a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def text() -> str:
    """Return the figures of all stress tests."""
    return _columns(rows)


def goals() -> str:
    """Return the goals for which there are figures."""
    described = [goal.cells() for goal in GOALS.values() if goal.done]
    return _columns([("", "goal, make test", "goal, make nightly", "this run", ""), *described]) if described else ""


def _columns(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:.3g}"
