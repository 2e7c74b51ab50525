"""Chooses the server of a request: one that has cached the beginning of its prompt, and is not overloaded.

The beginning of the prompt is hashed to a ring of servers (consistent hashing): requests with the same beginning go to
the same server, and when a server is added or lost, only the requests of that part of the ring move. A server that has
more than its share of the open requests is passed over (Mirrokni, Thorup and Zadimoghaddam: Consistent Hashing with
Bounded Loads, 2016). If it is known what each server has cached (kv_index.py), a prompt of which a server has cached
most goes to that server instead.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

POLICIES = ("prefix", "round-robin")
LEAST_LOADED = "least-loaded"  # policy for prefill servers: the server with the fewest open requests
RING_POINTS = 128  # points of each server on the ring; the parts of servers differ by about 1 / sqrt(RING_POINTS)
LOAD_FACTOR = 1.25  # open requests of a server, as a multiple of the mean, above which it is passed over ...
LOAD_SLACK = 8  # ... if it has more than this above the mean: small differences cost less than an empty cache
AVOID_SECONDS = 2.0  # time for which a server that has failed is tried last
PROMPT_CHARS = 512  # characters of a text prompt, or tokens, that are hashed
MESSAGE_CHARS = 4096  # characters of a conversation's beginning that are hashed, the last ones
HELD_SHARE = 0.5  # share of a prompt that a server must have cached to be preferred to the ring's choice


@dataclass(frozen=True)
class Route:
    """What the choice of a request's server depends on."""

    key: str  # requests with the same key should go to the same server
    cached: Sequence[float] = ()  # share of the prompt that each server has cached; empty: not known


def prompt_key(prompt: str | Sequence[int]) -> str:
    """Return the beginning of a prompt that identifies it."""
    return str(prompt[:PROMPT_CHARS])


def conversation_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the beginning of a conversation that identifies it: everything up to the first message of the user.

    All turns have the same key, and conversations with the same system prompt are spread over the servers.
    """
    first = next((index for index, message in enumerate(messages) if message.get("role") == "user"), len(messages) - 1)
    return json.dumps(list(messages[: first + 1]))[-MESSAGE_CHARS:]


class HashRing:
    """A ring of points, of which each server has RING_POINTS."""

    def __init__(self, names: Sequence[str]) -> None:
        points = [
            (_hash(f"{name} {index}"), server) for server, name in enumerate(names) for index in range(RING_POINTS)
        ]
        self._points = sorted(points)
        self._count = len(names)

    def order(self, key: str) -> list[int]:
        """Return all servers in the order in which they follow the key on the ring."""
        place = bisect_left(self._points, (_hash(key), -1))
        servers: dict[int, None] = {}
        for index in range(len(self._points)):
            servers[self._points[(place + index) % len(self._points)][1]] = None
            if len(servers) == self._count:
                break
        return list(servers)


class Router:
    """Orders servers for each request, and counts the open requests of each.

    Args:
        names: a name for each server that other gateways use as well, so that all choose the same server.
        policy: one of POLICIES, or LEAST_LOADED.
        clock: returns a time in seconds.
    """

    def __init__(self, names: Sequence[str], policy: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring = HashRing(names) if policy == "prefix" else None
        self._by_load = policy == LEAST_LOADED
        self._clock = clock
        self._turn = itertools.count()
        self._num_open = [0] * len(names)
        self._avoid_until = [-math.inf] * len(names)

    def order(self, route: Route | None) -> list[int]:
        """Return the servers to try, the best first. route: None for any server."""
        count = len(self._num_open)
        if self._ring is None or route is None:
            first = next(self._turn) % count
            servers = [(first + index) % count for index in range(count)]
        else:
            servers = self._ring.order(route.key)
        mean = (sum(self._num_open) + 1) / count
        now, capacity = self._clock(), math.ceil(max(LOAD_FACTOR * mean, mean + LOAD_SLACK))
        cached = route.cached if route and route.cached else [0.0] * count

        def badness(server: int) -> tuple[bool, bool, float]:
            is_full = self._ring is not None and self._num_open[server] >= capacity
            if self._by_load:
                return self._avoid_until[server] > now, False, self._num_open[server]
            return self._avoid_until[server] > now, is_full, -cached[server] if cached[server] >= HELD_SHARE else 0.0

        return sorted(servers, key=badness)  # a stable sort

    def open(self, server: int) -> None:
        """Count a request that is sent to the server."""
        self._num_open[server] += 1

    def close(self, server: int, *, failed: bool = False) -> None:
        """Count the end of a request. failed: whether the server could not run it."""
        self._num_open[server] -= 1
        if failed:
            self._avoid_until[server] = self._clock() + AVOID_SECONDS


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")
