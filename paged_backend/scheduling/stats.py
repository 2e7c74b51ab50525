"""Scheduler statistics: requests, blocks, and counters since the start."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(slots=True)
class SchedulerCounters:
    """Counters that the parts of the scheduler increment. The fields are named as in `SchedulerStats`."""

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
    compute_seconds: float = 0.0  # measured duration of computing the tokens of a block
    host_seconds: float = 0.0  # measured duration of copying a block from the host to the device
    disk_up: bool = False
    disk_blocks: int = 0
    disk_read: int = 0  # blocks read from disk
    disk_written: int = 0  # blocks written to disk
    disk_seconds: float = 0.0  # measured duration of reading a block from disk; 0: not measured
    remote_up: bool = False
    remote_read: int = 0  # blocks read from the remote store
    remote_written: int = 0  # blocks written to the remote store
    remote_disabled: int = 0  # how often the remote store was disabled
    remote_bytes: int = 0  # bytes in the remote store that this server has written
    remote_seconds: float = 0.0  # measured duration of reading a block from the remote store; 0: not measured
    compilations: int = 0  # kernels compiled since the model was ready
    state_slots_total: int = 0  # slots for states of recurrent layers
    state_slots_used: int = 0  # state slots of running sequences
    state_checkpoints: int = 0  # state slots of checkpoints, which the prefix cache or sessions keep
    host_state_slots_total: int = 0  # slots of the host for states
    host_state_slots_used: int = 0  # slots of the host that hold states of preempted requests
    sleeping: bool = False  # whether the memory of the model is released

    def idle(self) -> SchedulerStats:
        """Return these statistics with no request open."""
        return replace(self, running=0, waiting=0, paused=0, context_requests=0, context_tokens=0)

    def plus(self, other: SchedulerStats) -> SchedulerStats:
        """Return the statistics of two engines together. Durations and the block size are taken from the first."""
        total = {}
        for spec in fields(self):
            own, added = getattr(self, spec.name), getattr(other, spec.name)
            if isinstance(own, bool):
                total[spec.name] = own and added
            elif isinstance(own, int) and spec.name != "block_size":
                total[spec.name] = own + added
        return replace(self, **total)

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
    def state_slots_free(self) -> int:
        return self.state_slots_total - self.state_slots_used - self.state_checkpoints

    @property
    def usage(self) -> float:
        """The fraction of the pool's blocks that requests use."""
        return self.blocks_used / self.blocks_total
