"""State slots: every sequence continues from the state of its own tokens, through forks, preemption and failures."""

from collections import Counter
from dataclasses import replace

import pytest

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import Contents
from paged_backend.scheduling.host_states import HostStates
from paged_backend.scheduling.prefix_cache import BlockLocation, CacheHit
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.sequence import Group
from paged_backend.scheduling.state_slots import StateCopy, StateSlots
from tests.support.scheduler_stress import request
from tests.support.shadow import expected_tokens, finish
from tests.support.shadow_states import ShadowStates
from tests.support.states_stress import run_states_stress, scheduler_with_states


@pytest.mark.parametrize("seeds", [25, pytest.param(500, marks=pytest.mark.nightly)])
def test_stress(seeds):
    seen = Counter()
    for seed in range(seeds):
        run_states_stress(seed, seen)
    needed = ("state copies", "recomputed", "swapped", "states swapped in", "accepted_tokens", "beam output",
              "failed step", "failed row", "abort in flight", "copies", "cached_tokens", "session output",
              "blocks_pinned")  # fmt: skip
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


def test_state_whose_copy_failed_is_no_checkpoint():
    """The prompt ends at the end of a block, where the state of a sample would be kept."""
    sched = scheduler_with_states(32, 4, 4, 8, 8, caching=True)
    store = ShadowStates(sched, 5, 8)
    sched.add(request(0, range(4), n=3, max_tokens=5))
    plan = sched.schedule()
    sched.commit(plan, store.run(plan))
    plan = sched.schedule()
    assert {copy.key for copy in plan.state_copies} == {0, None}
    sched.fail(plan, "device error")
    finish(sched, store, request(1, range(9), max_tokens=2))
    assert sched.stats.cached_tokens == 0


def test_state_that_has_not_arrived_is_no_checkpoint():
    """A sample without room for a block waits at the end of its prompt, and the step that copies its state fails."""
    sched = scheduler_with_states(2, 4, 4, 8, 8, caching=True)
    store = ShadowStates(sched, 5, 8)
    sched.add(request(0, range(4), n=2, max_tokens=3))
    first = sched.schedule()
    result, second = store.run(first), sched.schedule()
    assert [chunk.sequence.index for chunk in second.chunks] == [0]
    assert {copy.key for copy in second.state_copies} == {0, None}
    sched.commit(first, result)
    sched.fail(second, "device error")
    finish(sched, store, request(1, range(5), max_tokens=2))
    assert sched.stats.cached_tokens == 0


def preempted_by_priority(host, host_slots, **sampling):
    """Return the tokens of two requests, of which the second preempts the first, with the scheduler and the store."""
    sched = scheduler_with_states(8, 4, 4, 16, host=host, host_slots=host_slots)
    store = ShadowStates(sched, 5, 4, host_slots)
    sched.add(first := request(0, range(50, 62), max_tokens=9, priority=1, **sampling))
    for _ in range(3):
        plan = sched.schedule()
        sched.commit(plan, store.run(plan))
    outputs = finish(sched, store, second := request(1, range(20), max_tokens=6))
    assert outputs[1, 0] == expected_tokens(second, 0, 5)
    for index in range(first.sampling.n):
        assert outputs[0, index] == expected_tokens(first, index, 5)[3:]
    return sched, store


def test_states_are_swapped_with_the_blocks():
    sched, store = preempted_by_priority(host=16, host_slots=2, n=2)
    assert (sched.stats.swapped, sched.stats.recomputed, store.num_swapped_in) == (1, 0, 2)


@pytest.mark.parametrize(("host", "host_slots"), [(16, 1), (16, 0), (2, 2)])
def test_request_without_room_on_the_host_is_recomputed(host, host_slots):
    """There is no room for the states of two samples, or for the blocks."""
    sched, store = preempted_by_priority(host, host_slots, n=2)
    assert (sched.stats.swapped, sched.stats.recomputed, store.num_swapped_in) == (0, 1, 0)


def test_failed_swap_out_is_recomputed():
    """What failed steps moved to the host is not read, even if all blocks of the request are cached there."""
    sched = scheduler_with_states(8, 4, 4, 16, host=16, host_slots=2)
    store = ShadowStates(sched, 5, 4, 2)
    sched.add(first := request(0, range(50, 62), max_tokens=9, priority=1))
    plan = sched.schedule()
    sched.commit(plan, store.run(plan))
    sched.add(request(1, range(24), max_tokens=6))
    plan = sched.schedule()
    assert len(plan.state_moves_out) == 1
    sched.blocks.offload.finish_moves_out(plan.moves_out)  # as if the blocks had been on the host before
    sched.fail(replace(plan, moves_out=()), "device error")
    assert finish(sched, store)[0, 0] == expected_tokens(first, 0, 5)[1:]


def test_swapped_out_state_is_read_where_it_is():
    """A state that waits for its copy is swapped out from the source of the copy; one that has not left the host stays
    there."""
    slots = StateSlots(3, 3, contents=Contents(), block_size=4, host=HostStates(2))
    parent, child = sequence(0), sequence(0)
    slots.assign(parent)
    for one in (parent, child):
        one.computed = one.committed = 1
    slots.fork(parent, child)
    source = parent.state_slot
    slots.swap_out([parent, child])
    assert slots.take_copies() == ()
    assert {move.source for move in slots.host.take_moves_out()} == {source}
    slots.swap_in([parent])
    assert parent.host_state_slot is None
    slots.check([parent, child])
    slots.swap_out([parent])
    assert (slots.take_copies(), slots.host.take_moves_out()) == ((), ())
    slots.check([parent, child])
    slots.swap_in([parent])
    copies = slots.take_copies()
    assert [(copy.target, copy.from_host) for copy in copies] == [(parent.state_slot, True)]
    slots.release(parent)
    slots.check([child])
    slots.finish(copies)
    assert slots.host.num_used == 1
    slots.release(child)
    assert slots.host.num_used == 0


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
        assert slots.checkpoints.restrict(hit, one.chain.entries).blocks == ()
        copies = slots.take_copies()
        assert [copy.source for copy in copies] == [one.state_slot]
        slots.finish(copies, done=done)
        assert (slots.checkpoints.restrict(hit, one.chain.entries) == hit) == done
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
    slots.checkpoints.pin("chat", one)
    other = sequence(1, range(20, 29))
    slots.assign(other)
    other.computed = other.committed = 8
    slots.save(other)
    slots.release(one)
    slots.release(other)
    slots.finish(slots.take_copies(), done=False)
    slots.checkpoints.clear()
    slots.check([])
    assert slots.take_copies() == ()
    for two in (one, other):
        hit = CacheHit((BlockLocation(0, False), BlockLocation(1, False)))
        assert slots.checkpoints.restrict(hit, two.chain.entries).blocks == ()
    slots.checkpoints.unpin("chat")
    slots.check([])


def speculating(num_drafts, prompt=7, caching=True):
    """Return slots, a sequence that has computed its prompt, and the slots of its draft tokens."""
    slots = StateSlots(
        2 + num_drafts, 1, contents=Contents(), block_size=4, caching=caching, num_draft_slots=num_drafts
    )
    one = sequence(0, range(prompt))
    slots.assign(one)
    one.computed = one.committed = prompt
    one.tokens.append(50)
    slots.check([one])
    return slots, one, slots.take_draft_slots(num_drafts)


@pytest.mark.parametrize("accepted", range(4))
def test_sequence_continues_in_the_slot_of_the_last_accepted_token(accepted):
    slots, one, drafts = speculating(3, caching=False)
    own = one.state_slot
    slots.check([one])
    one.tokens += range(accepted)
    one.computed = one.committed = 8 + accepted
    slots.accept(one, drafts, accepted)
    assert one.state_slot == (own, *drafts)[accepted]
    slots.check([one])
    slots.free_draft_slots()
    slots.check([one])
    assert set(slots.take_draft_slots(3)) == {own, *drafts} - {one.state_slot}


def test_state_that_accepted_tokens_have_passed_becomes_a_checkpoint():
    """The block ends after the token before the draft tokens, whose state is in the former slot of the sequence."""
    slots, one, drafts = speculating(3)
    own = one.state_slot
    one.tokens += range(2)
    one.computed = one.committed = 10
    slots.accept(one, drafts, 2)
    hit = CacheHit((BlockLocation(0, False), BlockLocation(1, False)))
    assert slots.checkpoints.restrict(hit, one.chain.entries) == hit
    follower = sequence(1, range(9))
    follower.chain = one.chain
    slots.release(one)
    slots.adopt(follower, hit)
    assert [copy.source for copy in slots.take_copies()] == [own]


def test_slots_of_a_sequence_that_ended_before_the_commit_are_freed():
    slots, one, _ = speculating(3)
    slots.release(one)
    slots.check([])
    slots.free_draft_slots()
    slots.check([])
    assert len(slots.take_draft_slots(3)) == 3


def test_drafts_of_a_model_without_states_need_no_slots():
    slots, one = StateSlots(), sequence(0)
    assert slots.take_draft_slots(3) == ()
    slots.accept(one, (), 2)
    assert one.state_slot is None


def sequence(key, prompt=(1, 2)):
    return Group(request(key, prompt)).leader


def test_a_sequence_keeps_one_checkpoint_of_its_output():
    """However many slots are to spare."""
    sched = scheduler_with_states(64, 4, 4, 8, 30, caching=True)
    store = ShadowStates(sched, 5, 30)
    sched.add(request(0, range(5), max_tokens=30))
    kept = []
    while sched.has_work:
        plan = sched.schedule()
        sched.commit(plan, store.run(plan))
        kept.append(sched.states.num_checkpoints)
    assert max(kept) == 2  # one of the prompt, one of the output
