"""What every picture of a pool has in common: the kinds of blocks, their colours, and the use of the pool over time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from math import ceil, sqrt

from client.types import PoolMap

MAX_POINTS = 10_000  # of a curve; older ones go


@dataclass(frozen=True)
class Kind:
    name: str
    meaning: str
    states: str  # the characters of PoolMap.states that are of this kind
    colour: str  # "#rrggbb"
    ansi: int  # the nearest of a terminal's 256

    def count(self, states: str) -> int:
        return sum(map(states.count, self.states))


FREE = Kind("free", "holds nothing", ".", "#e9ecef", 250)
CACHED = Kind("cached", "nobody's, kept for its content", "c", "#a6cee3", 110)
OWNED = Kind("owned", "held by one", "1", "#1f78b4", 26)
SHARED = Kind("shared", "held by so many, + more than 9", "23456789+", "#fc8d59", 209)
PINNED = Kind("pinned", "kept by a session", "p", "#c51b8a", 162)
KINDS = (FREE, CACHED, OWNED, SHARED, PINNED)

# Shared blocks by their holders: the more, the darker.
SHARED_COLOURS = dict(
    zip(SHARED.states, "#fdd49e #fdbb84 #fc8d59 #f4764f #ef6548 #d7301f #b30000 #990000 #7f0000".split(), strict=True)
)
SHARED_ANSI = dict(zip(SHARED.states, (223, 216, 209, 208, 202, 196, 160, 124, 88), strict=True))

_OF_STATE = {state: kind for kind in KINDS for state in kind.states}


def kind_of(state: str) -> Kind:
    return _OF_STATE[state]


def colour_of(state: str) -> str:
    return SHARED_COLOURS.get(state) or kind_of(state).colour


def count_label(kind: Kind, pool: PoolMap) -> str:
    """ "12 cached (4.7%)" """
    count = kind.count(pool.states)
    return f"{count:,} {kind.name} ({percent(count / pool.num_blocks)})"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def time_label(pool: PoolMap) -> str:
    return datetime.fromtimestamp(pool.time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def utilisation_label(pool: PoolMap) -> str:
    return "no slots held" if pool.utilisation is None else f"{percent(pool.utilisation)} of the slots held are filled"


def title(pool: PoolMap) -> str:
    blocks, tokens = _plural(pool.num_blocks, "block"), _plural(pool.block_size, "token")
    return f"{blocks} of {tokens}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def columns_for(num_blocks: int) -> int:
    """How wide to make a grid, in round numbers: one row, or so many that it is wider than high."""
    if num_blocks <= 32:
        return num_blocks
    return 8 * ceil(sqrt(num_blocks * (4 if num_blocks <= 2048 else 2)) / 8)


@dataclass(frozen=True)
class Point:
    """One moment of a curve: shares, 0 to 1."""

    time: float  # seconds
    used: float  # of the pool's blocks
    cached: float  # likewise
    utilisation: float | None  # of the used blocks' slots, those that hold a token


class Recording:
    """The latest map, and what of those before it a curve needs."""

    def __init__(self, *pools: PoolMap) -> None:
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)
        for pool in pools:
            self.add(pool)

    def add(self, pool: PoolMap) -> None:
        self.latest = pool
        used, cached = pool.used / pool.num_blocks, pool.cached / pool.num_blocks
        self.points.append(Point(pool.time, used, cached, pool.utilisation))

    @property
    def seconds(self) -> list[float]:
        """Of each point, from the first. A server's clock that was set back counts as standing still."""
        latest = start = self.points[0].time
        return [(latest := max(latest, point.time)) - start for point in self.points]
