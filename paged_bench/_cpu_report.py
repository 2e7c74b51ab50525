"""Compares the figures of `paged bench cpu` with their targets, as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paged_bench._cpu_scenarios import DECODE, LESS_IS_BETTER
from paged_bench._report import Record


def target_share(record: Record) -> float | None:
    """Return the share of its target that a figure reaches, at least 1 if it is met; None without target or figure."""
    if record.target is None or record.value is None:
        return None
    return record.target / record.value if record.unit in LESS_IS_BETTER else record.value / record.target


def target_report(records: Sequence[Record]) -> Iterator[str]:
    """Yield a line for each target: whether it is reached, or by how much it is missed."""
    for record in records:
        if record.target is None:
            continue
        if record.value is None:
            unmeasured, _, reason = record.unit.partition(": ")
            yield f"{unmeasured:16} {record.name}: {reason}"
            continue
        side = "at most" if record.unit in LESS_IS_BETTER else "at least"
        met = (target_share(record) or 0.0) >= 1
        result = "reached" if met else f"missed by {100 * abs(record.value / record.target - 1):.0f}%"
        yield f"{result:16} {record.name}: {record.value:.4g} of {side} {record.target:g} {record.unit}"


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    """Draw the parts of a decode step beside its lower bound, and the share of each target."""
    from matplotlib.figure import Figure

    targets = [one for one in records if target_share(one) is not None][::-1]
    figure = Figure(figsize=(12, max(4, 0.3 * len(targets))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 2])
    _draw_step(left, [one for one in records if one.unit == "ms" and one.name.startswith(f"{DECODE}: ")])
    shares = [target_share(one) or 0.0 for one in targets]
    colours = ["#76b900" if share >= 1 else "#d08030" for share in shares]
    labels = [f"{one.name} ({'≤' if one.unit in LESS_IS_BETTER else '≥'} {one.target:g} {one.unit})" for one in targets]
    bars = right.barh(labels, shares, color=colours)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # in front of the line of the targets
    right.bar_label(bars, [f"{one.value:.3g}" for one in targets], padding=4, fontsize=7, bbox=background)
    right.axvline(1, color="black", linewidth=1, zorder=0.5)
    right.set_title("share of each target", fontsize=9)
    right.tick_params(labelsize=7)
    right.spines[["top", "right"]].set_visible(False)
    figure.text(0, -0.04, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")


def _draw_step(axes: Any, parts: Sequence[Record]) -> None:
    is_bound = [": least for " in one.name for one in parts]
    for place, bound in enumerate((False, True)):
        height = 0.0
        for one in (one for one, is_one in zip(parts, is_bound, strict=True) if is_one == bound):
            value = one.value or 0.0
            axes.bar(place, value, bottom=height, label=f"{one.name.partition(': ')[2]} {value:.1f}")
            height += value
        axes.annotate(f"{height:.1f} ms", (place, height), ha="center", va="bottom", fontsize=8)
    axes.set_xticks([0, 1], ["paged", "bytes / bandwidth"], fontsize=8)
    axes.set_title(f"{DECODE}, ms", fontsize=9)
    axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
