"""Draws a block pool as text: a grid of cells, a legend, and usage over time as bars."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn, TextIO

from paged_client.map_view import (
    CACHED,
    FREE,
    KINDS,
    OWNED,
    PINNED,
    SHARED,
    SHARED_ANSI,
    Recording,
    count_label,
    kind_of,
    percent,
    title,
    utilisation_label,
)
from paged_client.types import PoolMap

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # alternate screen without a cursor, and back
_SHADES, _BARS, _ASCII_BARS = "░▒▓█", " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_LABEL = 8  # characters in front of a curve

Piece = tuple[str, str]  # (SGR parameters, text)
Line = list[Piece]


@dataclass(frozen=True)
class Style:
    colour: bool = False
    unicode: bool = True  # whether to draw with Unicode characters instead of ASCII


def frame(recording: Recording, width: int, height: int, style: Style) -> list[str]:
    """Return at most `height` lines of at most `width` characters. In a small window the grid has priority."""
    blocks = 1
    while True:  # repeated because the explanation of larger cells takes room itself
        lines, needed = _compose(recording, width, height, style, blocks)
        if needed <= blocks:
            break
        blocks = needed
    return [_render(line, width, style) for line in lines[:height]]


def _compose(recording: Recording, width: int, height: int, style: Style, blocks: int) -> tuple[list[Line], int]:
    """Return all lines with `blocks` blocks per cell, and how many blocks per cell it takes for the grid to fit.

    If it takes more than `blocks`, the lines have no grid.
    """
    head = _wrap([[("", text)] for text in _head(recording.latest, blocks)], width)
    head = head[: max(1, height // 3)]
    left = height - len(head)
    legend = _wrap(_legend(style, blocks), width) if left >= 8 else []
    left -= len(legend)
    rows = 0 if len(recording.points) < 2 else 3 if left >= 24 else 2 if left >= 14 else 1 if left >= 5 else 0
    curve = _curves(recording, width, rows, style) if rows else []
    grid, needed = _grid(recording.latest, width, max(1, left - len(curve)), style, blocks)
    return head + grid + legend + curve, needed


def _head(pool: PoolMap, blocks: int) -> list[str]:
    counts = [count_label(kind, pool) for kind in KINDS]
    requests = "asleep" if pool.sleeping else f"{pool.running} running, {pool.waiting} waiting"
    scale = [f"a cell is {blocks:,} blocks"] if blocks > 1 else []
    return [title(pool), *counts, requests, utilisation_label(pool), *scale]


def _legend(style: Style, blocks: int) -> list[Line]:
    entries = []
    for kind in KINDS:
        cells = [_shaded(state, style) if blocks > 1 else _cell(state, style) for state in kind.states]
        cells = cells if style.colour or blocks == 1 else cells[:1]
        entries.append([*cells, ("", f" {kind.name}: {kind.meaning}")])
    if blocks > 1:
        shades = style.colour and style.unicode
        entries.append([("", f"{_SHADES}: share in use" if shades else "capitals: more than half of the cell in use")])
    return entries


def _grid(pool: PoolMap, width: int, height: int, style: Style, blocks: int) -> tuple[list[Line], int]:
    """Return the rows of cells, and how many blocks per cell it takes for the grid to fit.

    Each row starts with the id of its first block if there is room. There are no rows if the grid does not fit.
    """
    digits = len(str(pool.num_blocks - 1))
    label = digits + 1 if width >= digits + 9 else 0
    columns = width - label
    columns = min(columns // 8 * 8 or columns, pool.num_blocks)
    needed = -(-pool.num_blocks // (columns * height))
    lines: list[Line] = []
    if needed > blocks:
        return lines, needed
    for start in range(0, pool.num_blocks, columns * blocks):
        row = pool.states[start : start + columns * blocks]
        cells = [_shaded(row[at : at + blocks], style) if blocks > 1 else _cell(row[at], style)
                 for at in range(0, len(row), blocks)]  # fmt: skip
        lines.append([("", f"{start:>{digits}} " if label else ""), *cells])
    return lines, needed


def _cell(state: str, style: Style) -> Piece:
    """Return the cell of one block. The character alone identifies the state; colour repeats it."""
    kind = kind_of(state)
    if kind is FREE:
        return "2", "·" if style.unicode else "."
    if kind is SHARED:
        return f"{30 if state in '23456' else 97};48;5;{SHARED_ANSI[state]}", state
    if kind is PINNED:
        return f"97;48;5;{kind.ansi}", "p"
    plain = ("█" if kind is OWNED else "░") if style.unicode else state
    return f"48;5;{kind.ansi}", " " if style.colour else plain


def _shaded(states: str, style: Style) -> Piece:
    """Return the cell of several blocks: the most common kind among those in use, and the share in use."""
    counts = {kind: kind.count(states) for kind in reversed(KINDS) if kind is not FREE}
    share = sum(counts.values()) / len(states)
    if not share:
        return "2", "·" if style.unicode else "."
    kind = max(counts, key=counts.__getitem__)
    ansi = SHARED_ANSI[max(set(states) & SHARED_ANSI.keys(), key=SHARED.states.index)] if kind is SHARED else kind.ansi
    if style.colour and style.unicode:
        return f"38;5;{ansi}", _SHADES[min(3, int(share * 4))]
    letter = kind.name[0]
    return f"38;5;{ansi}", letter.upper() if share > 0.5 else letter


def _curves(recording: Recording, width: int, rows: int, style: Style) -> list[Line]:
    """Return the curves of used and cached blocks over time, the newest on the right, and a time axis."""
    room = max(1, width - _LABEL - 7)
    lines = []
    used, cached = zip(*((point.used, point.cached) for point in recording.points), strict=True)
    for name, values, kind in (("used", used, OWNED), ("cached", cached, CACHED)):
        bars = _bars(_fit(values, room), rows, _BARS if style.unicode else _ASCII_BARS)
        for number, bar in enumerate(bars):
            last = number == len(bars) - 1
            label = name if last else "100%" if number == 0 else ""
            value = percent(values[-1]) if last else ""
            lines.append([("", f"{label:>{_LABEL - 1}} "), (f"38;5;{kind.ansi}", bar), ("", f" {value}")])
    count = min(room, len(recording.points))
    span = f"the last {recording.seconds[-1]:.1f} s" if count < 40 else f"{recording.seconds[-1]:.1f} s ago"
    lines.append([("", " " * _LABEL + (span if count < 40 else span + "now".rjust(count - len(span))))])
    return lines


def _fit(values: Sequence[float], width: int) -> list[float]:
    """Reduce to at most `width` values by the maximum of each interval, which keeps the peaks."""
    if len(values) <= width:
        return list(values)
    cuts = [len(values) * index // width for index in range(width + 1)]
    return [max(values[a:b]) for a, b in pairwise(cuts)]


def _bars(values: Sequence[float], rows: int, levels: str) -> list[str]:
    """Draw shares of 0 to 1 as bars that are `rows` lines high. A value above zero is always visible."""
    steps = [max(round(value * rows * 8), 1 if value else 0) for value in values]
    return ["".join(levels[min(8, max(0, step - 8 * row))] for step in steps) for row in reversed(range(rows))]


def _wrap(items: Sequence[Line], width: int) -> list[Line]:
    """Place items side by side, two spaces apart, and wrap them into lines."""
    lines: list[Line] = []
    for item in items:
        if lines and _length(lines[-1]) + 2 + _length(item) <= width:
            lines[-1] = [*lines[-1], ("", "  "), *item]
        else:
            lines.append(item)
    return lines


def _length(line: Line) -> int:
    return sum(len(text) for _, text in line)


def _render(line: Line, width: int, style: Style) -> str:
    """Truncate a line to `width`, and add escape sequences where the colour changes."""
    parts, last, left = [], "", width
    for sgr, text in line:
        text = text[:left]
        left -= len(text)
        if style.colour and text and sgr != last:
            parts.append(f"\x1b[0;{sgr}m" if sgr else "\x1b[0m")
            last = sgr
        parts.append(text)
    return "".join([*parts, "\x1b[0m" * bool(last)]).rstrip(" ")


def terminal_size() -> tuple[int, int]:
    """Return columns and lines of the terminal, else COLUMNS and LINES of the environment, else 80 and 40."""
    size = shutil.get_terminal_size((80, 40))
    return size.columns, size.lines


def watch(poll: Callable[[], PoolMap], interval: float, out: TextIO, style: Style) -> NoReturn:
    """Redraw in place until Ctrl-C, or until a poll fails. Restores the terminal at the end."""
    recording = Recording()
    out.write(_ENTER)
    try:
        while True:
            recording.add(poll())
            due = time.monotonic() + interval
            size = _draw(recording, out, style)
            while (left := due - time.monotonic()) > 0:
                time.sleep(min(0.1, left))
                if terminal_size() != size:
                    size = _draw(recording, out, style)
    finally:
        out.write(_LEAVE)
        out.flush()


def _draw(recording: Recording, out: TextIO, style: Style) -> tuple[int, int]:
    """Draw over the previous frame with a single write, which avoids flicker.

    The last column stays empty: some terminals erase it when they clear the rest of a full line.
    """
    columns, height = terminal_size()
    lines = frame(recording, max(1, columns - 1), height, style)
    out.write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")
    out.flush()
    return columns, height
