"""What the scheduler tells of itself: how much runs and waits, what the pool holds, what has been counted."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SchedulerStats:
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_shared: int
    blocks_pinned: int  # for sessions between their turns
    block_size: int
    host_total: int  # blocks of the host's pool, and of them
    host_cached: int
    host_used: int  # by requests that were preempted
    recomputed: int  # this and all below since the start: requests preempted, to be computed again
    swapped: int  # and with their blocks moved to the host
    queried_tokens: int  # looked for in the cache
    cached_tokens: int  # and found
    host_tokens: int  # of those, the ones that came from the host
    evictions: int
    copies: int
    moves_out: int
    moves_in: int
    draft_tokens: int
    accepted_tokens: int  # of those
    paused: int = 0  # of those that wait, the ones that were preempted
    steps: int = 0  # since the start
    context_requests: int = 0  # that had a prompt to compute in the last step
    context_tokens: int = 0  # and of those prompts
    disk_up: bool = False
    disk_blocks: int = 0
    disk_read: int = 0  # blocks
    disk_written: int = 0

    def idle(self) -> SchedulerStats:
        """The same, once no request is left."""
        return replace(self, running=0, waiting=0, paused=0, context_requests=0, context_tokens=0)

    @property
    def preemptions(self) -> int:
        return self.recomputed + self.swapped

    @property
    def generation_requests(self) -> int:
        return max(0, self.running - self.context_requests)

    @property
    def blocks_free(self) -> int:
        return self.blocks_total - self.blocks_used - self.blocks_cached

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold."""
        return self.blocks_used / self.blocks_total
