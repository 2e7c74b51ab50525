"""Stress test of the scheduler for models with recurrent layers, whose states are in slots."""

from __future__ import annotations

from collections import Counter

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.block_pool import BlockPool
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.speculation import PromptLookup
from paged_backend.scheduling.state_slots import num_draft_slots
from tests.support.scheduler_stress import StressTest, random_conditions
from tests.support.shadow_states import ShadowStates

WITHOUT = {"disk": False, "loras": 0}


class StatesStressTest(StressTest):
    """The stress test with states, and few or many checkpoints."""

    def __init__(self, seen, **conditions):
        super().__init__(seen, **conditions)
        seqs, checkpoints = conditions["seqs"], self.rnd.choice([0, 1, 2, 5, 40])
        host_slots = self.rnd.choice([0, 1, 2, 5, 40]) if conditions["host"] else 0
        tokens, draft_tokens = seqs + conditions["extra"], conditions["draft_tokens"]
        slots = seqs + num_draft_slots(seqs, tokens, draft_tokens) + checkpoints
        self.sched = scheduler_with_states(
            conditions["blocks"],
            conditions["size"],
            seqs,
            tokens,
            slots,
            caching=conditions["caching"],
            session_blocks=conditions["pinned"],
            host=conditions["host"],
            host_slots=host_slots,
            preemption="swap" if conditions["swap"] else "recompute",
            draft_tokens=draft_tokens,
            keeps_scores=conditions["scores"] == "kept",
            mask_budget=self.mask_budget,
        )
        self.store = ShadowStates(self.sched, self.vocab, slots, host_slots)

    def drain(self):
        super().drain()
        self.seen["state copies"] += self.store.num_copies
        self.seen["states swapped in"] += self.store.num_swapped_in


def scheduler_with_states(
    blocks,
    size,
    seqs,
    tokens,
    slots=None,
    *,
    caching=False,
    session_blocks=0,
    host=0,
    host_slots=0,
    preemption="swap",
    draft_tokens=0,
    keeps_scores=False,
    mask_budget=None,
):
    return Scheduler(
        BlockManager(
            blocks,
            size,
            caching=caching,
            keeps_scores=keeps_scores,
            host=BlockPool(host, caching=caching) if host else None,
        ),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        preemption=preemption,
        state_slots=slots or seqs,
        host_state_slots=host_slots,
        proposer=PromptLookup(shortest=1, longest=3),
        max_draft_tokens=draft_tokens,
        session_blocks=session_blocks,
        mask_budget=mask_budget,
    )


def run_states_stress(seed: int, seen: Counter[str] | None = None) -> None:
    """Run the stress test with the conditions of this seed, and count in `seen` what happened."""
    StatesStressTest(Counter() if seen is None else seen, **random_conditions(seed) | WITHOUT).run()
