"""The pool as text: a grid of cells, a legend, and its use over time as bars."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn, TextIO

from client.map_view import (
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
from client.types import PoolMap

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # a screen of its own, without a cursor; and back
_SHADES, _BARS, _ASCII_BARS = "░▒▓█", " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_LABEL = 8  # characters before a curve

Piece = tuple[str, str]  # (SGR parameters, text)
Line = list[Piece]


@dataclass(frozen=True)
class Style:
    colour: bool = False
    unicode: bool = True  # else ASCII


def frame(recording: Recording, width: int, height: int, style: Style) -> list[str]:
    """At most `height` lines of at most `width` characters. Where there is little room the grid comes first."""
    blocks = 1
    while True:  # what is said of larger cells takes room itself
        lines, needed = _compose(recording, width, height, style, blocks)
        if needed <= blocks:
            break
        blocks = needed
    return [_render(line, width, style) for line in lines[:height]]


def _compose(recording: Recording, width: int, height: int, style: Style, blocks: int) -> tuple[list[Line], int]:
    """All lines with so many blocks a cell, and how many it takes for all to fit: where that is more, there is no
    grid."""
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
    requests = f"{pool.running} running, {pool.waiting} waiting"
    each = [f"a cell is {blocks:,} blocks"] if blocks > 1 else []
    return [title(pool), *counts, requests, utilisation_label(pool), *each]


def _legend(style: Style, blocks: int) -> list[Line]:
    made = []
    for kind in KINDS:
        cells = [_shaded(state, style) if blocks > 1 else _cell(state, style) for state in kind.states]
        cells = cells if style.colour or blocks == 1 else cells[:1]
        made.append([*cells, ("", f" {kind.name}: {kind.meaning}")])
    if blocks > 1:
        shades = style.colour and style.unicode
        made.append([("", f"{_SHADES}: the fuller" if shades else "capitals: more than half of the cell")])
    return made


def _grid(pool: PoolMap, width: int, height: int, style: Style, blocks: int) -> tuple[list[Line], int]:
    """Rows of cells, each with the number of its first block where there is room; and how many blocks a cell must be
    for all of them to fit."""
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
    """One block. Without colour the character tells, in colour it is told once more."""
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
    """Many blocks: the kind that most of them are, the free ones aside, and the share that is not free."""
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
    """Blocks held and cached over time, the newest on the right, and the time that they span."""
    room = max(1, width - _LABEL - 7)
    lines = []
    held, cached = zip(*((point.used, point.cached) for point in recording.points), strict=True)
    for name, values, kind in (("held", held, OWNED), ("cached", cached, CACHED)):
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
    """At most `width` values: where there are more, the highest of each stretch, so that no peak is lost."""
    if len(values) <= width:
        return list(values)
    cuts = [len(values) * index // width for index in range(width + 1)]
    return [max(values[a:b]) for a, b in pairwise(cuts)]


def _bars(values: Sequence[float], rows: int, levels: str) -> list[str]:
    """Shares of 0 to 1 as bars that are `rows` lines high; what is not zero shows."""
    steps = [max(round(value * rows * 8), 1 if value else 0) for value in values]
    return ["".join(levels[min(8, max(0, step - 8 * row))] for step in steps) for row in reversed(range(rows))]


def _wrap(items: Sequence[Line], width: int) -> list[Line]:
    """Items side by side, two spaces apart, on as many lines as that takes."""
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
    """Cut to `width`; pieces of one colour are written as one."""
    made, last, left = [], "", width
    for sgr, text in line:
        text = text[:left]
        left -= len(text)
        if style.colour and text and sgr != last:
            made.append(f"\x1b[0;{sgr}m" if sgr else "\x1b[0m")
            last = sgr
        made.append(text)
    return "".join([*made, "\x1b[0m" * bool(last)]).rstrip(" ")


def terminal_size() -> tuple[int, int]:
    """Columns and lines: of the terminal, else COLUMNS and LINES of the environment, else 80 and 40."""
    size = shutil.get_terminal_size((80, 40))
    return size.columns, size.lines


def watch(poll: Callable[[], PoolMap], interval: float, out: TextIO, style: Style) -> NoReturn:
    """Draw in place until Ctrl-C, or until a poll fails; the terminal is then as it was."""
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
    """One write a frame, over the one before: nothing flickers. The last column stays empty, as some terminals erase
    it together with the rest of a full line."""
    columns, height = terminal_size()
    lines = frame(recording, max(1, columns - 1), height, style)
    out.write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")
    out.flush()
    return columns, height
