"""Pictures of figures: horizontal bars with their values, and a caption that says where they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREEN, GREY = "#76b900", "#b0b0b0"


def number(value: float) -> str:
    """Return a figure with three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def panels(count: int, rows: int) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with panels side by side, each with room for so many bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 4.2 * count), 0.8 + 0.32 * rows), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def bars(axes: Axes, values: Mapping[str, float], title: str, *, grey: Sequence[str] = (), unit: str = "") -> None:
    """Draw a bar for each value, the first at the top. grey: names of the bars of others."""
    names = list(values)
    colors = [GREY if name in grey else GREEN for name in names]
    drawn = axes.barh(names, list(values.values()), color=colors, height=0.7)
    labels = [f"{number(value)}{unit}" for value in values.values()]
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # in front of lines
    axes.bar_label(drawn, labels, padding=4, fontsize=8, bbox=background)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if min(values.values(), default=0.0) < 0:
        axes.tick_params(axis="y", pad=36)  # room for the labels of negative bars
        axes.axvline(0, color="black", linewidth=0.8)


def save(figure: Figure, file: Path, caption: str) -> None:
    """Write the picture with its caption below."""
    figure.text(0, 0, caption, fontsize=6, color="#606060", verticalalignment="top")
    figure.savefig(file, dpi=150, bbox_inches="tight")
