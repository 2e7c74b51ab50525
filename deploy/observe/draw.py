"""Draw the dashboards from the data of a Prometheus, as pictures for the documentation.

`python deploy/observe/draw.py http://localhost:9090 docs/results` writes one PNG per dashboard.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from deploy.observe.dashboards import COLUMNS, DASHBOARDS, Dashboard, Panel, filled_in

SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_number(value: float) -> str:
    """Return a number with three digits and a letter for thousands, millions or billions."""
    for scale, letter in SCALES:
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


# How values are written, by Grafana's name of the unit.
UNITS: dict[str, Callable[[float], str]] = {
    "short": format_number,
    "s": lambda value: f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms",
    "ops": lambda value: f"{format_number(value)}/s",
    "reqps": lambda value: f"{format_number(value)}/s",
    "percentunit": lambda value: f"{value:.0%}",
    "bytes": lambda value: f"{format_number(value)}B",
}


def read(url: str, query: str, *, end: float, seconds: float, step: float) -> list[dict[str, Any]]:
    """Return the series of a query over `seconds` until `end`, one value every `step` seconds."""
    parameters = {"query": query, "start": end - seconds, "end": end, "step": step}
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(parameters)}") as reply:
        return json.load(reply)["data"]["result"]


@dataclass(frozen=True)
class Line:
    """A series: seconds relative to now, and a value for each."""

    name: str
    times: list[float]
    values: list[float]


def draw(dashboard: Dashboard, url: str, *, seconds: float, step: float, window: str) -> plt.Figure:
    """Draw one dashboard, without lines that are always 0, and panels without lines.

    window: the time over which rates are computed, such as "20s".
    """
    now = time.time()
    found = [(panel, _lines(panel, url, now, seconds, step, window)) for panel in dashboard.panels]
    drawn = [(panel, lines) for panel, lines in found if lines]
    rows = -(-len(drawn) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(13, 2.6 * rows), squeeze=False, layout="constrained")
    figure.suptitle(dashboard.title)
    for (panel, lines), ax in zip(drawn, axes.flat, strict=False):
        _draw_panel(ax, panel, lines)
        ax.set_xlim(-seconds, 0)
    for ax in list(axes.flat)[len(drawn) :]:
        ax.set_visible(False)
    return figure


def _lines(panel: Panel, url: str, now: float, seconds: float, step: float, window: str) -> list[Line]:
    lines = []
    for legend, query in panel.queries.items():
        for one in read(url, filled_in(query, window), end=now, seconds=seconds, step=step):
            name = re.sub(r"{{(\w+)}}", lambda label, one=one: one["metric"].get(label[1], ""), legend)
            points = [(float(at) - now, float(value)) for at, value in one["values"] if value != "NaN"]
            if any(value for _, value in points):
                lines.append(Line(name, [at for at, _ in points], [value for _, value in points]))
    return lines


def _draw_panel(ax: Axes, panel: Panel, lines: list[Line]) -> None:
    ax.set_title(panel.title, fontsize=10, loc="left")
    if panel.stacked:
        times = sorted({at for line in lines for at in line.times})
        rows = [[dict(zip(line.times, line.values, strict=True)).get(at, 0.0) for at in times] for line in lines]
        ax.stackplot(times, rows, labels=[line.name for line in lines], alpha=0.7)
        highest = max(map(sum, zip(*rows, strict=True)))
    else:
        for line in lines:
            ax.plot(line.times, line.values, label=line.name)
        highest = max(value for line in lines for value in line.values)
    format_value = UNITS[panel.unit]
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    columns = min(4, len(lines))
    ax.set_ylim(0, highest * (1 + 0.16 * (1 + -(-len(lines) // columns))))  # with room for the legend
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7, loc="upper left", ncols=columns)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the dashboards from the data of a Prometheus.")
    parser.add_argument("url", help="http://HOST:PORT of Prometheus")
    parser.add_argument("directory", type=Path, help="for the pictures")
    parser.add_argument("--seconds", type=float, default=300, help="time range (default: %(default)s)")
    parser.add_argument("--step", type=float, default=5, help="seconds between two values (default: %(default)s)")
    parser.add_argument("--window", default="30s", help="time over which rates are computed (default: %(default)s)")
    args = parser.parse_args()
    for dashboard in DASHBOARDS:
        figure = draw(dashboard, args.url, seconds=args.seconds, step=args.step, window=args.window)
        figure.savefig(args.directory / f"{dashboard.uid}.png", dpi=80)
        plt.close(figure)


if __name__ == "__main__":
    main()
