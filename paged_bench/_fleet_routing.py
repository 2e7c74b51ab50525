"""Routing policies for the simulation of a fleet: the gateway's router, and two simpler ones to compare with."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from paged_backend.scheduling.content import Entry
from paged_bench._fleet_workload import Conversation
from paged_client.openai.routing import Route, Router, conversation_key

POLICIES = ("round-robin", "least-loaded", "hashing", "cache-aware")


class Policy(Protocol):
    """Chooses the replica of each request."""

    def choose(self, conversation: Conversation, turn: int) -> int:
        """Return the replica of a turn, and count the request as open there."""
        ...

    def close(self, replica: int) -> None:
        """Count the end of a request."""
        ...


class CachedBlocks:
    """Knows how many blocks of each text every replica has cached. It listens to the prefix caches of the replicas.

    The last token of a block tells which system prompt or conversation it belongs to. The cached blocks of a text are
    its first ones, as later blocks are evicted earlier, so that their number is enough.
    """

    def __init__(self, num_replicas: int, block_size: int) -> None:
        self._num_replicas = num_replicas
        self._block_size = block_size
        self._held: defaultdict[int, dict[int, int]] = defaultdict(dict)  # token -> replica -> blocks

    def listener(self, replica: int) -> _Listener:
        """Return the listener for the pool of one replica."""
        return _Listener(self._held, replica)

    def shares(self, conversation: Conversation, turn: int) -> list[float]:
        """Return the share of a turn's prompt that each replica has cached."""
        size, prompt = self._block_size, conversation.turns[turn].prompt
        shares = [0.0] * self._num_replicas
        own = self._held.get(conversation.token, {})
        for replica, blocks in self._held.get(conversation.system, {}).items():
            if blocks == conversation.system_tokens // size:
                blocks += own.get(replica, 0)
            shares[replica] = min(blocks * size / prompt, 1.0)
        return shares


class _Listener:
    def __init__(self, held: defaultdict[int, dict[int, int]], replica: int) -> None:
        self._held = held
        self._replica = replica

    def stored(self, entry: Entry) -> None:
        blocks = self._held[entry.tokens[-1]]
        blocks[self._replica] = blocks.get(self._replica, 0) + 1

    def removed(self, entry: Entry) -> None:
        blocks = self._held[entry.tokens[-1]]
        blocks[self._replica] -= 1
        if not blocks[self._replica]:
            del blocks[self._replica]
            if not blocks:
                del self._held[entry.tokens[-1]]


class LeastLoaded:
    """Chooses the replica with the fewest open requests; of several, each in turn."""

    def __init__(self, num_replicas: int) -> None:
        self._open = [0] * num_replicas
        self._turn = itertools.count()

    def choose(self, conversation: Conversation, turn: int) -> int:
        count = len(self._open)
        first = next(self._turn) % count
        offset = min(range(count), key=lambda offset: self._open[(first + offset) % count])
        replica = (first + offset) % count
        self._open[replica] += 1
        return replica

    def close(self, replica: int) -> None:
        self._open[replica] -= 1


class GatewayRouter:
    """Chooses the replica as the gateway does.

    Args:
        cached: what each replica has cached, for prompts after the first turn; None: not known.
    """

    def __init__(self, router: Router, cached: CachedBlocks | None) -> None:
        self._router = router
        self._cached = cached

    def choose(self, conversation: Conversation, turn: int) -> int:
        messages = [
            {"role": "system", "content": f"system prompt {conversation.system}"},
            {"role": "user", "content": f"first message of conversation {conversation.number}"},
        ]
        shares = self._cached.shares(conversation, turn) if self._cached and turn > 0 else ()
        replica = self._router.order(Route(conversation_key(messages), shares))[0]
        self._router.open(replica)
        return replica

    def close(self, replica: int) -> None:
        self._router.close(replica)


def make_policy(name: str, num_replicas: int, cached: CachedBlocks, clock: Callable[[], float]) -> Policy:
    """Return one of POLICIES. clock: returns the simulated time."""
    if name == "least-loaded":
        return LeastLoaded(num_replicas)
    kind = "round-robin" if name == "round-robin" else "prefix"
    router = Router([f"replica-{index}" for index in range(num_replicas)], kind, clock)
    return GatewayRouter(router, cached if name == "cache-aware" else None)
