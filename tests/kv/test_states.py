"""States of recurrent layers: every sequence continues from the state of its own tokens, through forks, preemption and
failures, in blocks of the one pool."""

from collections import Counter
from dataclasses import replace

import pytest

from paged_backend.api.block_layout import FULL, BlockLayout, LayerKind, StateKind
from paged_backend.api.request import max_blocks_needed
from paged_backend.kv.content import BlockKey
from paged_backend.kv.ledger import NO_TRANSFERS
from paged_backend.kv.pages import NULL
from tests.support import scheduler_stress as stress
from tests.support.block_managers import cached, compute, manager, sequence
from tests.support.scheduler_stress import RECURRENT, random_conditions, request, run_stress
from tests.support.shadow import ShadowStore, expected_tokens, finish

HYBRID = (FULL, StateKind(2))
STATE = 1  # the index of the kind


def scheduler(num_pages, size, seqs, tokens, *, kinds=HYBRID, caching=False, **options):
    """Return a scheduler for a model with recurrent layers, and a store."""
    sched = stress.scheduler(num_pages, size, seqs, tokens, caching, kinds=kinds, preemption="swap", **options)
    return sched, ShadowStore(sched, 5)


def run(sched, store, steps=1):
    for _ in range(steps):
        plan = sched.schedule()
        sched.commit(plan, store.run(plan))
        sched.check()
    return plan


@pytest.mark.parametrize("seeds", [25, pytest.param(500, marks=pytest.mark.nightly)])
def test_stress(seeds):
    seen = Counter()
    for seed in range(seeds):
        run_stress(seen, **random_conditions(seed, RECURRENT))
    needed = ("state copies", "recomputed", "swapped", "states moved in", "accepted_tokens", "beam output",
              "failed step", "failed row", "abort in flight", "copies", "cached_tokens", "host_tokens",
              "session output", "blocks_pinned")  # fmt: skip
    assert all(seen[name] for name in needed), seen


# --- the pages of states ----------------------------------------------------------------------------------------------


def test_a_request_needs_a_state_for_each_sample():
    layout = BlockLayout(4, (FULL, StateKind(5)))
    assert max_blocks_needed(5, 4, 1, layout) == 2 + 5
    assert max_blocks_needed(5, 4, 3, layout) == 1 + 3 + 3 * 5
    assert BlockLayout(4, (LayerKind(0), StateKind(1))).max_tokens(1) == 2**31 - 1


def test_sequences_take_pages_when_they_start_and_no_others():
    """Nothing is set aside: the pool is empty before and after, and one long sequence may fill it."""
    sched, store = scheduler(12, 4, 4, 8)
    assert sched.blocks.num_used == 0
    sched.add(request(0, range(37), max_tokens=4))
    run(sched, store, 5)
    assert sched.blocks.num_used == 10 + 2
    assert (sched.stats.states_used, sched.stats.states_cached) == (1, 0)
    finish(sched, store)


def test_requests_wait_for_the_pages_of_their_states():
    sched, _ = scheduler(8, 4, 4, 32)
    for key in range(4):
        sched.add(request(key, range(10 * key, 10 * key + 3), max_tokens=2))
    assert len(sched.schedule().chunks) == 2  # each has a block and a state: three would need nine pages
    assert sched.stats.waiting == 2


def test_a_state_may_be_in_any_pages():
    """The free pages are not next to each other."""
    blocks = manager(10, kinds=(FULL, StateKind(3)))
    others = [sequence(blocks, range(4), key=key, salt=str(key)) for key in range(2)]
    single = blocks.pool.claim(10)
    for page in single[1::2]:
        blocks.pool.free(page)
    del single[1::2]
    assert compute(blocks, others[0])
    assert blocks.pool.pages_of(blocks.states.of(others[0])) != (1, 2, 3)
    assert blocks.pool.num_available == 1
    assert not compute(blocks, others[1])  # there is room for its block, but not for its state
    blocks.pool.free_table(single)
    blocks.check([others[0]])


def test_model_without_recurrent_layers_has_no_states():
    sched = stress.scheduler(8, 4, max_num_seqs=2, max_num_batched_tokens=8)
    sched.add(request(0, range(5), n=2))
    plan = sched.schedule()
    assert len(plan.chunks[0].sequence.tables) == 1
    assert sched.blocks.states is None
    assert sched.stats.states_used == 0


# --- copies -----------------------------------------------------------------------------------------------------------


def test_samples_continue_from_copies_of_the_prompts_state():
    """The last one takes it."""
    sched, store = scheduler(32, 4, 4, 8)
    finish(sched, store, request(0, range(13), n=3, max_tokens=5))
    assert store.num_state_copies == 2


def test_a_failed_copy_leaves_the_state_to_others():
    """The step that fails copies the state for one of two samples. The other one is not in it: its state is valid."""
    sched, store = scheduler(6, 4, 4, 8, caching=True)
    sched.add(request(0, range(4), n=2, max_tokens=3))
    first = sched.schedule()
    result, second = store.run(first), sched.schedule()
    assert [chunk.sequence.index for chunk in second.chunks] == [0]
    sched.commit(first, result)
    sched.fail(second, "device error")
    finish(sched, store, request(1, range(5), max_tokens=2))
    assert sched.stats.cached_tokens == 4


@pytest.mark.parametrize("fails", [False, True])
def test_a_state_is_cached_when_its_copy_is_made(fails):
    """The step in flight computes up to the end of a block; the next one continues in a copy of the state."""
    sched, store = scheduler(32, 4, 4, 8, caching=True)
    sched.add(request(0, range(4), max_tokens=3))
    first = sched.schedule()
    result, second = store.run(first), sched.schedule()
    (copy,) = second.transfers.copies
    assert copy.entry is not None
    sched.commit(first, result)
    assert sched.blocks.pool.find(copy.entry, STATE) is None
    if fails:
        sched.fail(second, "device error")
    else:
        sched.commit(second, store.run(second))
    assert sched.blocks.pool.find(copy.entry, STATE) == (None if fails else copy.source)
    finish(sched, store)


# --- the prefix cache -------------------------------------------------------------------------------------------------


def test_a_hit_ends_where_a_state_was_kept():
    """Not within a block, and not after a later block that is cached."""
    blocks = manager(32, kinds=HYBRID)
    one = cached(blocks, range(8))
    blocks.free(one)
    later, follower = cached(blocks, range(15)), sequence(blocks, range(15), key=1)
    hit = blocks.match(follower, 15)
    assert (hit.num_blocks, hit.partial) == (2, ())
    assert [location and location.block for location in hit.tables[STATE]] == [None, blocks.pool.find(
        one.chain.entries[1], STATE
    )]  # fmt: skip
    blocks.adopt(follower, hit)
    assert follower.tables[STATE][0] == NULL
    assert blocks.match(sequence(blocks, range(8), key=2), 8).num_blocks == 0
    blocks.free(later)
    blocks.check([follower])


def test_a_kept_state_takes_part_in_the_order_of_eviction():
    """It is evicted like a block, the least recently used first."""
    blocks = manager(8, kinds=HYBRID)
    first = cached(blocks, range(8))
    blocks.free(first)
    blocks.free(cached(blocks, range(20, 24), key=1, salt="b"))
    assert blocks.pool.num_blocks(STATE) == (0, 2)
    assert blocks.pool.claim(4)
    assert blocks.pool.num_blocks(STATE) == (0, 1)
    assert blocks.pool.find(first.chain.entries[1], STATE) is None


@pytest.mark.parametrize(("num_pages", "kept"), [(6, 0), (7, 1)])
def test_a_state_at_the_end_of_a_block_is_kept_if_there_is_room(num_pages, kept):
    """Otherwise the sequence that continues from it overwrites it, and it is not found."""
    sched, store = scheduler(num_pages, 4, 1, 8, caching=True)
    sched.add(request(0, range(9), max_tokens=5))
    run(sched, store, 4)
    assert sched.stats.states_cached == kept
    assert sched.stats.states_used == 1
    finish(sched, store)


def test_kept_states_preempt_nobody():
    """Both requests pass the ends of blocks, and the pool has no page to spare."""
    sched, store = scheduler(10, 4, 2, 16, caching=True)
    finish(sched, store, *(request(key, range(20 * key, 20 * key + 5), max_tokens=8) for key in range(2)))
    assert (sched.stats.recomputed, sched.stats.swapped) == (0, 0)


def test_a_sequence_keeps_one_state_of_its_output():
    """However much room there is."""
    sched, store = scheduler(100, 4, 4, 8, caching=True)
    sched.add(request(0, range(5), max_tokens=30))
    kept = []
    while sched.has_work:
        run(sched, store)
        kept.append(sched.stats.states_cached)
    assert max(kept) == 2  # one of the prompt, one of the output


def test_earlier_states_of_a_prompt_are_evicted_first():
    """Before the blocks of an older request: most requests continue from the end of a prompt."""
    sched, store = scheduler(64, 4, 4, 8, caching=True)
    finish(sched, store, request(0, range(5), max_tokens=2, cache_salt="older"))
    finish(sched, store, request(1, range(25), max_tokens=8))
    follower = sequence(sched.blocks, range(25), key=2)
    hit = sched.blocks.match(follower, 25)
    assert hit.num_blocks == 6
    kept = [sched.blocks.pool.find(entry, STATE) for entry in follower.chain.entries]
    assert [block is not None for block in kept] == [False, True] * 3
    pool = sched.blocks.pool
    pool.free_table(pool.claim(pool.num_available - pool.num_cached + 4))  # evicts two states
    kept = [pool.find(entry, STATE) for entry in follower.chain.entries]
    assert [block is not None for block in kept] == [False] * 5 + [True]
    assert sched.blocks.match(sequence(sched.blocks, range(5), salt="older"), 5).num_blocks == 1


def test_samples_at_the_end_of_a_block_keep_one_state():
    sched, store = scheduler(64, 4, 4, 8, caching=True)
    sched.add(request(0, range(8), n=2, max_tokens=4))
    run(sched, store, 2)
    plan = run(sched, store)
    assert sorted(copy.entry is None for copy in plan.transfers.copies) == [False, True]
    assert sched.stats.states_cached == 2  # after 4 and 8 tokens
    finish(sched, store)


def test_requests_that_continue_from_one_state_in_one_step():
    """All but the last one copy it; it stays in the cache."""
    sched, store = scheduler(64, 4, 8, 32, caching=True)
    finish(sched, store, request(0, range(9), max_tokens=2))
    copies = store.num_state_copies
    finish(sched, store, *(request(key, [*range(8), 20 + key, 30], max_tokens=3) for key in range(1, 4)))
    assert sched.stats.cached_tokens == 3 * 8
    assert store.num_state_copies - copies >= 3
    assert sched.blocks.match(sequence(sched.blocks, range(10), key=9), 10).num_blocks == 2


def test_states_of_a_failed_request_are_forgotten():
    """On the host too, and those that the sequence has left behind."""
    blocks = manager(6, kinds=HYBRID, host=8)
    one = cached(blocks, range(8))
    entries = list(one.chain.entries)
    blocks.free(one)
    blocks.pool.free_table(blocks.pool.claim(6))  # moves all of it to the host
    blocks.ledger.finish(blocks.ledger.take())
    assert blocks.locate(BlockKey(entries[1], STATE)).on_host
    other = sequence(blocks, range(8))
    other.chain.entries += entries
    blocks.invalidate(other)
    assert blocks.locate(BlockKey(entries[1], STATE)) is None


def test_cleared_pool_has_no_states():
    sched, store = scheduler(64, 4, 4, 8, caching=True, session_pages=20)
    finish_session(sched, store, request(0, range(9), max_tokens=2, session="chat"))
    assert sched.stats.states_used == 1
    sched.clear_cache()
    sched.check()
    assert sched.blocks.pool.num_blocks(STATE) == (0, 0)


def finish_session(sched, store, one):
    sched.add(one)
    while sched.has_work:
        run(sched, store)


@pytest.mark.parametrize("prompt", [9, 12])
def test_a_session_pins_the_state_after_its_last_full_block(prompt):
    """Also one that its sequence has left behind. The next turn continues from it, and does not overwrite it."""
    sched, store = scheduler(20, 4, 4, 8, caching=True, session_pages=20)
    finish_session(sched, store, request(0, range(prompt), max_tokens=2, session="chat"))
    assert sched.stats.states_used == 1
    assert sched.stats.blocks_pinned == prompt // 4 + 2
    taken = sched.blocks.pool.claim(sched.blocks.pool.num_available)
    sched.blocks.pool.free_table(taken)
    pinned = sched.pins.tables[STATE][-1]
    sched.add(request(1, range(prompt + 2), max_tokens=2, session="chat"))
    run(sched, store)
    assert sched.stats.cached_tokens == prompt // 4 * 4
    assert sched.blocks.states.of(next(iter(sched.running)).leader) != pinned
    while sched.has_work:
        run(sched, store)


# --- the host ---------------------------------------------------------------------------------------------------------


def preempted_by_priority(host, **sampling):
    """Return the scheduler and the store after two requests, of which the second preempts the first."""
    sched, store = scheduler(12, 4, 4, 16, host=host)
    sched.add(first := request(0, range(50, 62), max_tokens=9, priority=1, **sampling))
    run(sched, store, 3)
    outputs = finish(sched, store, second := request(1, range(20), max_tokens=6))
    assert outputs[1, 0] == expected_tokens(second, 0, 5)
    for index in range(first.sampling.n):
        assert outputs[0, index] == expected_tokens(first, index, 5)[3:]
    return sched, store


@pytest.mark.parametrize(("host", "swapped"), [(9, 1), (8, 0)])
def test_states_are_swapped_with_the_blocks(host, swapped):
    """Five blocks and two states. Without room for all of them, the request is computed again."""
    sched, store = preempted_by_priority(host, n=2)
    assert (sched.stats.swapped, sched.stats.recomputed) == (swapped, 1 - swapped)
    assert store.num_states_moved_in == 2 * swapped


def test_a_shared_state_is_swapped_once():
    blocks = manager(16, kinds=HYBRID, host=16, caching=False)
    parent, child = cached(blocks, range(6)), sequence(blocks, range(6))
    blocks.fork(parent, child)
    assert blocks.swap_out([parent, child])
    assert blocks.host.num_used == 2 + 2
    assert parent.tables[STATE] == child.tables[STATE]
    blocks.ledger.finish(blocks.ledger.take())
    blocks.swap_in([parent, child])
    assert blocks.states.of(parent) == blocks.states.of(child)
    blocks.check([parent, child])


def test_sequences_without_room_on_the_host_stay():
    blocks = manager(16, kinds=HYBRID, host=8, caching=False)
    one = cached(blocks, range(6))
    held = blocks.host.claim(5)
    assert not blocks.swap_out([one])  # three pages are left for two blocks and a state
    blocks.host.free(held.pop())
    assert blocks.swap_out([one])
    blocks.ledger.finish(blocks.ledger.take())
    blocks.host.free_table(held)
    blocks.check([one])


def test_failed_swap_out_is_recomputed():
    """What failed steps moved to the host is not read, even if all other blocks of the request are cached there."""
    sched, store = scheduler(11, 4, 4, 16, host=16)
    sched.add(first := request(0, range(50, 62), max_tokens=9, priority=1))
    run(sched, store)
    sched.add(request(1, range(24), max_tokens=6))
    plan = sched.schedule()
    states = [move for move in plan.transfers.moves_out if len(move.pages) == 2]
    others = plan.transfers._replace(moves_out=tuple(set(plan.transfers.moves_out) - set(states)))
    assert len(states) == 1
    sched.blocks.ledger.finish(others)  # as if the other blocks had been on the host before
    sched.fail(replace(plan, transfers=NO_TRANSFERS._replace(moves_out=tuple(states))), "device error")
    assert finish(sched, store)[0, 0] == expected_tokens(first, 0, 5)[1:]


def test_an_evicted_state_is_continued_from_the_host():
    sched, store = scheduler(9, 4, 2, 16, caching=True, host=40)
    finish(sched, store, request(0, range(9), max_tokens=2))
    finish(sched, store, request(1, range(50, 74), max_tokens=2))
    finish(sched, store, request(2, range(12), max_tokens=4))
    assert sched.stats.host_tokens == 8
    assert store.num_states_moved_in == 1


def test_a_state_from_the_host_is_not_found_where_it_is_overwritten():
    """Nor is one that is swapped in shared with a sequence that may overwrite it."""
    blocks = manager(16, kinds=HYBRID, host=16)
    one = cached(blocks, range(8))
    entry = one.chain.entries[1]
    assert blocks.swap_out([one])
    blocks.ledger.finish(blocks.ledger.take())
    on_device = blocks.pool.find(entry, STATE)
    other = sequence(blocks, range(9), key=1)
    blocks.adopt(other, blocks.match(other, 9))
    assert other.tables[STATE][-1] == on_device
    blocks.swap_in([one])
    assert one.tables[STATE][-1] != on_device
    transfers = blocks.ledger.take()
    assert [move.entry for move in transfers.moves_in if len(move.pages) == 2] == [None]
    blocks.ledger.finish(transfers)
    blocks.check([one, other])


# --- draft tokens -----------------------------------------------------------------------------------------------------


def speculating(num_drafts, prompt=7, num_pages=40, caching=True):
    """Return a block manager, a sequence that has computed its prompt and one token, and the blocks of its draft
    tokens."""
    blocks = manager(num_pages, kinds=HYBRID, caching=caching)
    one = sequence(blocks, range(prompt))
    assert compute(blocks, one)
    one.tokens.append(50)
    assert blocks.extend(one, prompt + 1 + num_drafts, num_states=num_drafts) is not None
    drafts = blocks.states.take_drafts(num_drafts)
    blocks.check([one])
    return blocks, one, drafts


def accept(blocks, one, drafts, count):
    """Commit a step with draft tokens."""
    one.tokens += range(count)
    one.computed = len(one.tokens)
    blocks.commit(one, one.computed - count)
    blocks.states.accept(one, drafts, count)
    blocks.truncate(one, one.computed)
    blocks.commit(one, one.computed)
    blocks.states.free_drafts()
    blocks.check([one])


@pytest.mark.parametrize("accepted", range(4))
def test_sequence_continues_from_the_state_after_the_last_accepted_token(accepted):
    blocks, one, drafts = speculating(3, caching=False)
    own = blocks.states.of(one)
    accept(blocks, one, drafts, accepted)
    assert blocks.states.of(one) == (own, *drafts)[accepted]
    assert blocks.pool.num_blocks(STATE) == (1, 0)
    assert len(one.tables[STATE]) == one.num_blocks == 2 + (accepted > 0)


def test_state_that_accepted_tokens_have_passed_is_cached():
    """The block ends after the token before the draft tokens, whose state is in the former block of the sequence."""
    blocks, one, drafts = speculating(3)
    own = blocks.states.of(one)
    accept(blocks, one, drafts, 2)
    assert blocks.pool.find(one.chain.entries[1], STATE) == own
    assert blocks.pool.num_blocks(STATE) == (1, 1)


def test_state_of_the_last_accepted_token_is_cached_at_the_end_of_a_block():
    """Rejected draft tokens had begun another block."""
    blocks, one, drafts = speculating(5, prompt=5)
    accept(blocks, one, drafts, 2)
    assert one.computed == 8
    assert blocks.pool.find(one.chain.entries[1], STATE) == drafts[1]


def test_draft_tokens_need_room_for_their_states():
    blocks, one, _ = speculating(3, num_pages=3 + 2 + 6)
    assert blocks.states.num_affordable == 0
    assert blocks.extend(one, 9, num_states=1) is None
    sched, store = scheduler(9, 4, 1, 16, kinds=(FULL, StateKind(5)), draft_tokens=4)
    finish(sched, store, request(0, [1, 2, 1, 2, 1, 2], max_tokens=8))
    assert (sched.stats.draft_tokens, sched.stats.recomputed) == (0, 0)


def test_states_of_a_sequence_that_ended_before_the_commit_are_freed():
    blocks, one, _ = speculating(3)
    blocks.free(one)
    blocks.check([])
    blocks.states.free_drafts()
    blocks.check([])
    assert blocks.pool.num_used == 0
