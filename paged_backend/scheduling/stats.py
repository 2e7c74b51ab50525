"""The statistics of an engine: what its parts report after a step, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class SchedulerCounters:
    """What the scheduler has counted since the start."""

    recomputed: int = 0  # preemptions whose tokens are computed again
    swapped: int = 0  # preemptions whose blocks were swapped out to the host
    queried_tokens: int = 0  # tokens looked up in the prefix cache
    cached_tokens: int = 0  # tokens found in the prefix cache, on the device or the host
    host_tokens: int = 0  # cached_tokens that were found on the host
    draft_tokens: int = 0
    accepted_tokens: int = 0  # draft tokens that were accepted
    steps: int = 0

    @property
    def preemptions(self) -> int:
        return self.recomputed + self.swapped


class Stats:
    """The statistics of an engine at one moment, such as `stats.running`.

    Each part of the engine names and counts its own: `Scheduler.stats`, `BlockManager.stats`,
    `BlockStore.stats`, and `EngineCore.stats` for what concerns the whole engine. families.py shows them as metrics.
    """

    def __init__(self, **values: float):
        """values: counts as int, states as bool, and durations in seconds as float."""
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no part of the engine reports {name}")

    def get(self, name: str) -> float:
        """Return a value; 0 if the engine does not have the part that reports it."""
        value: float = self.__dict__.get(name, 0)
        return value

    def having(self, **values: float) -> Stats:
        """Return these statistics with other values."""
        return Stats(**{**self.__dict__, **values})

    def idle(self) -> Stats:
        """Return these statistics with no request open."""
        return self.having(running=0, waiting=0, paused=0, context_requests=0, context_tokens=0)

    def plus(self, other: Stats) -> Stats:
        """Return the statistics of two engines together: the sum of counts, and the states that both are in. Durations
        and the block size are taken from the first engine."""
        total = {**vars(other), **vars(self)}
        for name in vars(self).keys() & vars(other).keys() - {"block_size"}:
            own, added = getattr(self, name), getattr(other, name)
            if isinstance(own, bool):
                total[name] = own and added
            elif isinstance(own, int):
                total[name] = own + added
        return Stats(**total)

    @property
    def preemptions(self) -> int:
        total: int = self.recomputed + self.swapped
        return total

    @property
    def generation_requests(self) -> int:
        """Running requests that did not prefill in the last step."""
        return max(0, self.running - self.context_requests)
