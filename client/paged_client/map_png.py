"""Draws a block pool into a PNG file, with matplotlib. All lengths are in inches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged_client.map_view import (
    CACHED,
    KINDS,
    OWNED,
    SHARED,
    SHARED_COLOURS,
    Recording,
    colour_of,
    columns_for,
    count_label,
    time_label,
    title,
    usage_label,
)

WIDTH, MARGIN, LARGEST_CELL, CURVE = 10.0, 0.7, 0.3, 1.9
_GREY = "#606060"


def draw(recording: Recording, file: Path, subtitle: str) -> None:
    """Write the picture. Raises OSError if the file cannot be written, ImportError without matplotlib."""
    from matplotlib.figure import Figure

    pool = recording.latest
    columns = columns_for(pool.num_blocks)
    rows = -(-pool.num_blocks // columns)
    room = WIDTH - 2 * MARGIN
    cell = min(LARGEST_CELL, room / columns)
    curve = CURVE + 0.7 if len(recording.points) > 1 else 0.0
    top, legend = 0.95, 0.75
    height = top + rows * cell + legend + curve + 0.2
    figure = Figure(figsize=(WIDTH, height))

    def place(left: float, from_top: float, width: float, high: float) -> Any:
        return figure.add_axes((left / WIDTH, 1 - (from_top + high) / height, width / WIDTH, high / height))

    def write(text: str, from_top: float, **style: Any) -> None:
        figure.text(MARGIN / WIDTH, 1 - from_top / height, text, va="top", **style)

    requests = f"{pool.running} requests running, {pool.waiting} waiting; {usage_label(pool)}"
    write(f"Key/value pool: {title(pool)}", 0.15, fontsize=13, weight="bold")
    write(f"{requests}  ({subtitle}, {time_label(pool)})", 0.45, fontsize=9, color=_GREY, parse_math=False)
    _grid(place(MARGIN, top, columns * cell, rows * cell), recording, columns, cell)
    _legend(place(MARGIN, top + rows * cell + 0.1, room, legend - 0.1), recording)
    if curve:
        _curve(place(MARGIN, height - curve + 0.05, room, CURVE), recording)
    figure.savefig(file, dpi=120, format="png", facecolor="white")


def _grid(axes: Any, recording: Recording, columns: int, cell: float) -> None:
    from matplotlib.colors import to_rgb

    states = recording.latest.states
    rows = -(-len(states) // columns)
    of_state = {state: to_rgb(colour_of(state)) for state in set(states)}
    image = [of_state[state] for state in states] + [(1.0, 1.0, 1.0)] * (rows * columns - len(states))
    axes.imshow(
        [image[start : start + columns] for start in range(0, len(image), columns)], aspect="auto", interpolation="none"
    )
    if cell >= 0.1:  # lines between the cells, and below the reference counts of shared blocks
        for x in range(columns + 1):
            axes.axvline(x - 0.5, color="white", linewidth=1)
        for y in range(rows + 1):
            axes.axhline(y - 0.5, color="white", linewidth=1)
    if cell >= 0.16:
        for block, state in enumerate(states):
            if state in SHARED_COLOURS:
                row, column = divmod(block, columns)
                colour = "black" if state in "23456" else "white"
                axes.text(column, row, state, ha="center", va="center", fontsize=28 * cell, color=colour)
    step = max(1, -(-rows // 12))
    ticks = range(0, rows, step)
    axes.set_yticks(ticks, [f"{row * columns:,}" for row in ticks], fontsize=8, color=_GREY)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("block", loc="left", fontsize=8, color=_GREY, x=0, pad=5, ha="right")


def _legend(axes: Any, recording: Recording) -> None:
    """Draw a swatch, a count and a meaning for each kind; for shared blocks, the scale of reference counts."""
    from matplotlib.patches import Rectangle

    axes.set(xlim=(0, WIDTH - 2 * MARGIN), ylim=(0.65, 0))
    axes.axis("off")
    places = {0: (0.0, 0.0), 1: (2.6, 0.0), 2: (6.1, 0.0), 3: (2.6, 0.3), 4: (0.0, 0.3)}
    for number, kind in enumerate(KINDS):
        left, top = places[number]
        for state in kind.states:
            axes.add_patch(Rectangle((left, top + 0.04), 0.16, 0.16, color=colour_of(state), linewidth=0))
            if kind is SHARED:
                colour = "black" if state in "23456" else "white"
                axes.text(left + 0.08, top + 0.12, state, fontsize=6.5, ha="center", va="center", color=colour)
            left += 0.18
        text = f"{count_label(kind, recording.latest)}: {kind.meaning}"
        axes.text(left + 0.04, top + 0.12, text, fontsize=8.5, va="center")


def _curve(axes: Any, recording: Recording) -> None:
    seconds, points = recording.seconds, recording.points
    used = [100 * point.used for point in points]
    both = [100 * (point.used + point.cached) for point in points]
    axes.fill_between(seconds, used, color=OWNED.colour, linewidth=0, label="used by sequences, % of the blocks")
    axes.fill_between(seconds, used, both, color=CACHED.colour, linewidth=0, label="cached, % of the blocks")
    filled = [float("nan") if point.utilisation is None else 100 * point.utilisation for point in points]
    axes.plot(seconds, filled, color="black", linewidth=1, linestyle="--", label="filled, % of the used slots")
    axes.set(xlim=(0, seconds[-1] or 1), ylim=(0, 100))
    axes.set_yticks((0, 50, 100), ("0%", "50%", "100%"))
    axes.tick_params(labelsize=8, colors=_GREY)
    axes.set_xlabel("seconds", fontsize=8, color=_GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
