"""Stress test of the scheduler for models with recurrent layers, whose states are in slots."""

from __future__ import annotations

from collections import Counter

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.scheduler import Scheduler
from tests.support.scheduler_stress import StressTest, random_conditions
from tests.support.shadow_states import ShadowStates

WITHOUT = {"host": 0, "disk": False, "swap": False, "draft_tokens": 0, "loras": 0}


class StatesStressTest(StressTest):
    """The stress test with states, and few or many checkpoints."""

    def __init__(self, seen, **conditions):
        super().__init__(seen, **conditions)
        seqs, checkpoints = conditions["seqs"], self.rnd.choice([0, 1, 2, 5, 40])
        self.sched = scheduler_with_states(
            conditions["blocks"],
            conditions["size"],
            seqs,
            seqs + conditions["extra"],
            seqs + checkpoints,
            caching=conditions["caching"],
            session_blocks=conditions["pinned"],
        )
        self.store = ShadowStates(self.sched, self.vocab, seqs + checkpoints)

    def drain(self):
        super().drain()
        self.seen["state copies"] += self.store.num_copies


def scheduler_with_states(blocks, size, seqs, tokens, slots=None, *, caching=False, session_blocks=0):
    return Scheduler(
        BlockManager(blocks, size, caching=caching),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        preemption="recompute",
        state_slots=slots or seqs,
        session_blocks=session_blocks,
    )


def run_states_stress(seed: int, seen: Counter[str] | None = None) -> None:
    """Run the stress test with the conditions of this seed, and count in `seen` what happened."""
    StatesStressTest(Counter() if seen is None else seen, **random_conditions(seed) | WITHOUT).run()
