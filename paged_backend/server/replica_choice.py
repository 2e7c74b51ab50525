"""Chooses the replica of a request: the one that has computed most of the prompt's beginning, unless it is overloaded.

The choice is that of a cache-aware router (Zheng et al.: SGLang, 2024, section 3): the prompts that were sent to each
replica are remembered, as a chain of hashes of their blocks. What a replica has evicted since is not known.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence

MAX_KNOWN_BLOCKS = 1 << 17  # hashes remembered for each replica; the least recently used are forgotten
HELD_SHARE = 0.5  # share of a prompt that a replica must have computed to be preferred to one with fewer open requests
# A replica with more open requests than this is not preferred: a multiple of the mean, and the mean plus a few, since
# small differences cost less than an empty cache.
LOAD_FACTOR, LOAD_SLACK = 1.25, 8


class ReplicaChoice:
    """Remembers the prompts of each replica. Used by one thread at a time."""

    def __init__(self, count: int, block_size: int):
        """count: the number of replicas."""
        self._block_size = block_size
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]

    def choose(self, owner: Hashable, prompt: Sequence[int], loads: Sequence[int]) -> int:
        """Return the number of the replica that should run a prompt, and remember the choice.

        Args:
            owner: what a cached block belongs to besides its tokens: the tenant's salt and the adapter.
            prompt: token ids.
            loads: open requests of each replica.
        """
        chain = self._chain(owner, prompt)
        mean = (sum(loads) + 1) / len(loads)
        capacity = math.ceil(max(LOAD_FACTOR * mean, mean + LOAD_SLACK))
        held = [self._held(number, chain) for number in range(len(loads))]

        def badness(number: int) -> tuple[float, float]:
            prefers = chain and held[number] >= HELD_SHARE * len(chain) and loads[number] < capacity
            return -held[number] if prefers else 0.0, loads[number]

        best = min(range(len(loads)), key=badness)
        known = self._known[best]
        for block in chain:
            known[block] = None
            known.move_to_end(block)
        while len(known) > MAX_KNOWN_BLOCKS:
            known.popitem(last=False)
        return best

    def _chain(self, owner: Hashable, prompt: Sequence[int]) -> list[int]:
        """Return a hash for each full block of a prompt, of everything up to its end."""
        size, parent, chain = self._block_size, hash(owner), []
        for start in range(0, len(prompt) - size + 1, size):
            parent = hash((parent, *prompt[start : start + size]))
            chain.append(parent)
        return chain

    def _held(self, number: int, chain: Sequence[int]) -> int:
        """Return how many blocks at the beginning of a prompt the replica has computed."""
        known = self._known[number]
        return next((index for index, block in enumerate(chain) if block not in known), len(chain))
