"""State slots: every sequence continues from the state of its own tokens, through forks, preemption and failures."""

from collections import Counter

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.sequence import Group
from paged_backend.scheduling.state_slots import StateCopy, StateSlots
from tests.support.scheduler_stress import StressTest, random_conditions, request
from tests.support.shadow import finish
from tests.support.shadow_states import ShadowStates

WITHOUT = {"caching": False, "host": 0, "disk": False, "swap": False, "pinned": 0, "draft_tokens": 0, "loras": 0}


class StatesStressTest(StressTest):
    """The stress test with as many state slots as sequences."""

    def __init__(self, seen, **conditions):
        super().__init__(seen, **conditions)
        seqs = conditions["seqs"]
        self.sched = scheduler(conditions["blocks"], conditions["size"], seqs, seqs + conditions["extra"])
        self.store = ShadowStates(self.sched, self.vocab, seqs)

    def drain(self):
        super().drain()
        self.seen["state copies"] += self.store.num_copies


def scheduler(blocks, size, seqs, tokens):
    return Scheduler(
        BlockManager(blocks, size),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        preemption="recompute",
        state_slots=seqs,
    )


def test_stress():
    seen = Counter()
    for seed in range(60):
        StatesStressTest(seen, **random_conditions(seed) | WITHOUT).run()
    needed = ("state copies", "recomputed", "beam output", "failed step", "failed row", "abort in flight", "copies")
    assert all(seen[name] for name in needed), seen


def test_samples_continue_from_copies_of_the_prompts_state():
    sched = scheduler(32, 4, 4, 8)
    store = ShadowStates(sched, 5, 4)
    finish(sched, store, request(0, range(13), n=3, max_tokens=5))
    assert store.num_copies == 2


def test_failed_copy_fails_the_request_that_forks():
    """A sequence whose state was not copied must not continue, even if the failed step did not compute it."""
    sched = scheduler(32, 4, 4, 8)
    store = ShadowStates(sched, 5, 4)
    sched.add(request(0, range(5), n=2, max_tokens=5))
    plan = sched.schedule()
    sched.commit(plan, store.run(plan))
    sched.add(request(1, range(5), max_tokens=5))
    plan = sched.schedule()
    assert [copy.key for copy in plan.state_copies] == [0]
    failed = sched.fail(plan, "device error")
    assert {delta.key for delta in failed} == {0, 1}
    sched.check()


def test_model_without_states_gets_no_slots():
    sched = Scheduler(BlockManager(8, 4), max_num_seqs=2, max_num_batched_tokens=8)
    sched.add(request(0, range(5), n=2))
    plan = sched.schedule()
    assert plan.chunks[0].sequence.state_slot is None
    assert plan.state_copies == ()


def test_copy_to_a_freed_slot_is_not_made():
    """Its next owner may get a copy of its own in the same step."""
    slots = StateSlots(3)
    parent, child, other, other_child = (sequence(key) for key in (0, 0, 1, 1))
    slots.assign(parent)
    slots.assign(other)
    slots.fork(parent, child)
    freed = child.state_slot
    slots.release(child)
    slots.fork(other, other_child)
    assert slots.take_copies() == (StateCopy(1, other.state_slot, freed),)
    assert slots.take_copies() == ()
    slots.check([parent, other, other_child])


def sequence(key):
    return Group(request(key, [1, 2])).leader
