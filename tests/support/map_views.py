"""Recordings of a block pool, and what is in a picture of one."""

import json
import re

from paged_client.map_view import KINDS, Recording
from paged_client.types import PoolMap

EVERY = ".c123456789+p"
SGR = re.compile(r"\x1b\[[\d;]*m")


def pool_of(states, **others):
    values = {"time": 12.5, "block_size": 16, "running": 1, "waiting": 2, "tokens": 20, "preemptions": 4}
    return PoolMap(**(values | {"num_blocks": len(states), "states": states, "cached_tokens_hit": 3} | others))


def over_time(*states):
    """A recording with a map a second."""
    return Recording(*(pool_of(one, time=100.0 + second) for second, one in enumerate(states)))


def counts_in(text):
    """Return the count of each kind in a header or a legend."""
    return {kind.name: int(re.search(rf"([\d,]+) {kind.name} \(", text).group(1).replace(",", "")) for kind in KINDS}


def sent(pool):
    return json.dumps({name: getattr(pool, name) for name in PoolMap.__dataclass_fields__})
