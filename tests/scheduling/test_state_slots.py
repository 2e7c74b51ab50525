"""State slots: every sequence continues from the state of its own tokens, through forks, preemption and failures."""

from collections import Counter

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import Contents
from paged_backend.scheduling.prefix_cache import BlockLocation, CacheHit
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.sequence import Group
from paged_backend.scheduling.state_slots import StateCopy, StateSlots
from tests.support.scheduler_stress import request
from tests.support.shadow import finish
from tests.support.shadow_states import ShadowStates
from tests.support.states_stress import run_states_stress, scheduler_with_states


def test_stress():
    seen = Counter()
    for seed in range(100):
        run_states_stress(seed, seen)
    needed = ("state copies", "recomputed", "beam output", "failed step", "failed row", "abort in flight", "copies",
              "cached_tokens", "session output", "blocks_pinned")  # fmt: skip
    assert all(seen[name] for name in needed), seen


def test_samples_continue_from_copies_of_the_prompts_state():
    sched = scheduler_with_states(32, 4, 4, 8)
    store = ShadowStates(sched, 5, 4)
    finish(sched, store, request(0, range(13), n=3, max_tokens=5))
    assert store.num_copies == 2


def test_failed_copy_fails_the_request_that_forks():
    """A sequence whose state was not copied must not continue, even if the failed step did not compute it."""
    sched = scheduler_with_states(32, 4, 4, 8)
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
    slots = StateSlots(3, 3, contents=Contents(), block_size=4, caching=False)
    parent, child, other, other_child = (sequence(key) for key in (0, 0, 1, 1))
    slots.assign(parent)
    slots.assign(other)
    slots.fork(parent, child)
    freed = child.state_slot
    slots.release(child)
    slots.fork(other, other_child)
    copies = slots.take_copies()
    assert copies == (StateCopy(other.state_slot, freed, key=1),)
    assert slots.take_copies() == ()
    slots.finish(copies)
    slots.check([parent, other, other_child])


def test_checkpoint_is_found_after_its_copy():
    slots, one = StateSlots(4, 2, contents=Contents(), block_size=4, caching=True), sequence(0, range(9))
    slots.assign(one)
    one.computed = one.committed = 8
    hit = CacheHit((BlockLocation(0, False), BlockLocation(1, False)))
    for done in (False, True):
        slots.save(one)
        assert slots.restrict(hit, one.chain.entries).blocks == ()
        copies = slots.take_copies()
        assert [copy.source for copy in copies] == [one.state_slot]
        slots.finish(copies, done=done)
        assert (slots.restrict(hit, one.chain.entries) == hit) == done
    slots.check([one])


def test_state_that_waits_for_its_copy_is_not_saved():
    slots = StateSlots(8, 2, contents=Contents(), block_size=4, caching=True)
    parent, child = sequence(0, range(9)), sequence(0, range(9))
    slots.assign(parent)
    for one in (parent, child):
        one.computed = one.committed = 8
    slots.fork(parent, child)
    slots.save(child)
    assert [copy.target for copy in slots.take_copies()] == [child.state_slot]


def test_cleared_slots_have_no_checkpoints():
    """Neither those of sessions nor copies that no step has made, whose sources are gone."""
    slots, one = StateSlots(4, 2, contents=Contents(), block_size=4, caching=True), sequence(0, range(9))
    slots.assign(one)
    one.computed = one.committed = 8
    slots.save(one)
    slots.finish(slots.take_copies())
    slots.pin("chat", one)
    other = sequence(1, range(20, 29))
    slots.assign(other)
    other.computed = other.committed = 8
    slots.save(other)
    slots.release(one)
    slots.release(other)
    slots.clear()
    slots.check([])
    assert slots.take_copies() == ()
    for two in (one, other):
        hit = CacheHit((BlockLocation(0, False), BlockLocation(1, False)))
        assert slots.restrict(hit, two.chain.entries).blocks == ()
    slots.unpin("chat")
    slots.check([])


def sequence(key, prompt=(1, 2)):
    return Group(request(key, prompt)).leader
