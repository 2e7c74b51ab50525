"""Stress test of the scheduler for models with recurrent layers, whose states are in slots."""

from __future__ import annotations

from collections import Counter

from paged_backend.kv.states import StateSlots, num_draft_slots
from tests.support.scheduler_stress import StressTest, random_conditions
from tests.support.shadow_states import ShadowStates

WITHOUT = {"disk": False, "loras": 0}


class StatesStressTest(StressTest):
    """The stress test with states, and few or many checkpoints."""

    def __init__(self, seen, **conditions):
        self.conditions = conditions
        super().__init__(seen, **conditions)
        pool, host = self.sched.blocks.states.pool, self.sched.blocks.states.host
        self.store = ShadowStates(self.sched, self.vocab, pool.num_pages, host.num_pages if host else 0)

    def state_slots(self):
        seqs, draft_tokens = self.conditions["seqs"], self.conditions["draft_tokens"]
        checkpoints = self.rnd.choice([0, 1, 2, 5, 40])
        host_slots = self.rnd.choice([0, 1, 2, 5, 40]) if self.conditions["host"] else 0
        drafts = num_draft_slots(seqs, seqs + self.conditions["extra"], draft_tokens)
        return StateSlots(
            seqs + drafts + checkpoints,
            seqs,
            block_size=self.size,
            caching=self.conditions["caching"],
            num_host_slots=host_slots,
            num_draft_slots=drafts,
        )

    def drain(self):
        super().drain()
        self.seen["state copies"] += self.store.num_copies
        self.seen["states swapped in"] += self.store.num_swapped_in


def run_states_stress(seed: int, seen: Counter[str] | None = None) -> None:
    """Run the stress test with the conditions of this seed, and count in `seen` what happened."""
    StatesStressTest(Counter() if seen is None else seen, **random_conditions(seed) | WITHOUT).run()
