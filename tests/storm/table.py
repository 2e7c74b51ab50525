"""The figures of storms, as one table at the end of a run."""

from __future__ import annotations

from tests.storm.checker import Verdict

rows: list[tuple[str, str, str]] = []  # storm, what, how much


def book(storm: str, seed: int, verdict: Verdict, figures: dict[str, float] | None = None) -> None:
    """Keep what a storm has come to."""
    counts: dict[str, object] = {
        "seed": seed,
        "requests": verdict.requests,
        "responses": verdict.responses,
        "tokens compared": verdict.tokens,
        "streams killed": verdict.killed.total(),
        "problems": len(verdict.problems),
    }
    if verdict.idle_seconds is not None:
        counts["seconds to idle, at the most"] = f"{verdict.idle_seconds:.2f}"
    if verdict.stopped_seconds is not None:
        counts["seconds from the last stream to the end"] = f"{verdict.stopped_seconds:.2f}"
    counts |= {name: f"{value:.4g}" if value % 1 else int(value) for name, value in (figures or {}).items()}
    rows.extend((storm, name, str(value)) for name, value in counts.items())


def text() -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
