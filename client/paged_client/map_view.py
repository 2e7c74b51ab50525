"""The parts that all pictures of a block pool share: block kinds, colours, and pool usage over time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from math import ceil, sqrt

from paged_client.types import PoolMap

MAX_POINTS = 10_000  # maximum points of a curve; older ones are dropped


@dataclass(frozen=True)
class BlockKind:
    """A kind of block: its states in PoolMap.states, its name and its colour."""

    name: str
    meaning: str
    states: str  # characters of PoolMap.states
    colour: str  # "#rrggbb"
    ansi: int  # nearest colour of a 256-colour terminal

    def count(self, states: str) -> int:
        return sum(map(states.count, self.states))


FREE = BlockKind("free", "empty", ".", "#e9ecef", 250)
CACHED = BlockKind("cached", "unreferenced, in the prefix cache", "c", "#a6cee3", 110)
OWNED = BlockKind("owned", "used by 1 sequence", "1", "#1f78b4", 26)
SHARED = BlockKind("shared", "used by 2-9, + for more", "23456789+", "#fc8d59", 209)
PINNED = BlockKind("pinned", "kept by a session", "p", "#c51b8a", 162)
KINDS = (FREE, CACHED, OWNED, SHARED, PINNED)

# Blocks with more references are darker.
SHARED_COLOURS = dict(
    zip(SHARED.states, "#fdd49e #fdbb84 #fc8d59 #f4764f #ef6548 #d7301f #b30000 #990000 #7f0000".split(), strict=True)
)
SHARED_ANSI = dict(zip(SHARED.states, (223, 216, 209, 208, 202, 196, 160, 124, 88), strict=True))

_OF_STATE = {state: kind for kind in KINDS for state in kind.states}


def kind_of(state: str) -> BlockKind:
    return _OF_STATE[state]


def colour_of(state: str) -> str:
    return SHARED_COLOURS.get(state) or kind_of(state).colour


def count_label(kind: BlockKind, pool: PoolMap) -> str:
    """Return a text such as "12 cached (4.7%)"."""
    count = kind.count(pool.states)
    return f"{count:,} {kind.name} ({percent(count / pool.num_blocks)})"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def time_label(pool: PoolMap) -> str:
    return datetime.fromtimestamp(pool.time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def utilisation_label(pool: PoolMap) -> str:
    return "no slots used" if pool.utilisation is None else f"{percent(pool.utilisation)} of the used slots are filled"


def title(pool: PoolMap) -> str:
    blocks, tokens = _plural(pool.num_blocks, "block"), _plural(pool.block_size, "token")
    return f"{blocks} of {tokens}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def columns_for(num_blocks: int) -> int:
    """Return the number of grid columns: a multiple of 8 that makes the grid wider than high, or one row if it fits."""
    if num_blocks <= 32:
        return num_blocks
    return 8 * ceil(sqrt(num_blocks * (4 if num_blocks <= 2048 else 2)) / 8)


@dataclass(frozen=True)
class Point:
    """Pool usage at one time, as shares from 0 to 1."""

    time: float  # seconds
    used: float  # share of the pool's blocks
    cached: float  # share of the pool's blocks
    utilisation: float | None  # share of slots in used blocks that hold a token


class Recording:
    """The latest map, and the usage curve of all maps so far. `latest` needs at least one map."""

    def __init__(self, *pools: PoolMap) -> None:
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._latest: PoolMap | None = None
        for pool in pools:
            self.add(pool)

    @property
    def latest(self) -> PoolMap:
        assert self._latest is not None, "the recording is empty"
        return self._latest

    def add(self, pool: PoolMap) -> None:
        self._latest = pool
        used, cached = pool.used / pool.num_blocks, pool.cached / pool.num_blocks
        self.points.append(Point(pool.time, used, cached, pool.utilisation))

    @property
    def seconds(self) -> list[float]:
        """The time of each point since the first. If the server's clock is set back, time stands still."""
        latest = start = self.points[0].time
        return [(latest := max(latest, point.time)) - start for point in self.points]
