"""The host's pool: evicted blocks and swapped-out sequences come back with their content, in all kinds of layers."""

import pytest

from paged_backend.api.block_layout import FULL, WindowKind
from paged_backend.kv.content import BlockKey
from paged_backend.kv.ledger import NO_TRANSFERS
from paged_backend.kv.pages import NULL
from tests.support.block_managers import cached, compute, manager, sequence
from tests.support.scheduler_stress import request, rivals, scheduler, snapshot
from tests.support.shadow import FirstOfStride, ShadowStore, expected_tokens, finish

KINDS = (FULL, WindowKind(2, window=6), FirstOfStride(1, stride=8))


def evict(blocks):
    """Evict all cached blocks, and finish the moves."""
    blocks.pool.free_table(blocks.pool.allocate(blocks.pool.num_available))
    transfers = blocks.ledger.take()
    blocks.ledger.finish(transfers)
    return transfers.moves_out


def test_evicted_blocks_of_all_kinds_come_back():
    blocks = manager(60, kinds=KINDS, host=60)
    blocks.free(cached(blocks, range(24)))
    moves = evict(blocks)
    assert [sum(len(move.pages) == kind.pages for move in moves) for kind in KINDS[:2]] == [12, 6]
    assert blocks.host.num_cached == 6 * (1 + 2 + 1) and blocks.pool.num_used == blocks.pool.num_cached == 0
    one = sequence(blocks, range(25))
    hit = blocks.match(one, 25)
    assert hit.num_blocks == 6 and all(location.on_host for location in hit.locations)
    blocks.adopt(one, hit)
    moves = blocks.ledger.take()
    assert [[at for at, block in enumerate(table) if block != NULL] for table in one.tables] == [
        [0, 1, 2, 3, 4, 5],
        [4, 5],
        [0, 2, 4],
    ]
    assert len(moves.moves_in) == 6 + 2 + 3
    assert (one.usage.new, one.usage.from_host, one.usage.reused) == (6, 6, 0)
    assert blocks.match(sequence(blocks, range(25)), 25) == hit  # until they have arrived
    blocks.ledger.finish(moves)
    again = blocks.match(sequence(blocks, range(25)), 25)
    assert not any(location.on_host for location in again.locations)
    blocks.check([one])


def test_a_block_that_the_host_has_is_not_moved_again():
    blocks = manager(8, host=8)
    for _ in range(2):
        one = sequence(blocks, range(9))
        blocks.adopt(one, blocks.match(one, 9))
        assert compute(blocks, one)
        blocks.free(one)
        evict(blocks)
    assert (blocks.ledger.num_moves_out, blocks.ledger.num_moves_in) == (3, 2)


@pytest.mark.parametrize("done", [True, False])
def test_contents_of_a_failed_move_are_not_found(done):
    blocks = manager(8, host=8)
    blocks.free(cached(blocks, range(8)))
    blocks.pool.free_table(blocks.pool.allocate(8))
    out = blocks.ledger.take()
    assert len(out.moves_out) == 2
    assert not any(blocks.ledger.has_arrived(move.target) for move in out.moves_out)
    blocks.ledger.finish(out, done=done)
    one = sequence(blocks, range(9))
    hit = blocks.match(one, 9)
    assert hit.num_blocks == 2 * done
    blocks.adopt(one, hit)
    back = blocks.ledger.take()
    blocks.ledger.finish(back, done=False)
    blocks.free(one)
    assert blocks.pool.num_used == blocks.pool.num_cached == 0  # what failed to move in is not cached
    assert blocks.host.num_cached == 2 * done


def test_blocks_of_moves_stay_until_these_are_finished():
    blocks = manager(4, host=2)
    blocks.free(cached(blocks, range(8)))
    evict(blocks)
    one = sequence(blocks, range(9))
    blocks.adopt(one, blocks.match(one, 9))
    blocks.free(one)  # its request ends
    moves = blocks.ledger.take()
    assert (blocks.num_used, blocks.host.num_used) == (2, 2)
    assert blocks.host.allocate(1) is None
    blocks.ledger.finish(moves)
    assert (blocks.num_used, blocks.host.num_used) == (0, 0)
    assert blocks.match(sequence(blocks, range(9)), 9).num_blocks == 2


def test_a_partial_hit_from_the_host_is_not_indexed():
    """The sequence overwrites the rest of the block."""
    blocks = manager(8, host=8)
    blocks.free(cached(blocks, range(8)))
    evict(blocks)
    one = sequence(blocks, [0, 1, 2, 3, 4, 5, 9, 9])
    hit = blocks.match(one, 8)
    assert hit.partial[0].on_host and hit.partial_tokens == 2
    blocks.adopt(one, hit)
    blocks.ledger.finish(blocks.ledger.take())
    assert blocks.pool.entry(one.tables[0][1]) is None
    assert blocks.pool.entry(one.tables[0][0]) is not None


def test_cancelled_transfers_are_not_made():
    blocks = manager(8, host=8)
    blocks.free(cached(blocks, range(8)))
    evict(blocks)
    one, other = sequence(blocks, range(9)), sequence(blocks, range(5), key=1)
    for each in (one, other):
        blocks.adopt(each, blocks.match(each, len(each.tokens)))
    assert blocks.ledger.cancel(0) and not blocks.ledger.cancel(0)
    blocks.free(one)
    assert len(blocks.ledger.take().moves_in) == 1
    assert blocks.host.num_used == 1


# --- swapped-out sequences ------------------------------------------------------------------------------------------


def two_samples(blocks, tokens=22):
    """Return two samples that share a prompt, and differ after it."""
    one, other = cached(blocks, range(tokens)), sequence(blocks, range(tokens))
    blocks.fork(one, other)
    for token, each in enumerate((one, other)):
        each.tokens += [100 + token] * 5
        assert compute(blocks, each)
    return [one, other]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kinds", [(FULL,), KINDS])
def test_samples_are_swapped_out_and_in(kinds, caching):
    """What they share is moved once, and what the device still has is not moved back."""
    blocks = manager(80, kinds=kinds, host=80, caching=caching)
    samples = two_samples(blocks)
    before = [[[block != NULL for block in table] for table in one.tables] for one in samples]
    distinct = [{block for one in samples for block in one.tables[place]} - {NULL} for place in range(len(kinds))]
    pages = sum(kind.pages * len(held) for kind, held in zip(kinds, distinct, strict=True))
    assert blocks.num_used == pages and blocks.pool.num_shared > 0
    assert blocks.swap_out(samples)
    assert all(one.on_host for one in samples) and blocks.host.num_used == pages
    out = blocks.ledger.take()
    assert len(out.moves_out) == sum(map(len, distinct))
    blocks.check(samples)
    blocks.ledger.finish(out)
    assert (blocks.num_used, blocks.pool.num_cached > 0) == (0, caching)
    assert blocks.pages_to_swap_in(samples, samples) >= max(pages, blocks.layout.pages_for([27, 27], [0, 0], 5))
    moved = blocks.swap_in(samples)
    back = blocks.ledger.take()
    assert not any(one.on_host for one in samples) and blocks.num_used == pages
    assert moved == samples[0].usage.from_host == (2 if caching else 9)  # the last block of each is in no cache
    assert len(back.moves_in) == (2 * len(kinds) if caching else sum(map(len, distinct)))
    blocks.ledger.finish(back)
    assert [[[block != NULL for block in table] for table in one.tables] for one in samples] == before
    assert blocks.host.num_used == 0
    blocks.check(samples)


def test_swap_out_without_room_changes_nothing():
    blocks = manager(40, kinds=KINDS, host=20)
    samples = two_samples(blocks, tokens=30)
    before = snapshot(blocks), [one.tables for one in samples]
    assert blocks.host.num_available < blocks.num_used
    assert not blocks.swap_out(samples)
    assert (snapshot(blocks), [one.tables for one in samples]) == before
    assert not manager(8).swap_out([])


def test_the_source_of_a_swap_in_is_not_evicted_before_it_is_read():
    blocks = manager(8, host=2)
    one = cached(blocks, range(8))
    assert blocks.swap_out([one])
    blocks.ledger.finish(blocks.ledger.take())
    blocks.pool.free_table(blocks.pool.allocate(8))
    blocks.ledger.finish(blocks.ledger.take())
    blocks.swap_in([one])
    assert blocks.host.allocate(1) is None
    blocks.ledger.finish(blocks.ledger.take())
    assert blocks.host.allocate(1) is not None


def test_a_swapped_out_sequence_can_be_freed():
    blocks = manager(8, host=8)
    one = cached(blocks, range(10))
    assert blocks.swap_out([one])
    blocks.ledger.finish(blocks.ledger.take())
    blocks.free(one)
    assert (one.on_host, one.num_blocks, blocks.host.num_used, blocks.host.num_cached) == (False, 0, 0, 2)


# --- stores behind the host -----------------------------------------------------------------------------------------


def test_wanted_blocks_are_spilled_once_oldest_first():
    blocks = manager(16, kinds=(FULL, WindowKind(1, window=100)), host=16)
    one = cached(blocks, range(12))
    asked = []
    wanted = lambda key: asked.append((key.entry.tokens[0], key.kind)) or key.entry.tokens[0] != 4  # noqa: E731
    spilled = []
    for _ in range(4):
        moves = blocks.spill(wanted, 2)
        spilled += [(move.entry.tokens[0], blocks.host.kind_of(move.target)) for move in moves.moves_out]
        assert len(moves.moves_out) <= 2
        blocks.ledger.finish(moves)
    assert not blocks.has_unspilled
    assert asked == [(0, 0), (4, 0), (8, 0), (0, 1), (4, 1), (8, 1)]
    assert spilled == [(0, 0), (8, 0), (0, 1), (8, 1)]
    blocks.free(one)
    assert blocks.spill(wanted, 9) == NO_TRANSFERS


def test_blocks_that_the_host_has_are_not_spilled_again():
    blocks = manager(8, host=8)
    one = sequence(blocks, range(4))
    assert blocks.add_to_host(BlockKey(blocks.entry(one, 0))) is not None
    assert compute(blocks, one)
    asked = []
    assert blocks.spill(asked.append, 9) == NO_TRANSFERS
    assert asked == [] and not blocks.has_unspilled


def test_spilling_stops_when_the_host_is_full():
    blocks = manager(8, host=1)
    cached(blocks, range(8))
    assert len(blocks.spill(lambda key: True, 9).moves_out) == 1
    assert blocks.has_unspilled


def test_a_block_from_a_store_is_added_once_and_found():
    blocks = manager(8, kinds=(FULL, WindowKind(2, window=6)), host=4)
    one = sequence(blocks, range(9))
    keys = [BlockKey(blocks.entry(one, 0), kind) for kind in (0, 1)]
    added = [blocks.add_to_host(key) for key in keys]
    assert None not in added and blocks.host.num_cached == 3
    assert [blocks.add_to_host(key) for key in keys] == [None, None]
    assert [blocks.locate(key) for key in keys] == [(block, True) for block in added]
    assert blocks.match(one, 9).num_blocks == 1
    blocks.host.allocate(4)
    assert blocks.add_to_host(keys[0]) is None  # there is no room


def test_a_block_is_copied_to_the_host_on_request():
    blocks = manager(8, host=1)
    one = cached(blocks, range(8))
    first, second = (BlockKey(entry) for entry in one.chain.entries)
    block = blocks.copy_to_host(first)
    assert block is not None and not blocks.ledger.has_arrived(block)
    assert blocks.copy_to_host(second) is None  # its only block is being written
    assert blocks.copy_to_host(first) == block
    blocks.ledger.finish(blocks.ledger.take_moves_out())
    assert blocks.ledger.has_arrived(block)
    blocks.free(one)
    blocks.clear()
    assert (blocks.copy_to_host(first), blocks.copy_to_host(second)) == (block, None)


# --- with a scheduler -----------------------------------------------------------------------------------------------


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
        if plan.transfers.moves_out:
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
    taken = blocks.pool.allocate(blocks.pool.num_available)
    assert blocks.host.num_cached or blocks.host.num_used
    blocks.pool.free_table(taken)
    sched.clear_cache()
    assert blocks.ledger.take() == NO_TRANSFERS
    assert all(pool.num_used == pool.num_cached == 0 for pool in (blocks.host, blocks.pool))
    assert not blocks.has_unspilled
    sched.check()
