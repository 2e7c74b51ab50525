"""State slots: every sequence continues from the state of its own tokens, through forks, preemption and failures."""

from collections import Counter
from dataclasses import replace

import pytest

from paged_backend.kv.ledger import NO_TRANSFERS
from paged_backend.kv.states import StateSlots
from paged_backend.scheduling.group import Group
from tests.support import scheduler_stress as stress
from tests.support.block_managers import cached, compute, manager
from tests.support.scheduler_stress import request
from tests.support.shadow import expected_tokens, finish
from tests.support.shadow_states import ShadowStates
from tests.support.states_stress import run_states_stress


def scheduler(blocks, size, seqs, tokens, slots=None, *, caching=False, host=0, host_slots=0):
    """Return a scheduler for a model with recurrent layers. slots: for states, by default those of sequences."""
    states = StateSlots(slots or seqs, seqs, block_size=size, caching=caching, num_host_slots=host_slots)
    return stress.scheduler(blocks, size, seqs, tokens, caching, host, preemption="swap", states=states)


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
    sched = scheduler(32, 4, 4, 8)
    store = ShadowStates(sched, 5, 4)
    finish(sched, store, request(0, range(13), n=3, max_tokens=5))
    assert store.num_copies == 2


def test_a_failed_copy_leaves_the_state_to_others():
    """The step that fails copies the state for one of two samples. The other one is not in it: its state is valid."""
    sched = scheduler(2, 4, 4, 8, 8, caching=True)
    store = ShadowStates(sched, 5, 8)
    sched.add(request(0, range(4), n=2, max_tokens=3))
    first = sched.schedule()
    result, second = store.run(first), sched.schedule()
    assert [chunk.sequence.index for chunk in second.chunks] == [0]
    assert {copy.entry is None for copy in second.state_transfers.copies} == {True, False}
    sched.commit(first, result)
    sched.fail(second, "device error")
    finish(sched, store, request(1, range(5), max_tokens=2))
    assert sched.stats.cached_tokens == 4


def test_state_whose_copy_failed_is_no_checkpoint():
    """The prompt ends at the end of a block, where the state of a sample would be kept."""
    sched = scheduler(32, 4, 4, 8, 8, caching=True)
    store = ShadowStates(sched, 5, 8)
    sched.add(request(0, range(4), n=3, max_tokens=5))
    plan = sched.schedule()
    sched.commit(plan, store.run(plan))
    plan = sched.schedule()
    assert {copy.entry is None for copy in plan.state_transfers.copies} == {True, False}
    sched.fail(plan, "device error")
    finish(sched, store, request(1, range(9), max_tokens=2))
    assert sched.stats.cached_tokens == 0


def preempted_by_priority(host, host_slots, **sampling):
    """Return the tokens of two requests, of which the second preempts the first, with the scheduler and the store."""
    sched = scheduler(8, 4, 4, 16, host=host, host_slots=host_slots)
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
    sched = scheduler(8, 4, 4, 16, host=16, host_slots=2)
    store = ShadowStates(sched, 5, 4, 2)
    sched.add(first := request(0, range(50, 62), max_tokens=9, priority=1))
    plan = sched.schedule()
    sched.commit(plan, store.run(plan))
    sched.add(request(1, range(24), max_tokens=6))
    plan = sched.schedule()
    assert len(plan.state_transfers.moves_out) == 1
    sched.blocks.ledger.finish(plan.transfers)  # as if the blocks had been on the host before
    sched.fail(replace(plan, transfers=NO_TRANSFERS), "device error")
    assert finish(sched, store)[0, 0] == expected_tokens(first, 0, 5)[1:]


def swap_out(slots, *sequences):
    slots.swap_out(sequences)
    for one in sequences:
        one.on_host = True


@pytest.fixture
def swapped():
    """(slots, two samples that share a state, which has been swapped out and in again, the copies of these steps)"""
    slots = StateSlots(3, 3, block_size=4, caching=True, num_host_slots=1)
    parent, child = computed(slots, 4), sequence(0, range(9))
    child.computed = child.committed = 4
    slots.fork(parent, child)
    swap_out(slots, parent, child)
    slots.check([parent, child])
    out = slots.prepare([])
    slots.swap_in([parent, child])
    parent.on_host = child.on_host = False
    slots.check([parent, child])
    return slots, parent, child, out


def test_a_shared_state_is_swapped_once(swapped):
    slots, parent, child, out = swapped
    copies = slots.prepare([parent, child])
    assert [len(part) for part in (out.moves_out, copies.moves_in)] == [1, 1]
    assert copies.moves_in[0].target in (parent.state_slot, child.state_slot)
    assert parent.state_slot != child.state_slot
    slots.finish(out)
    slots.finish(copies)
    slots.check([parent, child])
    assert slots.num_host_used == 0


def test_a_state_that_has_not_arrived_stays_or_is_dropped(swapped):
    """It cannot be swapped out again, and is no checkpoint of a sequence that ends."""
    slots, parent, child, _ = swapped
    assert not slots.can_swap_out([parent, child])
    slots.release(parent)
    slots.check([child])
    slots.release(child)
    slots.check([])
    assert slots.prepare([]) == NO_TRANSFERS
    assert slots.num_host_used == slots.num_checkpoints == 0


def test_a_slot_of_the_host_is_in_use_until_its_state_has_left(swapped):
    slots, parent, child, _ = swapped
    copies = slots.prepare([parent])
    parent.computed += 1
    slots.release(parent)
    slots.release(child)
    assert (slots.num_host_used, slots.num_checkpoints) == (1, 0)
    slots.finish(copies)
    assert slots.num_host_used == 0
    slots.check([])


def test_a_move_to_a_freed_slot_of_the_host_is_not_made():
    """The slot may be the target of another move in the same step."""
    slots = StateSlots(2, 2, num_host_slots=1)
    one, other = computed(slots, 1), computed(slots, 1, key=1)
    swap_out(slots, one)
    slots.release(one)
    source = other.state_slot
    swap_out(slots, other)
    assert [move.source for move in slots.prepare([]).moves_out] == [source]


def test_model_without_states_gets_no_slots():
    sched = stress.scheduler(8, 4, max_num_seqs=2, max_num_batched_tokens=8)
    sched.add(request(0, range(5), n=2))
    plan = sched.schedule()
    assert plan.chunks[0].sequence.state_slot is None
    assert plan.state_transfers == NO_TRANSFERS


def test_checkpoint_is_found_after_its_copy():
    slots = StateSlots(4, 2, block_size=4, caching=True)
    one = computed(slots, 8)
    for done in (False, True):
        copies = slots.prepare([one])
        assert [copy.source for copy in copies.copies] == [one.state_slot]
        assert not slots.has_checkpoint(one.chain.entries[1])
        slots.finish(copies, done=done)
        assert slots.has_checkpoint(one.chain.entries[1]) == done
    slots.check([one])


def test_a_hit_ends_where_a_state_was_saved():
    """Not within a block, and not after a later block that is cached."""
    slots = StateSlots(4, 1, block_size=4, caching=True)
    blocks = manager(16, states=slots)
    one = sequence(0, range(8))
    slots.prepare([one])
    assert compute(blocks, one)
    blocks.free(one)  # leaves a checkpoint after its two blocks
    later, follower = cached(blocks, range(15)), sequence(1, range(15))
    hit = blocks.match(follower, 15)
    assert (hit.num_blocks, hit.partial) == (2, ())
    blocks.adopt(follower, hit)
    assert slots.has_checkpoint(follower.chain.entries[1]) and follower.state_slot is not None
    assert blocks.match(sequence(2, range(8)), 8).num_blocks == 0
    blocks.free(later)
    blocks.check([follower])


def test_checkpoints_are_added_while_slots_are_to_spare():
    """As for states from a disk."""
    slots, entries = StateSlots(3, 2, block_size=4, caching=True), sequence(0, range(12)).chain
    slots.contents.extend(entries, range(12), 3, 4)
    slot = slots.add_checkpoint(entries.entries[0])
    assert slot is not None and slots.has_checkpoint(entries.entries[0])
    assert slots.add_checkpoint(entries.entries[0]) is None  # is there already
    assert slots.add_checkpoint(entries.entries[1]) is not None  # evicts the other one: no sequence runs yet
    one, other = sequence(0, range(9)), sequence(1, range(9))
    slots.prepare([one, other])
    assert slots.num_checkpoints == 1


def test_samples_at_the_end_of_a_block_save_one_checkpoint():
    slots = StateSlots(8, 2, block_size=4, caching=True)
    parent, child = computed(slots, 8), sequence(0, range(9))
    child.computed = child.committed = 8
    slots.fork(parent, child)
    copies = slots.prepare([parent, child])
    assert Counter(copy.entry is None for copy in copies.copies) == {True: 1, False: 1}
    slots.finish(copies)
    slots.check([parent, child])


@pytest.mark.parametrize(("num_slots", "num_checkpoints"), [(2, 0), (3, 1)])
def test_a_checkpoint_is_kept_if_a_slot_is_to_spare(num_slots, num_checkpoints):
    """Otherwise the sequence that continues from it overwrites it."""
    slots = StateSlots(num_slots, 2, block_size=4, caching=True)
    one = computed(slots, 8)
    slots.release(one)
    assert slots.num_checkpoints == 1
    follower, other = sequence(1, range(9)), computed(slots, 1, key=2)
    follower.chain = one.chain
    slots.adopt(follower, 2)
    follower.computed = follower.committed = 8
    slots.finish(slots.prepare([follower]))
    slots.check([follower, other])
    assert slots.num_checkpoints == num_checkpoints


def test_a_pinned_checkpoint_is_not_overwritten():
    slots = StateSlots(3, 2, block_size=4, caching=True)
    one = computed(slots, 8)
    slots.release(one)
    slots.pin("chat", one)
    follower = sequence(1, range(9))
    follower.chain = one.chain
    slots.adopt(follower, 2)
    other = computed(slots, 1, key=2)
    slots.check([follower, other])
    slots.finish(slots.prepare([follower]))
    slots.check([follower, other])
    assert slots.pinned != [follower.state_slot]
    assert slots.num_checkpoints == 1


def test_no_checkpoint_takes_the_slot_of_a_sequence_that_shares_a_pinned_one():
    """The last slot is for the sequence that continues from the session's checkpoint."""
    slots = StateSlots(3, 2, block_size=4, caching=True)
    one = computed(slots, 8)
    slots.release(one)
    slots.pin("chat", one)
    follower = sequence(1, range(9))
    follower.chain = one.chain
    slots.adopt(follower, 2)
    other = computed(slots, 4, key=2, first=20)
    slots.finish(slots.prepare([other, follower]))
    assert not slots.has_checkpoint(slots.contents.extend(other.chain, other.tokens, 1, 4))
    slots.check([follower, other])


def test_a_checkpoint_that_leaves_no_slot_for_a_sequence_is_not_pinned():
    slots = StateSlots(1, 1, block_size=4, caching=True)
    one = computed(slots, 8)
    slots.release(one)
    slots.pin("chat", one)
    slots.check([])
    assert slots.pinned == []


def test_cleared_slots_have_no_checkpoints():
    """Neither those of sessions nor others."""
    slots = StateSlots(4, 2, block_size=4, caching=True)
    one, other = computed(slots, 8), computed(slots, 8, key=1, first=20)
    slots.release(one)
    slots.pin("chat", one)
    slots.release(other)
    assert slots.num_checkpoints == 2
    slots.clear()
    slots.check([])
    for two in (one, other):
        assert not slots.has_checkpoint(two.chain.entries[1])
    slots.unpin("chat")
    slots.check([])


def speculating(num_drafts, prompt=7, caching=True):
    """Return slots, a sequence that has computed its prompt, and the slots of its draft tokens."""
    slots = StateSlots(2 + num_drafts, 1, block_size=4, caching=caching, num_draft_slots=num_drafts)
    one = computed(slots, prompt, prompt=prompt)
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
    assert {own, *drafts} - {one.state_slot} <= set(slots.pool._free)


def test_state_that_accepted_tokens_have_passed_becomes_a_checkpoint():
    """The block ends after the token before the draft tokens, whose state is in the former slot of the sequence."""
    slots, one, drafts = speculating(3)
    own = one.state_slot
    one.tokens += range(2)
    one.computed = one.committed = 10
    slots.accept(one, drafts, 2)
    assert slots.has_checkpoint(one.chain.entries[1])
    follower = sequence(1, range(9))
    follower.chain = one.chain
    slots.release(one)
    slots.adopt(follower, 2)
    assert follower.state_slot == own


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


def computed(slots, count, *, key=0, prompt=9, first=0):
    """Return a sequence that has computed `count` tokens."""
    one = sequence(key, range(first, first + prompt))
    slots.prepare([one])
    one.computed = one.committed = count
    return one


def test_a_sequence_keeps_one_checkpoint_of_its_output():
    """However many slots are to spare."""
    sched = scheduler(64, 4, 4, 8, 30, caching=True)
    store = ShadowStates(sched, 5, 30)
    sched.add(request(0, range(5), max_tokens=30))
    kept = []
    while sched.has_work:
        plan = sched.schedule()
        sched.commit(plan, store.run(plan))
        kept.append(sched.blocks.states.num_checkpoints)
    assert max(kept) == 2  # one of the prompt, one of the output
