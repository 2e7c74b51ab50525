"""What a run has come to, beside the goals of `make test` and `make nightly`: one table at its end. Rows come from the
tests that did the work, so what did not run has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.stress.checker import Verdict

GROWTH_SECONDS = 60.0  # of a soak, from which on its memory tells something

rows: list[tuple[str, str, str]] = []  # storm, what, how much


@dataclass
class Goal:
    """enough: so many are to be done; below: what was measured, the worst counts; p99: the same, but for one of a
    hundred; none: of what was tried nothing goes wrong."""

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
                return f"as asked of make {name}"
        return f"{self.total / self.test:.0%} of what make test is asked" if self.kind == "enough" else "above"


def _goals(*goals: Goal) -> dict[str, Goal]:
    return {goal.what: goal for goal in goals}


GOALS = _goals(
    Goal("block manager: steps that hypothesis chooses", "enough", 200_000, 1_000_000),
    Goal("block manager: steps that seeds choose", "enough", 2_000_000, 50_000_000),
    Goal("mistakes on purpose that are found", "enough", 20, 50),
    Goal("bad requests", "enough", 20_000, 1_000_000),
    Goal("bad requests without an error that says whose it is", "none", 0, 0),
    Goal("streams killed", "enough", 5_000, 250_000),
    Goal("requests held", "enough", 10_000, 20_000, "at once"),
    Goal("requests with tokens, not ended", "enough", 2_000, 5_000, "at once"),
    Goal("responses of a soak", "enough", 300_000, 100_000_000),
    Goal("preemptions", "enough", 2_000, 200_000),
    Goal("wrong tokens", "none", 0, 0),
    Goal("requests lost, or with two ends", "none", 0, 0),
    Goal("leaks of blocks, memory, files, threads, after each storm", "none", 0, 0),
    Goal("growth in a soak's second half, of the process that grows most", "below", 2, 1 / 60, "MiB/min"),
    Goal("models unloaded and loaded, or replaced, under load", "enough", 20, 500),
    Goal("servers stopped or killed, and started again", "enough", 10, 200),
    Goal("client gone -> blocks free, p99, after a response or over gRPC", "p99", 100, 100, "ms"),
    Goal("tokens found in the cache under another salt, by probes", "none", 0, 0),
)


def done(what: str, count: float, of: int = 0) -> None:
    GOALS[what].done.append(count)
    GOALS[what].tried += of


def book(storm: str, seed: int, verdict: Verdict, figures: dict[str, float] | None = None) -> None:
    """Keep what a storm has come to."""
    figures = figures or {}
    counts: dict[str, object] = {
        "seed": seed,
        "requests": verdict.requests,
        "responses": verdict.responses,
        "tokens compared": verdict.tokens,
        "streams killed": verdict.killed.total(),
        "open at once": verdict.most_open,
        "of them with tokens": verdict.most_begun,
        "problems": len(verdict.problems),
    }
    if verdict.idle_seconds is not None:
        counts["seconds to idle, at the most"] = f"{verdict.idle_seconds:.2f}"
    if verdict.stopped_seconds is not None:
        counts["seconds from the last stream to the end"] = f"{verdict.stopped_seconds:.2f}"
    for who, seconds in verdict.freed.items():
        counts[f"ms until blocks are free, {who}, p50"] = f"{1e3 * share(seconds, 0.5):.1f}"
        counts[f"ms until blocks are free, {who}, p99 of {len(seconds):,}"] = f"{1e3 * share(seconds, 0.99):.1f}"
    counts |= {name: f"{value:.4g}" if value % 1 else int(value) for name, value in figures.items()}
    rows.extend((storm, name, str(value)) for name, value in counts.items())
    _reach(storm, verdict, figures)


def _reach(storm: str, verdict: Verdict, figures: dict[str, float]) -> None:
    found = [problem.kind for problem in verdict.problems]
    done("wrong tokens", found.count("wrong token"), verdict.tokens)
    done("requests lost, or with two ends", found.count("lost") + found.count("double terminal"), verdict.requests)
    if verdict.idle_seconds is not None:
        done("leaks of blocks, memory, files, threads, after each storm", found.count("leak"), 1)
    if verdict.killed:
        done("streams killed", verdict.killed.total())
    done("requests held", verdict.most_open)
    done("requests with tokens, not ended", verdict.most_begun)
    if "preemptions" in figures:
        done("preemptions", figures["preemptions"])
    if storm == "leave":
        for seconds in verdict.freed.get("noticed", ()):
            done("client gone -> blocks free, p99, after a response or over gRPC", 1e3 * seconds)
    if storm == "soak":
        done("responses of a soak", verdict.responses)
        slopes = [slope for name, slope in figures.items() if name.startswith("MiB/min")]
        if slopes and figures["seconds"] >= GROWTH_SECONDS:
            done("growth in a soak's second half, of the process that grows most", max(slopes))
    if storm == "reload":
        done("models unloaded and loaded, or replaced, under load", figures["unloaded and loaded"])


def state() -> dict[str, Any]:
    """All that was kept, in plain types: for another process, which adds it to its own."""
    return {"rows": rows, "goals": {what: (goal.done, goal.tried) for what, goal in GOALS.items()}}


def add(state: dict[str, Any]) -> None:
    rows.extend(tuple(row) for row in state["rows"])
    for what, (done, tried) in state["goals"].items():
        GOALS[what].done += done
        GOALS[what].tried += tried


def bound(wrong: int, tried: int) -> str:
    """Of so many that went wrong; where none did, with what that says of those that were not tried."""
    if wrong or not tried:
        return f"{wrong:,} of {tried:,}"
    return f"0 of {tried:,}: under {100 * (1 - 0.05 ** (1 / tried)):.2g}% at 95%"


def share(values: Sequence[float], part: float) -> float:
    """The value that so large a part does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def text() -> str:
    """What each storm came to."""
    return _columns(rows)


def goals() -> str:
    """The goals that a run has done something for."""
    told = [goal.cells() for goal in GOALS.values() if goal.done]
    return _columns([("", "goal, make test", "goal, make nightly", "this run", ""), *told]) if told else ""


def _columns(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:.3g}"
