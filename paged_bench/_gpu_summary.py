"""The figures of a run of `make bench-gpu`, beside those of an earlier run that the repository keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paged_bench._chart import number

# Figures to show even if the earlier run does not have them.
SHOWN = re.compile(r"output_throughput |load to ready|KV cache |kernels compiled |.*\((vLLM|FlashInfer)\)$")


@dataclass(frozen=True)
class Figure:
    """A figure of two runs. An earlier one may have several values: of rounds, or the lowest and the highest."""

    unit: str
    earlier: Sequence[float] = ()
    now: float | None = None

    @property
    def cells(self) -> tuple[str, str, str]:
        """The earlier value, the current one and the unit, as they are shown."""
        low, high = (min(self.earlier), max(self.earlier)) if self.earlier else (None, None)
        earlier = _shown(low) if low == high else f"{_shown(low)} to {_shown(high)}"
        return earlier, _shown(self.now), self.unit


def _shown(value: float | None) -> str:
    return "-" if value is None else number(value)


def measured(out: Path, steps: Sequence[str]) -> dict[str, tuple[float, str]]:
    """Return value and unit of each figure in the files of the steps; a step that was stopped may have some of them.

    Figures of other contestants have their name in brackets. If several steps have a figure, the later ones have the
    name of the step in brackets.
    """
    found: dict[str, tuple[float, str]] = {}
    for step in steps:
        file = out / f"{step}.json"
        mine: dict[str, tuple[float, str]] = {}
        for record in json.loads(file.read_text())["records"] if file.exists() else []:
            if record["value"] is not None:
                mine[record["name"]] = (record["value"], record["unit"])
            mine |= {f"{record['name']} ({who})": (value, record["unit"]) for who, value in record["peers"].items()}
        found |= {f"{name} [{step}]" if name in found else name: value for name, value in mine.items()}
    return found


def compare(earlier: Mapping[str, Any], now: Mapping[str, tuple[float, str]]) -> dict[str, Figure]:
    """Return the figures of both runs by name, the earlier ones first. Those of different units are different.

    earlier: `figures` of its file.
    """
    figures = {name: Figure(one["unit"], one["values"]) for name, one in earlier.items()}
    for name, (value, unit) in now.items():
        if name in figures and figures[name].unit != unit:
            name = f"{name} [{unit}]"
        figures[name] = replace(figures.get(name, Figure(unit)), now=value)
    return figures


def table(figures: Mapping[str, Figure]) -> str:
    """Return the figures that the earlier run has, and those of SHOWN, as a table."""
    rows = [("", "earlier", "now", "")]
    rows += [(name, *one.cells) for name, one in figures.items() if one.earlier or SHOWN.match(name)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:{widths[0]}}  {before:>{widths[1]}}  {now:>{widths[2]}}  {unit}".rstrip()
        for name, before, now, unit in rows
    )


def summarize(out: Path, steps: Sequence[str], earlier: Path) -> str:
    """Write the figures of both runs to summary.json in `out`, and return the table.

    earlier: the file with the figures of the earlier run.
    """
    before = json.loads(earlier.read_text())
    figures = compare(before["figures"], measured(out, steps))
    rows = {name: {"unit": one.unit, "earlier": list(one.earlier), "now": one.now} for name, one in figures.items()}
    about = {key: before[key] for key in ("commit", "gpu")}
    (out / "summary.json").write_text(json.dumps({"earlier": about, "figures": rows}, indent=2) + "\n")
    return f"earlier: {about['gpu']}, {about['commit']}\n{table(figures)}"
