"""The host's pool: evicted blocks and swapped requests come back with their content."""

import pytest

from tests.support.scheduler_stress import request, rivals, scheduler
from tests.support.shadow import ShadowStore, expected_tokens, finish


def test_evicted_block_is_restored_from_host():
    sched = scheduler(num_blocks=8, host=16)
    store = ShadowStore(sched, 5)
    first = request(0, range(100, 118), max_tokens=3)
    finish(sched, store, first, request(1, range(200, 228), max_tokens=3))
    assert sched.stats.evictions > 0
    again = request(2, first.prompt_token_ids, max_tokens=3)
    computed = sched.stats.cached_tokens
    assert finish(sched, store, again)[2, 0] == expected_tokens(first, 0, 5)
    assert sched.stats.cached_tokens - computed == 17
    assert sched.stats.host_tokens > 0
    moved = sched.stats.moves_in
    finish(sched, store, request(3, first.prompt_token_ids, max_tokens=3))
    assert sched.stats.moves_in == moved  # the blocks are on the device now


def test_partial_hit_on_host_is_copied_to_device():
    sched = scheduler(num_blocks=6, host=16)
    store = ShadowStore(sched, 5)
    finish(sched, store, request(0, range(100, 109)), request(1, range(200, 223), max_tokens=1))
    other = request(2, [*range(100, 106), 7, 7, 7])
    assert finish(sched, store, other)[2, 0] == expected_tokens(other, 0, 5)
    assert sched.stats.host_tokens == 6


@pytest.mark.parametrize("caching", [True, False])
def test_swapped_request_is_not_recomputed(caching):
    sched = scheduler(num_blocks=14, host=32, caching=caching)
    store = ShadowStore(sched, 97)
    for one in rivals():
        sched.add(one)
    computed, outputs = 0, {}
    while sched.has_work:
        plan = sched.schedule()
        computed += plan.num_tokens
        for delta in sched.commit(plan, store.run(plan)):
            outputs.setdefault((delta.key, delta.sample), []).extend(delta.token_ids)
        sched.check()
    assert sched.stats.swapped > 0
    assert sched.stats.recomputed == 0
    assert computed == 12 + 19 + 9 + 2 * 19
    for one in rivals():
        for index in range(one.sampling.n):
            assert outputs[one.key, index] == expected_tokens(one, index, 97)


def test_failed_swap_out_loses_no_token():
    """The request that was being swapped out is recomputed; the requests of the step end."""
    sched = scheduler(num_blocks=14, host=32, caching=False)
    store = ShadowStore(sched, 97)
    old, new = rivals()
    sched.add(old)
    sched.add(new)
    outputs = {}
    while True:
        plan = sched.schedule()
        if plan.moves_out:
            break
        for delta in sched.commit(plan, store.run(plan)):
            outputs.setdefault((delta.key, delta.sample), []).extend(delta.token_ids)
    assert [delta.key for delta in sched.fail(plan, "out of order")] == [0]
    sched.check()
    for key, tokens in finish(sched, store).items():
        outputs[key] += tokens
    assert [outputs[1, index] for index in range(2)] == [expected_tokens(new, index, 97) for index in range(2)]


def test_swapped_request_can_be_aborted():
    sched = scheduler(num_blocks=14, host=32)
    store = ShadowStore(sched, 97)
    for one in rivals():
        sched.add(one)
    while not sched.stats.swapped:
        plan = sched.schedule()
        sched.commit(plan, store.run(plan))
    assert sched.stats.host_used > 0
    assert sched.abort(1)
    sched.check()
    assert sched.stats.host_used == 0


def test_moves_that_no_step_has_done_are_dropped():
    """The device's contents are gone, so the host must not find them."""
    sched = scheduler(num_blocks=8, host=16)
    finish(sched, ShadowStore(sched, 5), request(0, range(100, 118), max_tokens=3))
    blocks = sched.blocks
    taken = blocks.allocate(blocks.num_available)
    assert blocks.host.index.blocks
    blocks.free(taken)
    sched.clear_cache()
    assert blocks.offload.take_moves_out() == ()
    assert not blocks.host.index.blocks and not blocks.pool.index.blocks
    assert not blocks.offload.has_unspilled
    sched.check()
