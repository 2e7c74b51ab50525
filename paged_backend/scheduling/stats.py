"""Scheduler statistics: requests, blocks, and counters since the start."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class SchedulerCounters:
    """Counters that the parts of the scheduler increment. The fields are those of `SchedulerStats`."""

    recomputed: int = 0
    swapped: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0

    @property
    def preemptions(self) -> int:
        return self.recomputed + self.swapped


@dataclass(frozen=True)
class SchedulerStats:
    running: int  # running requests
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_shared: int
    blocks_pinned: int  # blocks pinned for sessions between their turns
    block_size: int
    host_total: int  # blocks of the host's pool
    host_cached: int
    host_used: int  # blocks of the host's pool that hold preempted requests
    recomputed: int  # preemptions whose tokens are computed again; this and all below count since the start
    swapped: int  # preemptions whose blocks were swapped out to the host
    queried_tokens: int  # tokens looked up in the prefix cache
    cached_tokens: int  # tokens found in the prefix cache, on the device or the host
    host_tokens: int  # cached_tokens that were found on the host
    evictions: int  # cached blocks whose content was dropped for another request
    copies: int  # blocks copied on write
    moves_out: int  # blocks moved to the host
    moves_in: int  # blocks moved back
    draft_tokens: int
    accepted_tokens: int  # draft tokens that were accepted
    paused: int = 0  # waiting requests that were preempted
    steps: int = 0  # steps since the start
    context_requests: int = 0  # requests that prefilled in the last step
    context_tokens: int = 0  # prompt tokens in the last step
    disk_up: bool = False
    disk_blocks: int = 0
    disk_read: int = 0  # blocks read from disk
    disk_written: int = 0  # blocks written to disk
    compilations: int = 0  # kernels compiled since the model was ready
    sleeping: bool = False  # whether the memory of the model is released

    def idle(self) -> SchedulerStats:
        """Return these statistics with no request open."""
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
        """The fraction of the pool's blocks that requests use."""
        return self.blocks_used / self.blocks_total
