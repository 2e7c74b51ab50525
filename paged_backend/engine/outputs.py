"""The outputs of the engine, emitted from its thread: step outputs, pool maps and its failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from paged_backend.api.request import TokenDelta
from paged_backend.kv.pages import CACHED, FREE, NULL, PINNED
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.stats import Stats


@dataclass(frozen=True, slots=True)
class StepReport:
    """The size of one step, and the seconds that the engine's thread spent in each phase of it."""

    num_seqs: int  # sequences computed
    num_tokens: int  # tokens computed, of prompts and outputs
    replayed: bool  # whether a captured CUDA graph ran the forward pass
    schedule: float
    launch: float  # packing the batch, copying blocks, and enqueuing the step; on a CPU also computing it
    wait: float  # for the device
    commit: float  # storing tokens and freeing blocks


@dataclass(frozen=True)
class StepOutput:
    """The new tokens of one engine iteration, and the statistics after it."""

    deltas: tuple[TokenDelta, ...]
    stats: Stats
    finished_at: float  # time.monotonic() when the tokens were on the host
    started_at: float = 0.0  # time.monotonic() when the step was scheduled
    entered: tuple[int, ...] = ()  # keys of the requests that this step scheduled for the first time
    report: StepReport | None = None  # report of the step; None without a step, or after an error


@dataclass(frozen=True)
class RemoteOutput:
    """The new tokens of requests of this process that another engine runs. For the fields, see `StepOutput`."""

    deltas: tuple[TokenDelta, ...]
    finished_at: float
    started_at: float = 0.0
    entered: tuple[int, ...] = ()


@dataclass(frozen=True)
class PoolMap:
    """The state of every block of the pool at one moment."""

    taken_at: float  # time.time()
    states: str  # one character per block, see PagePool.map
    tokens: int  # tokens in blocks that sequences use; a shared block counts once
    stats: Stats
    state_blocks: int = 0  # pages with states of sequences

    @classmethod
    def of(cls, scheduler: Scheduler, stats: Stats) -> PoolMap:
        """Return the map of the scheduler's pool."""
        blocks = scheduler.blocks
        states = blocks.pool.map(scheduler.pins.counts)
        sequences = [sequence for group in scheduler.running for sequence in group.sequences]
        if len(blocks.layout.kinds) > 1:
            held = len({block for sequence in sequences for block in sequence.tables[0]} - {NULL})
        else:
            held = len(states) - sum(map(states.count, (FREE, CACHED, PINNED)))
        tokens = held * blocks.block_size - scheduler.empty_slots
        state_blocks = blocks.states.num_pages_held(sequences) if blocks.states else 0
        return cls(time.time(), states, tokens, stats, state_blocks)


@dataclass(frozen=True)
class EngineDied:
    """The engine loop has ended with an error; every open request fails."""

    reason: str


EngineOutput: TypeAlias = StepOutput | RemoteOutput | PoolMap | EngineDied
Emit: TypeAlias = Callable[[EngineOutput], None]
