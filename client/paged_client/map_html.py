"""Draws a block pool as a self-contained HTML page: a canvas with tooltips, a legend, and usage over time as SVG."""

from __future__ import annotations

import json
from html import escape

from paged_client.map_view import (
    CACHED,
    KINDS,
    OWNED,
    SHARED_COLOURS,
    Recording,
    colour_of,
    columns_for,
    count_label,
    time_label,
    title,
    utilisation_label,
)

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 960, 180, 44, 24  # size of the curve and room for its axes, in pixels


def page(recording: Recording, subtitle: str) -> str:
    """Return the HTML page. All text from the caller and the server is escaped."""
    pool = recording.latest
    colours = {state: colour_of(state) for kind in KINDS for state in kind.states}
    data = {
        "states": pool.states,
        "columns": columns_for(pool.num_blocks),
        "kinds": {state: kind.name for kind in KINDS for state in kind.states},
        "colours": colours,
    }
    values = {
        "TITLE": escape(f"Key/value pool: {title(pool)}"),
        "SUBTITLE": escape(
            f"{pool.running} requests running, {pool.waiting} waiting; {utilisation_label(pool)};"
            f" since the server started {pool.cached_tokens_hit:,} cached prompt tokens were reused and"
            f" {pool.preemptions:,} requests preempted ({subtitle}, {time_label(pool)})"
        ),
        "LEGEND": "".join(_legend_entry(recording, number) for number in range(len(KINDS))),
        "CURVE": _curve(recording) if len(recording.points) > 1 else "",
        "DATA": _json_in_script(data),
    }
    parts = _PAGE.split("@@")  # alternating text and placeholder names
    return "".join(values[part] if number % 2 else part for number, part in enumerate(parts))


def _json_in_script(data: object) -> str:
    """Return JSON that is safe in a script element, which only "</script" and "<!--" could end or change."""
    return json.dumps(data).replace("<", "\\u003c")


def _legend_entry(recording: Recording, number: int) -> str:
    kind = KINDS[number]
    swatches = "".join(
        f'<i style="background:{colour_of(state)};color:{"#000" if state in "23456" else "#fff"}">'
        f"{state if state in SHARED_COLOURS else ''}</i>"
        for state in kind.states
    )
    return f"<li>{swatches} <b>{escape(count_label(kind, recording.latest))}</b>: {escape(kind.meaning)}</li>"


def _curve(recording: Recording) -> str:
    """Return the chart: used and cached blocks stacked, and the share of used slots that is filled as a line."""
    points, seconds = list(recording.points), recording.seconds
    span = seconds[-1] or 1.0
    right, low = _WIDTH - 12, _HEIGHT - _BOTTOM

    def at(second: float, share: float) -> str:
        return f"{_LEFT + (right - _LEFT) * second / span:.1f},{8 + (low - 8) * (1 - share):.1f}"

    used = [at(second, point.used) for second, point in zip(seconds, points, strict=True)]
    both = [at(second, point.used + point.cached) for second, point in zip(seconds, points, strict=True)]
    floor = [at(seconds[-1], 0), at(0, 0)]
    runs: list[list[str]] = [[]]
    for second, point in zip(seconds, points, strict=True):
        if point.utilisation is None:
            runs.append([])
        else:
            runs[-1].append(at(second, point.utilisation))
    lines = "".join(f'<polyline points="{" ".join(run)}" class="filled"/>' for run in runs if run)
    ticks = "".join(
        f'<line x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}" class="rule"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{name}</text>'
        for name, y in (("100%", 8), ("50%", (8 + low) // 2), ("0%", low))
    )
    return f"""<h2>Usage over {span:.1f} seconds</h2>
<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="pool usage over time">
<polygon points="{" ".join([*both, *reversed(used)])}" fill="{CACHED.colour}"/>
<polygon points="{" ".join([*used, *floor])}" fill="{OWNED.colour}"/>
{ticks}{lines}
<text x="{_LEFT}" y="{_HEIGHT - 6}">0 s</text>
<text x="{right}" y="{_HEIGHT - 6}" text-anchor="end">{span:.1f} s</text>
</svg>
<ul><li><i style="background:{OWNED.colour}"></i> used by sequences, share of the blocks</li>
<li><i style="background:{CACHED.colour}"></i> cached, share of the blocks</li>
<li><i class="dash"></i> filled, share of the used slots</li></ul>"""


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>@@TITLE@@</title>
<style>
body { max-width: 960px; margin: 2em auto; padding: 0 1em; font: 15px/1.45 system-ui, sans-serif; color: #222;
  background: #fff }
h1 { font-size: 1.4em; margin: 0 } h2 { font-size: 1.1em; margin: 1.5em 0 0 }
p { color: #606060; margin: .3em 0 1em }
ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2em 1.5em }
i { display: inline-block; width: 1.1em; height: 1.1em; margin-right: 1px; vertical-align: -.15em; font: .75em/1.5em
  sans-serif; text-align: center }
i.dash { height: 0; border-top: 2px dashed #000; vertical-align: .25em }
canvas { width: 100%; display: block } svg { width: 100%; font-size: 12px; fill: #606060 }
.rule { stroke: #ccc } .filled { fill: none; stroke: #000; stroke-dasharray: 5 3 }
#tip { position: absolute; display: none; padding: .2em .6em; border-radius: 4px; background: #222; color: #fff;
  pointer-events: none; white-space: nowrap }
</style>
</head>
<body>
<h1>@@TITLE@@</h1>
<p>@@SUBTITLE@@</p>
<canvas id="grid" role="img" aria-label="the blocks of the pool, in the order of block ids"></canvas>
<div id="tip"></div>
<noscript>The grid of blocks needs JavaScript.</noscript>
<ul>@@LEGEND@@</ul>
@@CURVE@@
<script type="application/json" id="data">@@DATA@@</script>
<script>
"use strict";
const { states, columns, kinds, colours } = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("grid"), tip = document.getElementById("tip");
const rows = Math.ceil(states.length / columns);
let cell, over = -1;

function describe(block) {
  const state = states[block];
  const users = { ".": "not used", "c": "not used, in the prefix cache", "1": "used by 1 sequence",
    "+": "used by more than 9 sequences", "p": "kept by a session" }[state] || `used by ${state} sequences`;
  return `block ${block}: ${kinds[state]}, ${users}`;
}

function draw() {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  cell = Math.min(28, width / columns);
  canvas.width = Math.round(width * scale);
  canvas.height = Math.ceil(cell * rows * scale);
  canvas.style.height = `${cell * rows}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = `${cell * .55}px sans-serif`;
  const gap = cell > 6 ? 1 : 0;
  for (let block = 0; block < states.length; block++) {
    const state = states[block], x = block % columns * cell, y = Math.floor(block / columns) * cell;
    context.fillStyle = colours[state];
    context.fillRect(x, y, cell - gap, cell - gap);
    if (cell >= 14 && kinds[state] === "shared") {
      context.fillStyle = "23456".includes(state) ? "#000" : "#fff";
      context.fillText(state, x + cell / 2, y + cell / 2);
    }
    if (block === over) {
      context.strokeStyle = "#000";
      context.lineWidth = 2;
      context.strokeRect(x, y, cell - gap, cell - gap);
    }
  }
}

canvas.addEventListener("pointermove", (event) => {
  const column = Math.floor(event.offsetX / cell), block = Math.floor(event.offsetY / cell) * columns + column;
  const found = column < columns && block >= 0 && block < states.length;
  tip.style.display = found ? "block" : "none";
  if (found) {
    tip.textContent = describe(block);
    tip.style.left = `${Math.min(event.pageX + 12, document.documentElement.clientWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${event.pageY + 16}px`;
  }
  if ((found ? block : -1) !== over) {
    over = found ? block : -1;
    if (states.length <= 5000) draw();
  }
});
canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; over = -1; draw(); });
window.addEventListener("resize", draw);
draw();
</script>
</body>
</html>
"""
